// Copying, with and without the clipboard API: browsers offer it on https and localhost only.

import { announce } from "./announcer.js";
import { button, icon } from "./dom.js";

const SHOWN_MS = 1500;

/** Return a button that copies what `text()` returns, and says so. */
export function copyButton(label, text) {
  const made = button(
    "copy",
    label,
    async () => {
      const isCopied = await copy(text());
      announce(isCopied ? "Copied" : "Copying failed: select the text and copy it by hand");
      made.replaceChildren(icon(isCopied ? "check" : "alert"));
      setTimeout(() => made.replaceChildren(icon("copy")), SHOWN_MS);
    },
    { class: "button icon-only small copy" },
  );
  return made;
}

async function copy(text) {
  if (navigator.clipboard)
    return navigator.clipboard.writeText(text).then(
      () => true,
      () => copyBySelection(text),
    );
  return copyBySelection(text);
}

function copyBySelection(text) {
  const before = document.activeElement;
  const area = document.createElement("textarea");
  area.value = text;
  area.className = "visually-hidden";
  (before?.closest("dialog") ?? document.body).append(area); // a modal dialog lets nothing outside be selected
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  before?.focus();
  return isCopied;
}
