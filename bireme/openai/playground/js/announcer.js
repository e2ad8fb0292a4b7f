// What screen readers say. A growing answer is told by the sentence: by the token it would be noise.

const SENTENCE = /[.!?:。！？](?=\s)|\n/g;

/** Say something once what is being said has ended. */
export function announce(text) {
  const line = document.createElement("p");
  line.textContent = text;
  const region = document.getElementById("announcer");
  region.append(line);
  while (region.childElementCount > 8) region.firstElementChild.remove();
}

/** Tells a growing text. */
export class SentenceAnnouncer {
  #told = 0;

  /** Take the text so far; its last sentence waits until it is whole, or `isLast`. */
  tell(text, isLast = false) {
    const end = isLast ? text.length : lastEnd(text);
    const fresh = text.slice(this.#told, end).trim();
    if (end <= this.#told) return;
    this.#told = end;
    if (fresh) announce(fresh);
  }
}

function lastEnd(text) {
  return [...text.matchAll(SENTENCE)].at(-1)?.index + 1 || 0;
}
