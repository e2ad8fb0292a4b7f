// Asks for the API key. It is kept for the tab (api.js) and shown nowhere.

import { apiKey, listModels } from "./api.js";
import { button, byId } from "./dom.js";

/** The dialog, and the key's place in the settings. `onKey` is called with a key that works, or without one. */
export class KeyDialog {
  #dialog = byId("key-dialog");
  #input = byId("key");
  #problem = byId("key-problem");
  #onKey;

  constructor(onKey) {
    this.#onKey = onKey;
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#try();
    });
    byId("key-cancel").addEventListener("click", () => this.#dialog.close());
    const change = button("key", "Set key", () => this.ask(), {
      shown: true,
      class: "button quiet small",
      id: "set-key",
    });
    const forget = button("close", "Forget", () => this.#forget(), {
      shown: true,
      class: "button quiet small",
      id: "forget-key",
    });
    byId("key-actions").append(change, forget);
    this.#show();
  }

  /** Open it; `problem` says why the key before did not do. */
  ask(problem = "") {
    this.#problem.textContent = problem;
    this.#input.value = "";
    if (!this.#dialog.open) this.#dialog.showModal();
    this.#input.focus();
  }

  async #try() {
    const before = apiKey.get();
    const key = this.#input.value.trim();
    if (!isHeaderText(key)) return this.ask("A key has letters, digits and signs only, without spaces.");
    apiKey.set(key);
    try {
      await listModels();
    } catch (error) {
      if (before) apiKey.set(before);
      else apiKey.forget();
      return this.ask(error.message);
    }
    this.#dialog.close();
    this.#show();
    this.#onKey();
  }

  #forget() {
    apiKey.forget();
    this.#show();
    this.#onKey();
  }

  #show() {
    byId("key-state").textContent = apiKey.get() ? "A key is set for this tab." : "No key is set.";
    byId("forget-key").hidden = !apiKey.get();
  }
}

/** Other characters can't stand in a header: fetch would refuse them. */
function isHeaderText(text) {
  return /^[\x21-\x7e]+$/.test(text);
}
