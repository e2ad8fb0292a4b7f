// Where the user writes: one button that sends or stops, and what will go along with the message.

import { byId, element, icon } from "./dom.js";
import { PictureTray } from "./picture_tray.js";
import { parseTools } from "./tools.js";

const MAX_HEIGHT_PX = 240;

/** `on` has the callbacks send(text, pictures), stop, editLast, clear(setting values), pictureProblem. */
export class Composer {
  #area = byId("prompt");
  #send = byId("send");
  #chips = byId("chips");
  #tray;
  #on;
  #isBusy = false;

  constructor(on) {
    this.#on = on;
    this.#tray = new PictureTray(this.#area, on.pictureProblem);
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
    this.#area.addEventListener("keydown", (event) => this.#key(event));
    this.#area.addEventListener("input", () => this.#fit());
    byId("chips").after(this.#tray.node, this.#tray.button);
    this.#tray.takeDrops(document.body);
    this.setBusy(false);
  }

  /** While busy the button stops the answer. */
  setBusy(isBusy) {
    this.#isBusy = isBusy;
    const label = isBusy ? "Stop" : "Send";
    this.#send.replaceChildren(icon(isBusy ? "stop" : "send"));
    this.#send.setAttribute("aria-label", label);
    this.#send.title = isBusy ? "Stop (Esc)" : "Send (Enter)";
    this.#send.classList.toggle("busy", isBusy);
  }

  write(text) {
    this.#area.value = text;
    this.#fit();
    this.#area.focus();
  }

  focus() {
    this.#area.focus();
  }

  get hasFocus() {
    return document.activeElement === this.#area;
  }

  get isEmpty() {
    return !this.#area.value.trim() && !this.#tray.pictures.length;
  }

  /** The pictures that the next message takes along. */
  get pictures() {
    return this.#tray.pictures;
  }

  /** Show a line with the message; "" takes it away. */
  say(text) {
    this.#tray.say(text);
  }

  /** Say that so many pictures are lost when the page is loaded again; 0: say nothing. */
  warnOfLoss(number) {
    const what = number === 1 ? "One picture is" : `${number} pictures are`;
    if (number) this.say(`${what} too large to be kept when this page is loaded again.`);
  }

  /** Show which settings change what is sent; each can be taken away here. */
  showSettings({ format, effort, tools: text, system }) {
    const { tools } = parseTools(text);
    const chips = [
      tools.length
        ? ["tool", tools.length === 1 ? tools[0].function.name : `${tools.length} tools`, { tools: "" }]
        : null,
      format === "text" ? null : ["code", format === "json_object" ? "JSON object" : "JSON schema", { format: "text" }],
      effort && effort !== "none" ? ["thought", `Thinks: ${effort}`, { effort: "" }] : null,
      system.trim() ? ["sliders", "System prompt", { system: "" }] : null,
    ].filter(Boolean);
    this.#chips.replaceChildren(...chips.map((chip) => this.#chip(...chip)));
    this.#chips.hidden = !chips.length;
  }

  #chip(name, label, cleared) {
    const remove = () => {
      this.#on.clear(cleared);
      this.#area.focus();
    };
    const cross = element(
      "button",
      { type: "button", "aria-label": `Remove: ${label}`, title: "Remove", onclick: remove },
      icon("close"),
    );
    return element("span", { class: "chip" }, icon(name), label, cross);
  }

  #key(event) {
    if (event.isComposing) return; // Enter ends the composition of a character
    if (event.key === "Enter" && !event.shiftKey) {
      event.preventDefault();
      if (!this.#isBusy) this.#submit();
    } else if (event.key === "ArrowUp" && !this.#area.value && this.#on.editLast()) event.preventDefault();
  }

  #submit() {
    if (this.#isBusy) this.#on.stop();
    else if (this.#tray.reading) this.#tray.reading.then(() => this.#isBusy || this.#submit());
    else if (!this.isEmpty && this.#on.send(this.#area.value, this.#tray.pictures)) {
      this.#tray.clear();
      this.write("");
    }
  }

  #fit() {
    this.#area.style.height = "auto";
    this.#area.style.height = `${Math.min(this.#area.scrollHeight, MAX_HEIGHT_PX)}px`;
  }
}
