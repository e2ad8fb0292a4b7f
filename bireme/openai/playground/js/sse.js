// Server-sent events from bytes, however they were cut: several events a chunk, an event or a character over two.

const LINE_END = /\r\n|\n|\r/;

/** Takes text in pieces and returns the events that are complete: the joined `data` lines of each. */
export class EventParser {
  #rest = "";
  #data = [];

  feed(text) {
    this.#rest += text;
    // A carriage return at the end may be half of a line end.
    const held = this.#rest.endsWith("\r") ? 1 : 0;
    const lines = this.#rest.slice(0, this.#rest.length - held).split(LINE_END);
    this.#rest = lines.pop() + this.#rest.slice(this.#rest.length - held);
    return lines.map((line) => this.#line(line)).filter((event) => event !== null);
  }

  #line(line) {
    if (line === "") {
      const event = this.#data.length ? this.#data.join("\n") : null;
      this.#data = [];
      return event;
    }
    if (line.startsWith("data:")) this.#data.push(line.slice(line[5] === " " ? 6 : 5));
    return null; // comments and other fields
  }
}

/** Yield the events of a response body, an array for each chunk that came from the network. */
export async function* eventsOf(body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  const parser = new EventParser();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const events = parser.feed(decoder.decode(value, { stream: true }));
      if (events.length) yield events;
    }
  } finally {
    reader.cancel().catch(() => {}); // it may have failed already
  }
}
