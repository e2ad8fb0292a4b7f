// The pictures that will go along with a message: chosen, pasted or dropped, shown small, each removable.

import { announce } from "./announcer.js";
import { button, element } from "./dom.js";
import { KINDS, readPicture } from "./picture.js";
import { thumbnail } from "./picture_view.js";

/**
 * `node` shows the pictures and what is wrong, `button` asks for files. `area` is the text they go along with,
 * `problem()` says why none can be taken: "" when they can.
 */
export class PictureTray {
  #area;
  #problem;
  #pictures;
  #reading = null; // a promise, while files are read
  #list = element("ul", { class: "thumbnails", "aria-label": "Attached pictures" });
  #note = element("p", { class: "note", role: "status" });
  #input = element("input", { type: "file", class: "file", accept: KINDS.join(), multiple: true, hidden: true });

  constructor(area, problem, pictures = []) {
    this.#area = area;
    this.#problem = problem;
    this.#pictures = [...pictures];
    this.button = button("picture", "Attach pictures", () => this.#input.click(), { class: "button icon-only attach" });
    this.button.title = "Attach pictures (or paste or drop them)";
    this.node = element("div", { class: "tray" }, this.#list, this.#note, this.#input);
    this.#input.addEventListener("change", () => this.#choose());
    area.addEventListener("paste", (event) => this.#paste(event));
    this.#show();
  }

  get pictures() {
    return this.#pictures;
  }

  /** Resolves when all files are read; null when none is being read. */
  get reading() {
    return this.#reading;
  }

  clear() {
    this.#pictures = [];
    this.say("");
    this.#show();
  }

  /** Show a line below the pictures; it is read out. */
  say(text) {
    this.#note.textContent = text;
  }

  /** Take what is dropped on this element. */
  takeDrops(target) {
    target.addEventListener("dragover", (event) => hasFiles(event) && mark(event, target, true));
    target.addEventListener("dragleave", (event) => target.contains(event.relatedTarget) || unmark(target));
    target.addEventListener("drop", (event) => {
      if (!hasFiles(event)) return;
      mark(event, target, false);
      if (!this.#area.offsetParent) return; // the page shows something else than the chat
      this.add([...event.dataTransfer.files]);
      this.#area.focus();
    });
  }

  /** Read files, one after the other; what can't be taken is said, and the others are. */
  add(files) {
    const problem = this.#problem();
    if (problem) return this.say(problem);
    const reading = (this.#reading ?? Promise.resolve()).then(() => this.#read(files));
    this.#reading = reading;
    reading.finally(() => {
      if (this.#reading === reading) this.#reading = null;
    });
  }

  async #read(files) {
    const problems = [];
    for (const file of files) {
      try {
        this.#pictures.push(await readPicture(file));
        announce(`Attached: ${this.#pictures.at(-1).name}`);
      } catch (error) {
        problems.push(error.message);
      }
    }
    this.say(problems.join(" "));
    this.#show();
  }

  #choose() {
    this.add([...this.#input.files]);
    this.#input.value = ""; // the same file may be chosen again
    this.#area.focus();
  }

  #paste(event) {
    const { files, types } = event.clipboardData;
    if (!files.length || types.includes("text/plain")) return; // a table has both: its text is meant
    event.preventDefault();
    this.add([...files]);
  }

  #remove(picture) {
    const at = this.#pictures.indexOf(picture);
    this.#pictures.splice(at, 1);
    this.say("");
    this.#show();
    announce(`Removed: ${picture.name}`);
    const left = this.#list.querySelectorAll(".remove");
    (left[Math.min(at, left.length - 1)] ?? this.#area).focus();
  }

  #show() {
    this.#list.replaceChildren(...this.#pictures.map((one) => thumbnail(one, () => this.#remove(one))));
    this.#list.hidden = !this.#pictures.length;
  }
}

function hasFiles(event) {
  return event.dataTransfer.types.includes("Files");
}

function mark(event, target, isOver) {
  event.preventDefault(); // the browser would open the file in place of the page
  event.stopPropagation();
  target.classList.toggle("dropping", isOver);
}

function unmark(target) {
  target.classList.remove("dropping");
}
