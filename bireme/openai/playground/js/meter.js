// How fast an answer comes: time to first token, tokens a second. Counts pieces of text until usage gives tokens.

/** Measures one answer, from the moment its request is sent. `now` in ms. */
export class Meter {
  #now;
  #sentAt;
  #firstAt = null;
  #lastAt = null;
  #numPieces = 0;

  constructor(now = () => performance.now()) {
    this.#now = now;
    this.#sentAt = now();
  }

  /** Note that so many pieces came together. */
  note(numPieces) {
    if (!numPieces) return;
    this.#lastAt = this.#now();
    this.#firstAt ??= this.#lastAt;
    this.#numPieces += numPieces;
  }

  /**
   * Return {ttftMs, numTokens, tokensPerSecond, isExact}. The rate is that of the tokens after the first, null where it
   * is not known. Tokens that waited on the way come faster than they were made: `timing` is the server's own measure.
   */
  summary({ usage, timing }) {
    const numTokens = usage?.completion_tokens ?? this.#numPieces;
    const ttftMs = this.#firstAt === null ? null : this.#firstAt - this.#sentAt;
    const spanMs = Math.max(this.#firstAt === null ? 0 : this.#lastAt - this.#firstAt, timing?.decode_ms ?? 0);
    const tokensPerSecond = spanMs > 0 && numTokens > 1 ? ((numTokens - 1) / spanMs) * 1000 : null;
    return { ttftMs, numTokens, tokensPerSecond, isExact: usage !== null };
  }
}

/** Return a number of ms as people read it: 58 ms, 1.24 s. */
export function shownMs(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(2)} s`;
}

/** Return a rate: 9.3, 214. */
export function shownRate(rate) {
  return rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString("en");
}

/** Return what drafts did for an answer, {tokensAStep, accepted}, as people read it; null where nothing was drafted. */
export function shownDrafts(usage) {
  const { accepted_prediction_tokens: accepted, rejected_prediction_tokens: rejected } =
    usage?.completion_tokens_details ?? {};
  const drafted = accepted + rejected;
  if (!drafted) return null;
  const steps = Math.max(1, usage.completion_tokens - accepted); // each makes a token besides those it accepts
  const share = Math.round((100 * accepted) / drafted);
  return {
    tokensAStep: (usage.completion_tokens / steps).toFixed(1),
    accepted: `${accepted} of ${drafted} (${share}%)`,
  };
}
