// What a model thought: open while it thinks, closed when it answers, and then as the user wants it.

import { element, icon } from "./dom.js";
import { MarkdownView } from "./markdown.js";
import { shownMs } from "./meter.js";

export class ReasoningView {
  #text = element("div", { class: "prose" });
  #title = element("span", {}, "Thinking…");
  #markdown = new MarkdownView(this.#text);
  #isOver = false;

  constructor() {
    const summary = element("summary", {}, icon("thought"), this.#title, icon("chevron"));
    this.node = element("details", { class: "reasoning", open: true }, summary, this.#text);
  }

  show({ reasoning, thoughtMs }, isOver) {
    this.#markdown.show(reasoning);
    if (!isOver || this.#isOver) return;
    this.#isOver = true;
    this.#title.textContent = `Thought for ${shownMs(thoughtMs)}`;
    this.node.open = false;
  }
}
