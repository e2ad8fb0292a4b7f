// What an answer cost: a line while it comes, details behind it.

import { element } from "./dom.js";
import { shownDrafts, shownMs, shownRate } from "./meter.js";

/** Shows a meter's summary, and usage and timing where the server told. */
export class StatsView {
  #line = element("summary", {});
  #list = element("dl", {});

  constructor() {
    this.node = element("details", { class: "stats" }, this.#line, this.#list);
    this.node.hidden = true;
  }

  show(answer, summary) {
    if (!summary) return; // it was cut off before it was measured
    this.node.hidden = summary.ttftMs === null && !answer.usage;
    this.#line.replaceChildren(
      ...facts(answer.usage, summary).map(([name, text]) => element("span", { class: `fact ${name}` }, text)),
    );
    const rows = details(answer, summary).filter(([, text]) => text !== null && text !== undefined && text !== "");
    this.#list.replaceChildren(
      ...rows.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, String(text))]),
    );
  }
}

function facts(usage, { ttftMs, numTokens, tokensPerSecond, isExact }) {
  const about = isExact ? "" : "≈ ";
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  const drafts = shownDrafts(usage);
  return [
    ["ttft", ttftMs === null ? null : `TTFT ${shownMs(ttftMs)}`],
    ["rate", tokensPerSecond === null ? null : `${about}${shownRate(tokensPerSecond)} tokens/s`],
    ["tokens", `${about}${numTokens} ${numTokens === 1 ? "token" : "tokens"}`],
    ["drafts", drafts && `${drafts.tokensAStep} tokens a step`],
    ["prompt-tokens", usage ? `${usage.prompt_tokens} prompt${cached ? `, ${cached} cached` : ""}` : null],
  ].filter(([, text]) => text !== null);
}

function details({ model, usage, timing, finishReason, isStopped }, { ttftMs, tokensPerSecond }) {
  const drafts = shownDrafts(usage);
  return [
    ["Model", model],
    ["Ended by", isStopped ? "you" : finishReason],
    ["Time to first token", ttftMs === null ? null : shownMs(ttftMs)],
    ["Tokens a second", tokensPerSecond === null ? null : shownRate(tokensPerSecond)],
    ["Prompt tokens", usage?.prompt_tokens],
    ["of these cached", usage?.prompt_tokens_details?.cached_tokens],
    ["Generated tokens", usage?.completion_tokens],
    ["of these thoughts", usage?.completion_tokens_details?.reasoning_tokens],
    ["Tokens a step", drafts?.tokensAStep],
    ["Drafted tokens accepted", drafts?.accepted],
    ["Queue", timing && shownMs(timing.queue_ms)],
    ["Prefill", timing && `${shownMs(timing.prefill_ms)} on ${timing.prefill_worker}`],
    ["KV transfer", timing?.transfer_ms ? shownMs(timing.transfer_ms) : null],
    ["Decode", timing && `${shownMs(timing.decode_ms)} on ${timing.decode_worker}`],
  ];
}
