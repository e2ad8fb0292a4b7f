// What a planner has decided lately: when, what, why.

import { element } from "./dom.js";

const NAMES = { hold: "Held", same: "As it is", up: "More workers", down: "Fewer workers", both: "Moved" };

export function planRow({ at, result, acts, text }) {
  return element(
    "li",
    { class: "plan" },
    element("span", { class: "fault-time" }, new Date(at * 1000).toLocaleTimeString("en", { hour12: false })),
    element("strong", {}, NAMES[result] ?? result, acts ? "" : " (advice)"),
    element("span", { class: "fault-reason" }, text),
  );
}
