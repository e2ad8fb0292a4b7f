// Conversations that the server keeps: the page remembers which they are, the server what was said in them.

import { forgetResponse, keptItems } from "./api.js";
import { button, byId, element } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";
import { turnsOf } from "./responses.js";
import { recall, remember } from "./storage.js";

const MAX_KEPT = 50;
const MAX_TITLE = 60;

/** The list in the settings. `onOpen(turns, id)` shows a conversation; `id` is that of its last answer. */
export class History {
  #list = byId("kept-list");
  #onOpen;

  constructor(onOpen) {
    this.#onOpen = onOpen;
    this.#show();
  }

  /** Remember an answer, the last one of its conversation now; `previous` is the one before it, or null. */
  note(id, previous, title) {
    const others = this.#entries().filter((entry) => entry.id !== previous);
    this.#keep([{ id, title: title.trim().slice(0, MAX_TITLE) || "A conversation" }, ...others].slice(0, MAX_KEPT));
  }

  #entries() {
    return recall("kept", []);
  }

  #keep(entries) {
    remember("kept", entries.length ? entries : null);
    this.#show();
  }

  #forget(id) {
    this.#keep(this.#entries().filter((entry) => entry.id !== id));
  }

  #show() {
    const rows = this.#entries().map((entry) => {
      const open = element("button", { type: "button", class: "kept", onclick: () => this.#open(entry) }, entry.title);
      return element("li", {}, open, button("close", `Delete: ${entry.title}`, () => this.#delete(entry)));
    });
    this.#list.replaceChildren(...rows);
    byId("kept-none").hidden = rows.length > 0;
  }

  #open(entry) {
    return this.#attempt(entry, async () => this.#onOpen(turnsOf(await keptItems(entry.id)), entry.id));
  }

  #delete(entry) {
    return this.#attempt(entry, async () => {
      await forgetResponse(entry.id);
      this.#forget(entry.id);
    });
  }

  async #attempt({ id }, work) {
    const problem = byId("kept-problem");
    problem.replaceChildren();
    try {
      await work();
    } catch (error) {
      const forget = () => {
        this.#forget(id);
        problem.replaceChildren();
      };
      problem.append(errorBlock(error, [remedy("close", "Remove from the list", forget)]));
    }
  }
}
