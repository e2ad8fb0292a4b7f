// What went wrong, what the server said about it, and what to do.

import { button, element, icon } from "./dom.js";

/** Return the block for an error. `remedies` are buttons. */
export function errorBlock(error, remedies = []) {
  const facts = [error.status || null, error.code, error.requestId ? `request ${error.requestId}` : null].filter(
    Boolean,
  );
  return element(
    "div",
    { class: "error", role: "alert" },
    icon("alert"),
    element(
      "div",
      {},
      element("p", { class: "error-text" }, error.message),
      facts.length ? element("p", { class: "note" }, facts.join(" · ")) : null,
      element("div", { class: "row" }, remedies),
    ),
  );
}

/** Return a button for an error block. */
export function remedy(name, label, onclick) {
  return button(name, label, onclick, { shown: true, class: "button quiet small" });
}
