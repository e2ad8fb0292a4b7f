// A conversation: the user's turns and the answers, and what of them goes into the next request.

import { Answer } from "./answer.js";
import { contentOf } from "./picture.js";
import { recall, remember, tabStorage } from "./storage.js";

/** Turns are {text, pictures, numLost} of the user, or Answer. */
export class Conversation {
  turns = [];

  /** Take up what the tab kept. */
  restore() {
    const kept = recall("conversation", [], tabStorage());
    this.turns = kept.map((turn) => ("text" in turn ? userTurn(turn) : Answer.from(turn)));
  }

  /**
   * Keep it in the tab, over reloads of the page; return how many pictures there is no room for. The oldest go first,
   * and turns that lost some say so when they are restored.
   */
  keep() {
    let kept = this.turns;
    let numLost = 0;
    while (!remember("conversation", kept.length ? kept : null, tabStorage())) {
      const at = kept.findIndex((turn) => turn.pictures?.length);
      if (at < 0) break;
      numLost += kept[at].pictures.length;
      kept = kept.with(at, withoutPictures(kept[at]));
    }
    return numLost;
  }

  addUser(text, pictures = []) {
    const turn = userTurn({ text, pictures: [...pictures] });
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

  /** Return the pictures of all turns before this one, or of all. */
  pictures(turn = null) {
    const before = turn ? this.turns.slice(0, this.turns.indexOf(turn)) : this.turns;
    return before.flatMap((one) => one.pictures ?? []);
  }

  /** Return the messages of the next request. */
  messages() {
    return messagesOf(this.turns);
  }

  /** Return the id of the last answer that the server keeps, or null, and the messages since. */
  sinceKept() {
    const at = this.turns.findLastIndex((turn) => turn.keptAs);
    if (at < 0) return { previous: null, messages: this.messages() };
    const { keptAs: previous } = this.turns[at];
    return { previous, messages: [...this.turns[at].results(), ...messagesOf(this.turns.slice(at + 1))] };
  }

  /** Take up a conversation that the server has kept; `id` is that of its last answer. */
  takeUp(turns, id) {
    this.turns = turns.map((turn) => ("text" in turn ? userTurn(turn) : Answer.from({ ...turn, isStreaming: false })));
    if (this.last instanceof Answer) this.last.keptAs = id;
  }

  get title() {
    return this.turns.find((turn) => turn.text)?.text ?? "";
  }
}

function messagesOf(turns) {
  return turns.flatMap((turn) =>
    turn instanceof Answer ? turn.messages() : [{ role: "user", content: contentOf(turn.text, turn.pictures) }],
  );
}

function userTurn({ text, pictures = [], numLost = 0 }) {
  return { text, pictures, numLost };
}

function withoutPictures({ text, pictures, numLost }) {
  return { text, pictures: [], numLost: numLost + pictures.length };
}
