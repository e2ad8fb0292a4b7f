// A message of the user, and editing it in place.

import { copyButton } from "./clipboard.js";
import { button, element } from "./dom.js";

/** Shows {text}. `onEdit(text)` is called when another text is to be sent instead. */
export class UserView {
  #turn;
  #onEdit;

  constructor(turn, onEdit) {
    this.#turn = turn;
    this.#onEdit = onEdit;
    this.node = element("article", { class: "turn user", "aria-label": "You" });
    this.#show();
  }

  edit() {
    const area = element("textarea", { rows: "2", "aria-label": "Edit the message" });
    area.value = this.#turn.text;
    const save = () => area.value.trim() && this.#onEdit(area.value);
    const cancel = () => {
      this.#show();
      this.node.querySelector(".edit").focus();
    };
    area.addEventListener("keydown", (event) => onKey(event, save, cancel));
    const actions = element(
      "div",
      { class: "row end" },
      button("close", "Cancel", cancel, { shown: true, class: "button quiet small" }),
      button("send", "Send", save, { shown: true, class: "button primary small" }),
    );
    this.node.replaceChildren(element("div", { class: "editor" }, area, actions));
    this.node.classList.add("editing");
    area.focus();
  }

  #show() {
    const actions = element(
      "div",
      { class: "actions" },
      button("edit", "Edit and send again", () => this.edit(), { class: "button icon-only small edit" }),
      copyButton("Copy message", () => this.#turn.text),
    );
    this.node.replaceChildren(element("div", { class: "bubble" }, this.#turn.text), actions);
    this.node.classList.remove("editing");
  }
}

function onKey(event, save, cancel) {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    save();
  } else if (event.key === "Escape") {
    event.stopPropagation(); // it does not stop an answer as well
    cancel();
  }
}
