// A message of the user, and editing it in place.

import { copyButton } from "./clipboard.js";
import { button, element } from "./dom.js";
import { PictureTray } from "./picture_tray.js";
import { pictureImage } from "./picture_view.js";

/** Shows {text, pictures, numLost}. `on` has the callbacks edit(turn, text, pictures), pictureProblem. */
export class UserView {
  #turn;
  #on;

  constructor(turn, on) {
    this.#turn = turn;
    this.#on = on;
    this.node = element("article", { class: "turn user", "aria-label": "You" });
    this.#show();
  }

  edit() {
    const area = element("textarea", { rows: "2", "aria-label": "Edit the message" });
    area.value = this.#turn.text;
    const tray = new PictureTray(area, this.#on.pictureProblem, this.#turn.pictures);
    const save = async () => {
      await tray.reading;
      if (!area.isConnected) return; // cancelled, or sent, meanwhile
      if (area.value.trim() || tray.pictures.length) this.#on.edit(this.#turn, area.value, tray.pictures);
    };
    const cancel = () => {
      this.#show();
      this.node.querySelector(".edit").focus();
    };
    area.addEventListener("keydown", (event) => onKey(event, save, cancel));
    const actions = element(
      "div",
      { class: "row end" },
      tray.button,
      button("close", "Cancel", cancel, { shown: true, class: "button quiet small" }),
      button("send", "Send", save, { shown: true, class: "button primary small" }),
    );
    const editor = element("div", { class: "editor" }, tray.node, area, actions);
    tray.takeDrops(editor);
    this.node.replaceChildren(editor);
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
    this.node.replaceChildren(this.#message(), actions);
    this.node.classList.remove("editing");
  }

  #message() {
    const { text, pictures, numLost } = this.#turn;
    const bubble = element("div", { class: "bubble" }, text);
    if (!pictures.length && !numLost) return bubble;
    return element(
      "div",
      { class: "message" },
      pictures.length ? element("div", { class: "pictures" }, pictures.map((one) => pictureImage(one))) : null,
      text.trim() ? bubble : null,
      numLost ? element("p", { class: "notice" }, lost(numLost)) : null,
    );
  }
}

function lost(number) {
  const [what, verb] = number === 1 ? ["A picture", "is"] : [`${number} pictures`, "are"];
  return `${what} of this message did not fit into the tab's storage and ${verb} no longer sent.`;
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
