// The chat: one answer at a time, from a request to its end, and what leads to the next.

import { announce } from "./announcer.js";
import { streamChat, streamResponse } from "./api.js";
import { Conversation } from "./conversation.js";
import { Meter } from "./meter.js";
import { contentOf } from "./picture.js";
import { buildRequest } from "./request.js";
import { asResponse } from "./responses.js";
import { Thread } from "./thread.js";

const EXAMPLE = "Hello!";

/**
 * `parts` are models, settings, composer (made later: a function), key dialog; `onUsage(usage)` after each answer,
 * `onKept(id, previous, title)` after one that the server keeps.
 */
export class Chat {
  #conversation = new Conversation();
  #thread;
  #models;
  #settings;
  #composer;
  #abort = null; // of the answer under way
  #onUsage;
  #onKept;

  constructor({ models, settings, composer, keyDialog, onUsage, onKept }) {
    this.#models = models;
    this.#settings = settings;
    this.#composer = composer;
    this.#onUsage = onUsage;
    this.#onKept = onKept;
    this.#thread = new Thread({
      edit: (turn, text, pictures) => this.#edit(turn, text, pictures),
      pictureProblem: () => models.pictureProblem,
      retry: () => this.#retry(),
      results: (results) => this.#sendResults(results),
      key: () => keyDialog().ask(),
      example: ({ text, settings: values }) => {
        settings.apply(values);
        composer().write(text);
      },
    });
  }

  /** Show the conversation that the tab kept. */
  restore() {
    this.#conversation.restore();
    this.#showAll();
  }

  /** Show a conversation that the server kept, in place of this one. */
  open(turns, id) {
    this.clear();
    this.#conversation.takeUp(turns, id);
    this.#conversation.keep();
    this.#showAll();
  }

  #showAll() {
    for (const turn of this.#conversation.turns) {
      this.#thread.add(turn);
      this.#thread.show(turn, turn.rate);
    }
  }

  /** Stop, and keep what was said: the page ends. */
  leave() {
    this.#conversation.keep();
    this.stop();
  }

  get isBusy() {
    return this.#abort !== null;
  }

  /** Send a message; return false, and say why, when it can't be sent now. */
  send(text, pictures = []) {
    if (this.#conversation.waiting) {
      this.#thread.view(this.#conversation.waiting).focusCalls();
      announce("Enter the tool's result first");
      return false;
    }
    if (!this.#canSend(pictures)) return false;
    this.#thread.add(this.#conversation.addUser(text, pictures));
    this.#answer();
    return true;
  }

  stop() {
    this.#abort?.abort();
  }

  /** Begin anew. */
  clear() {
    this.stop();
    this.#conversation.clear();
    this.#conversation.keep();
    this.#thread.clear();
    this.#onUsage(null);
  }

  /** Open the user's last message for editing; return whether there is one. */
  editLast() {
    const turn = this.#conversation.lastUser;
    if (turn) this.#thread.view(turn).edit();
    return turn !== null;
  }

  /** Return the request that would be sent now, with this text and these pictures if there are any. */
  request(text = "", pictures = []) {
    const settings = this.#settings.values();
    const all = { previous: null, messages: this.#conversation.messages() };
    const { previous, messages } = settings.keep ? this.#conversation.sinceKept() : all;
    if (text || pictures.length) messages.push({ role: "user", content: contentOf(text, pictures) });
    else if (!messages.length) messages.push({ role: "user", content: EXAMPLE }); // of code that can be run
    const request = buildRequest(this.#models.name, messages, settings);
    return settings.keep ? asResponse(request, previous) : request;
  }

  /** Return why the conversation, up to a turn or whole, can't go to the chosen model with these pictures, or "". */
  pictureProblem(pictures = [], turn = null) {
    const seen = [...this.#conversation.pictures(turn), ...pictures];
    return seen.length ? this.#models.pictureProblem : "";
  }

  #canSend(pictures = []) {
    const problem = this.isBusy ? "An answer is under way" : this.#settings.goToProblem();
    const found = problem || (this.#models.name ? "" : "There is no model to ask");
    if (found) announce(found);
    return !found && this.#takesPictures(pictures);
  }

  /** Does the chosen model take the pictures? Says so when it does not. */
  #takesPictures(pictures, turn = null) {
    const problem = this.pictureProblem(pictures, turn);
    this.#composer().say(problem);
    return !problem;
  }

  #edit(turn, text, pictures) {
    this.stop();
    if (this.#settings.goToProblem() || !this.#takesPictures(pictures, turn)) return;
    this.#thread.remove(this.#conversation.cut(turn));
    this.#thread.add(this.#conversation.addUser(text, pictures));
    this.#composer().focus();
    this.#answer();
  }

  #retry() {
    if (!this.#canSend()) return;
    this.#thread.remove(this.#conversation.cut(this.#conversation.last));
    this.#composer().focus();
    this.#answer();
  }

  #sendResults(results) {
    const answer = this.#conversation.waiting;
    if (!answer || !this.#canSend()) return;
    answer.calls.forEach((call, at) => (call.result = results[at]));
    this.#thread.show(answer, answer.rate);
    this.#composer().focus();
    this.#answer();
  }

  async #answer() {
    const request = this.request();
    const abort = (this.#abort = new AbortController());
    const answer = this.#conversation.addAnswer(Boolean(request.response_format ?? request.text));
    this.#thread.add(answer);
    this.#composer().setBusy(true);
    const meter = new Meter();
    const painter = new Painter(() => this.#thread.show(answer, meter.summary(answer)));
    try {
      const isKept = "input" in request;
      for await (const chunks of (isKept ? streamResponse : streamChat)(request, abort.signal)) {
        meter.note(chunks.reduce((sum, chunk) => sum + answer.add(chunk), 0));
        painter.request();
      }
    } catch (error) {
      if (abort.signal.aborted) answer.isStopped = true;
      else answer.error = error;
    }
    painter.cancel();
    if (answer.keptAs) this.#onKept(answer.keptAs, request.previous_response_id ?? null, this.#conversation.title);
    this.#ended(answer, meter, abort);
  }

  #ended(answer, meter, abort) {
    answer.isStreaming = false;
    answer.rate = meter.summary(answer);
    this.#composer().warnOfLoss(this.#conversation.keep());
    this.#thread.show(answer, answer.rate);
    if (this.#abort !== abort) return; // another has begun meanwhile
    this.#abort = null;
    this.#composer().setBusy(false);
    if (answer.usage) this.#onUsage(answer.usage);
    if (answer.isWaiting && this.#composer().hasFocus && this.#composer().isEmpty)
      this.#thread.view(answer).focusCalls();
  }
}

/** Paints at most once a frame, however fast chunks come. */
class Painter {
  #paint;
  #frame = null;

  constructor(paint) {
    this.#paint = paint;
  }

  request() {
    this.#frame ??= requestAnimationFrame(() => {
      this.#frame = null;
      this.#paint();
    });
  }

  cancel() {
    if (this.#frame !== null) cancelAnimationFrame(this.#frame);
  }
}
