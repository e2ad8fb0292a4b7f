// Markdown inside a paragraph, as a tree: strings, and {type: code | strong | em | del | link | break}.
// Patterns have bounds, so that no text a model writes keeps the page busy.

const MAX_DEPTH = 6;
const SPECIAL = /[\\`*_~[!<\n]|https?:\/\//g;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const BARE_URL = /https?:\/\/[^\s<>"'`]{1,2000}/y;
const ANGLE_URL = /<(https?:\/\/[^\s<>]{1,2000})>/y;
const LABEL = String.raw`!?\[((?:[^[\]\\]|\\.|\[[^[\]]{0,200}\]){0,500})\]`;
const TITLE = String.raw`(?: {1,9}(?:"[^"]{0,200}"|'[^']{0,200}'))?`;
const LINK = new RegExp(String.raw`${LABEL}\( {0,9}<?([^\s<>]{0,2000}?)>?${TITLE} {0,9}\)`, "y");
const DELIMITERS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];
const SAFE = new Set(["http:", "https:", "mailto:"]);

/** Parse a paragraph's text. */
export function parseInline(text, depth = 0) {
  return depth < MAX_DEPTH ? new Scanner(text, depth).nodes() : [text];
}

/** Return an address that may stand in a link, else null. */
export function safeHref(address) {
  try {
    const url = new URL(address);
    return SAFE.has(url.protocol) ? url.href : null;
  } catch {
    return null;
  }
}

class Scanner {
  #nodes = [];
  #plain = "";
  #at = 0;
  #unclosed = new Set(); // delimiters that don't close after here: not searched for again

  constructor(text, depth) {
    this.text = text;
    this.depth = depth;
  }

  nodes() {
    while (this.#at < this.text.length) {
      SPECIAL.lastIndex = this.#at;
      const found = SPECIAL.exec(this.text);
      this.#take(found ? found.index - this.#at : this.text.length - this.#at);
      if (found) this.#special();
    }
    this.#flush();
    return this.#nodes;
  }

  #take(count) {
    this.#plain += this.text.slice(this.#at, this.#at + count);
    this.#at += count;
  }

  #flush() {
    if (this.#plain) this.#nodes.push(this.#plain);
    this.#plain = "";
  }

  #push(node, end) {
    this.#flush();
    this.#nodes.push(node);
    this.#at = end;
  }

  #special() {
    const readers = {
      "\\": this.#escape,
      "`": this.#code,
      "[": this.#link,
      "!": this.#link,
      "<": this.#angle,
      "\n": this.#newline,
    };
    const char = this.text[this.#at];
    const read = readers[char] ?? (char === "h" ? this.#bare : this.#emphasis);
    if (!read.call(this)) this.#take(1);
  }

  #escape() {
    const next = this.text[this.#at + 1];
    if (next === "\n") this.#push({ type: "break" }, this.#at + 2);
    else if (next && PUNCTUATION.test(next)) {
      this.#plain += next;
      this.#at += 2;
    } else return false;
    return true;
  }

  #newline() {
    this.#plain = this.#plain.trimEnd();
    this.#push({ type: "break" }, this.#at + 1);
    return true;
  }

  #code() {
    const end = codeEnd(this.text, this.#at);
    const size = runAt(this.text, this.#at);
    if (end === null) {
      this.#take(size);
      return true;
    }
    const inner = this.text.slice(this.#at + size, end - size).replaceAll("\n", " ");
    const isPadded = /^ .* $/.test(inner) && inner.trim();
    this.#push({ type: "code", text: isPadded ? inner.slice(1, -1) : inner }, end);
    return true;
  }

  #link() {
    LINK.lastIndex = this.#at;
    const found = LINK.exec(this.text);
    const href = found && safeHref(found[2]);
    if (!href) return false;
    const children = found[1] ? parseInline(found[1], this.depth + 1) : [found[2]];
    this.#push({ type: "link", href, children }, this.#at + found[0].length);
    return true;
  }

  #angle() {
    ANGLE_URL.lastIndex = this.#at;
    const found = ANGLE_URL.exec(this.text);
    const href = found && safeHref(found[1]);
    if (!href) return false;
    this.#push({ type: "link", href, children: [found[1]] }, this.#at + found[0].length);
    return true;
  }

  #bare() {
    BARE_URL.lastIndex = this.#at;
    const address = BARE_URL.exec(this.text)?.[0].replace(/[.,;:!?)\]*_~]+$/, "");
    const href = address && safeHref(address);
    if (!href) return false;
    this.#push({ type: "link", href, children: [address] }, this.#at + address.length);
    return true;
  }

  #emphasis() {
    const [mark, type] = DELIMITERS.find(([sign]) => this.text.startsWith(sign, this.#at)) ?? [];
    if (!mark || this.#unclosed.has(mark) || !canOpen(this.text, this.#at, mark)) return this.#skipRun();
    const end = closer(this.text, this.#at + mark.length, mark);
    if (end === null) {
      this.#unclosed.add(mark);
      return this.#skipRun();
    }
    const inner = this.text.slice(this.#at + mark.length, end);
    this.#push({ type, children: parseInline(inner, this.depth + 1) }, end + mark.length);
    return true;
  }

  #skipRun() {
    this.#take(runAt(this.text, this.#at));
    return true;
  }
}

/** Return how often the character at this place is repeated there. */
function runAt(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** Return the end of the code span that begins here, or null. */
function codeEnd(text, at) {
  const size = runAt(text, at);
  let next = text.indexOf("`", at + size);
  while (next >= 0) {
    const found = runAt(text, next);
    if (found === size) return next + size;
    next = text.indexOf("`", next + found);
  }
  return null;
}

function canOpen(text, at, mark) {
  const next = text[at + mark.length];
  return next !== undefined && !/\s/.test(next) && (mark[0] !== "_" || !isWord(text[at - 1]));
}

/** Return where the mark that closes begins, or null; not inside code. */
function closer(text, from, mark) {
  for (let at = from; at < text.length;) {
    if (text[at] === "\\") at += 2;
    else if (text[at] === "`") at = codeEnd(text, at) ?? at + runAt(text, at);
    else if (text[at] === mark[0]) {
      const size = runAt(text, at);
      if (at > from && canClose(text, at, size, mark)) return at + size - mark.length;
      at += size;
    } else at += 1;
  }
  return null;
}

function canClose(text, at, size, mark) {
  const fits = mark.length === 2 ? size >= 2 : size % 2 === 1;
  return fits && !/\s/.test(text[at - 1]) && (mark[0] !== "_" || !isWord(text[at + size]));
}

function isWord(char) {
  return char !== undefined && /[\p{L}\p{N}]/u.test(char);
}
