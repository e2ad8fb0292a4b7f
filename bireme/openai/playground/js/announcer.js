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

  /** Take a text that nobody waits for. */
  skip(text) {
    this.#told = text.length;
  }

  /** Take the text so far; its last sentence waits until it is whole, or `isLast`. */
  tell(text, isLast = false) {
    const fresh = text.slice(this.#told);
    const end = isLast ? fresh.length : lastEnd(fresh);
    if (!end) return;
    this.#told += end;
    const said = fresh.slice(0, end).trim();
    if (said) announce(said);
  }
}

function lastEnd(text) {
  return [...text.matchAll(SENTENCE)].at(-1)?.index + 1 || 0;
}
