// An answer as it grows: chunks are put together to one message with content, reasoning and tool calls.

import { ApiError } from "./api.js";

/** What an assistant said so far, and how it ended. Its fields are plain, to be kept as JSON. */
export class Answer {
  content = "";
  reasoning = "";
  thoughtMs = null; // from the first thought to the last
  calls = []; // {id, name, arguments, result}; the result is typed in by the user
  finishReason = "";
  usage = null;
  timing = null;
  model = "";
  keptAs = null; // its id, where the server keeps it
  requestId = ""; // where the server notes what takes the time of requests
  error = null;
  isStopped = false; // by the user
  isStreaming = true;
  isJson = false; // asked for in the request
  rate = null; // see Meter.summary
  #thoughtAt = null;

  /** Return an answer that was kept; one that was cut off by the end of the page has been stopped. */
  static from(kept) {
    const { error, isStreaming, isStopped } = kept;
    const ended = {
      isStreaming: false,
      isStopped: isStopped || isStreaming,
      error: error && new ApiError(error.message, error),
    };
    return Object.assign(new Answer(), kept, ended);
  }

  /** Take a chunk; return how many pieces of text it held: the tokens, near enough, until usage tells. */
  add(chunk) {
    this.model ||= chunk.model;
    this.keptAs = chunk.keptAs ?? this.keptAs;
    this.requestId ||= chunk.requestId ?? "";
    this.usage = chunk.usage ?? this.usage;
    this.timing = chunk.bireme?.timing?.[0] ?? this.timing;
    const choice = chunk.choices?.[0];
    if (!choice) return 0;
    this.finishReason = choice.finish_reason ?? this.finishReason;
    return this.#delta(choice.delta ?? {});
  }

  #delta(delta) {
    this.content += delta.content ?? "";
    if (delta.reasoning_content) this.#think(delta.reasoning_content);
    for (const part of delta.tool_calls ?? []) this.#call(part);
    return (delta.content ? 1 : 0) + (delta.reasoning_content ? 1 : 0) + (delta.tool_calls?.length ?? 0);
  }

  #think(text) {
    this.reasoning += text;
    this.#thoughtAt ??= performance.now();
    this.thoughtMs = performance.now() - this.#thoughtAt;
  }

  #call(part) {
    const call = (this.calls[part.index] ??= { id: "", name: "", arguments: "", result: null });
    call.id ||= part.id ?? "";
    call.name += part.function?.name ?? "";
    call.arguments += part.function?.arguments ?? "";
  }

  get isEmpty() {
    return !this.content && !this.reasoning && !this.calls.length;
  }

  /** Are its calls whole, so that they can be answered? */
  get hasCalls() {
    return (
      this.calls.length > 0 && !this.isStreaming && !this.error && !this.isStopped && this.finishReason !== "length"
    );
  }

  /** Does it wait for results of tools? */
  get isWaiting() {
    return this.hasCalls && this.calls.some((call) => call.result === null);
  }

  /** Return it as messages of a request. Thoughts go back only beside calls, where models go on from them. */
  messages() {
    if (!this.hasCalls) return this.content ? [{ role: "assistant", content: this.content }] : [];
    const calls = this.calls.map(({ id, name, arguments: text }) => ({
      id,
      type: "function",
      function: { name, arguments: text },
    }));
    const said = { role: "assistant", content: this.content || null, tool_calls: calls };
    if (this.reasoning) said.reasoning_content = this.reasoning;
    return [said, ...this.results()];
  }

  /** Return what its calls gave as messages. */
  results() {
    if (!this.hasCalls) return [];
    return this.calls.map((call) => ({ role: "tool", tool_call_id: call.id, content: call.result ?? "" }));
  }
}
