// The settings panel beside the chat, or over it where the page is narrow.

import { byId } from "./dom.js";
import { recall, remember } from "./storage.js";

const NARROW = matchMedia("(max-width: 900px)");

/** Opens and closes the panel; where it lies over the chat, Escape closes it and the chat can't be reached. */
export class Panel {
  #panel = byId("settings");
  #toggle = byId("toggle-settings");

  constructor() {
    this.#toggle.addEventListener("click", () => this.#set(this.#panel.hidden));
    byId("close-settings").addEventListener("click", () => this.close());
    NARROW.addEventListener("change", () => this.#set(this.#wanted));
    this.#set(this.#wanted);
  }

  /** Close it and return true, if it lies over the chat. */
  closeIfOver() {
    const isOver = NARROW.matches && !this.#panel.hidden;
    if (isOver) this.close();
    return isOver;
  }

  open() {
    if (this.#panel.hidden) this.#set(true);
  }

  close() {
    this.#set(false);
    this.#toggle.focus();
  }

  get #wanted() {
    return !NARROW.matches && recall("panel", true);
  }

  #set(isOpen) {
    this.#panel.hidden = !isOpen;
    this.#toggle.setAttribute("aria-expanded", String(isOpen));
    document.body.classList.toggle("panel-over", isOpen && NARROW.matches);
    document.querySelector("main").inert = isOpen && NARROW.matches;
    if (!NARROW.matches) remember("panel", isOpen);
    else if (isOpen) byId("close-settings").focus();
  }
}
