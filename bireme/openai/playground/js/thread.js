// The conversation on the page: a view for each turn, and keeping to its end while an answer grows.

import { Answer } from "./answer.js";
import { AnswerView } from "./answer_view.js";
import { byId, element, icon } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { UserView } from "./user_view.js";

const NEAR_END_PX = 80;

/** `on` has callbacks: edit(turn, text, pictures), pictureProblem, retry, results(results), key, example(example). */
export class Thread {
  #node = byId("thread");
  #column = element("div", { class: "column" });
  #toEnd = byId("to-end");
  #views = new Map();
  #on;
  #follows = true; // does the end stay in view?
  #top = 0; // where it was scrolled to when that was decided

  constructor(on) {
    this.#on = on;
    this.#node.append(this.#column);
    this.#node.addEventListener("scroll", () => this.#note(), { passive: true });
    this.#toEnd.addEventListener("click", () => this.goToEnd());
    this.clear();
  }

  clear() {
    this.#views.clear();
    this.#column.replaceChildren(this.#welcome());
    this.#note();
  }

  add(turn) {
    const view = turn instanceof Answer ? new AnswerView(turn, this.#on) : new UserView(turn, this.#on);
    if (!this.#views.size) this.#column.replaceChildren();
    for (const other of this.#views.values()) other.age?.();
    this.#views.set(turn, view);
    this.#column.append(view.node);
    this.goToEnd();
    return view;
  }

  view(turn) {
    return this.#views.get(turn);
  }

  remove(turns) {
    for (const turn of turns) {
      this.#views.get(turn)?.node.remove();
      this.#views.delete(turn);
    }
  }

  /** Show a turn as it is now; `summary` is a meter's. */
  show(turn, summary) {
    if (this.#node.scrollTop !== this.#top) this.#note(); // the reader has scrolled, and its event is yet to come
    this.#views.get(turn)?.show?.(summary);
    if (this.#follows) this.#node.scrollTop = this.#node.scrollHeight;
    this.#note();
  }

  goToEnd() {
    this.#node.scrollTop = this.#node.scrollHeight;
    this.#note();
  }

  #note() {
    const left = this.#node.scrollHeight - this.#node.scrollTop - this.#node.clientHeight;
    this.#follows = left < NEAR_END_PX;
    this.#top = this.#node.scrollTop;
    this.#toEnd.hidden = this.#follows;
  }

  #welcome() {
    const cards = EXAMPLES.map((example) =>
      element(
        "button",
        { type: "button", class: "example", onclick: () => this.#on.example(example) },
        element("strong", {}, example.title),
        element("span", {}, example.text),
      ),
    );
    const mark = element("div", { class: "welcome-mark" }, icon("galley"));
    return element(
      "div",
      { class: "welcome" },
      mark,
      element("h2", {}, "What shall we try?"),
      element("div", { class: "examples" }, cards),
    );
  }
}
