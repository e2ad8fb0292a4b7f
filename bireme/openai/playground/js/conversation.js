// A conversation: the user's turns and the answers, and what of them goes into the next request.

import { Answer } from "./answer.js";
import { recall, remember, tabStorage } from "./storage.js";

/** Turns are {text} of the user, or Answer. */
export class Conversation {
  turns = [];

  /** Take up what the tab kept. */
  restore() {
    const kept = recall("conversation", [], tabStorage());
    this.turns = kept.map((turn) => ("text" in turn ? turn : Answer.from(turn)));
  }

  /** Keep it in the tab, over reloads of the page. */
  keep() {
    remember("conversation", this.turns.length ? this.turns : null, tabStorage());
  }

  addUser(text) {
    const turn = { text };
    this.turns.push(turn);
    return turn;
  }

  addAnswer(isJson) {
    const answer = new Answer();
    answer.isJson = isJson;
    this.turns.push(answer);
    return answer;
  }

  /** Remove a turn and all after it; return them. */
  cut(turn) {
    return this.turns.splice(this.turns.indexOf(turn));
  }

  clear() {
    this.turns = [];
  }

  get last() {
    return this.turns.at(-1) ?? null;
  }

  /** The answer whose calls wait for results, or null. */
  get waiting() {
    return this.last instanceof Answer && this.last.isWaiting ? this.last : null;
  }

  get lastUser() {
    return this.turns.findLast((turn) => !(turn instanceof Answer)) ?? null;
  }

  /** Return the messages of the next request. */
  messages() {
    return this.turns.flatMap((turn) =>
      turn instanceof Answer ? turn.messages() : [{ role: "user", content: turn.text }],
    );
  }
}
