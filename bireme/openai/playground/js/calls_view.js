// The tools that an answer calls: what with, and where the user enters what each returned.

import { button, element, icon } from "./dom.js";
import { codeBlock } from "./markdown.js";

/** Shows the calls of an answer. `onResults(results)` is called when all have one. */
export class CallsView {
  #shown = [];
  #onResults;
  #form;

  constructor(onResults) {
    this.#onResults = onResults;
    this.#form = element("form", {
      class: "calls",
      "aria-label": "Tool calls",
      onsubmit: (event) => this.#submit(event),
    });
    this.node = this.#form;
  }

  show(answer) {
    const state = JSON.stringify([answer.calls, answer.isWaiting]);
    if (state === this.#shown) return;
    this.#shown = state;
    const cards = answer.calls.map((call, at) => callCard(call, at, answer.isWaiting));
    const go = button("send", "Send results", () => {}, {
      shown: true,
      type: "submit",
      class: "button primary small send-results",
    });
    this.#form.replaceChildren(...cards, answer.isWaiting ? element("div", { class: "row" }, go, noteOf(answer)) : "");
  }

  focus() {
    this.#form.querySelector("textarea")?.focus();
  }

  #submit(event) {
    event.preventDefault();
    const areas = [...this.#form.querySelectorAll("textarea")];
    const empty = areas.find((area) => !area.value.trim());
    for (const area of areas) area.setAttribute("aria-invalid", String(!area.value.trim()));
    if (empty) empty.focus();
    else this.#onResults(areas.map((area) => area.value));
  }
}

function noteOf(answer) {
  return element(
    "span",
    { class: "note" },
    answer.calls.length > 1
      ? "The model goes on once every call has its result."
      : "The model goes on with the result.",
  );
}

function callCard(call, at, isWaiting) {
  const head = element(
    "div",
    { class: "call-head" },
    icon("tool"),
    element("span", {}, "Calls "),
    element("code", { class: "call-name" }, call.name),
  );
  return element(
    "div",
    { class: "call" },
    head,
    codeBlock(tidy(call.arguments), "arguments"),
    resultOf(call, at, isWaiting),
  );
}

function resultOf(call, at, isWaiting) {
  if (call.result !== null) return codeBlock(call.result, "result");
  if (!isWaiting) return null;
  const id = `result-${call.id}-${at}`;
  const area = element("textarea", {
    id,
    rows: "2",
    class: "mono",
    placeholder: '{"degrees": 3, "sky": "sunny"}',
    spellcheck: "false",
    onkeydown: onKey,
  });
  return element("div", { class: "field" }, element("label", { for: id }, `Result of ${call.name}`), area);
}

function onKey(event) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  event.target.form.requestSubmit();
}

function tidy(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // it is still growing, or not JSON
  }
}
