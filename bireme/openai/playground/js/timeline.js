// A request's timeline: what took its time, drawn from the server's account of it.

import { ApiError, requestTimeline } from "./api.js";
import { byId, element } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";
import { shownMs } from "./meter.js";
import { CAUSES, causeName } from "./timeline_causes.js";
import { drawTimeline } from "./timeline_drawing.js";

const LOOK_MS = 1000; // between two looks at a request that runs
const MAX_GAPS = 5; // that are listed
const MAX_PLACEMENTS = 2; // that are shown from either end

/** The view in place of the chat while it is open. */
export class TimelineView {
  #timer = null;
  #shown = null;
  #askKey;

  constructor(askKey) {
    this.#askKey = askKey;
    byId("timeline-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.show(byId("timeline-id").value.trim());
    });
    new ResizeObserver(() => this.#draw()).observe(byId("timeline-drawing"));
  }

  get isOpen() {
    return !byId("timeline").hidden;
  }

  open() {
    byId("timeline").hidden = false;
    byId("timeline-id").focus();
  }

  close() {
    byId("timeline").hidden = true;
    clearTimeout(this.#timer);
  }

  /** Show the request or answer with this id, again and again while it runs. */
  async show(id) {
    clearTimeout(this.#timer);
    if (!id) return;
    byId("timeline-id").value = id;
    try {
      const timeline = await requestTimeline(id);
      byId("timeline-error").replaceChildren();
      this.#fill(timeline);
      if (timeline.state === "running" && this.isOpen) this.#timer = setTimeout(() => this.show(id), LOOK_MS);
    } catch (error) {
      byId("timeline-result").hidden = true;
      const shown = error instanceof ApiError ? error : new ApiError(String(error.message ?? error));
      const remedies = [remedy("retry", "Try again", () => this.show(id))];
      if (shown.needsKey) remedies.unshift(remedy("key", "Enter a key", () => this.#askKey()));
      byId("timeline-error").replaceChildren(errorBlock(shown, remedies));
    }
  }

  #fill(timeline) {
    this.#shown = timeline;
    byId("timeline-result").hidden = false;
    byId("timeline-summary").replaceChildren(...summary(timeline));
    byId("timeline-causes").replaceChildren(...timeline.causes.map(causeRow));
    byId("timeline-placements").replaceChildren(...placements(timeline.attempts));
    byId("timeline-gaps").replaceChildren(...gapRows(timeline));
    this.#draw();
  }

  #draw() {
    if (this.#shown) drawTimeline(byId("timeline-drawing"), this.#shown);
  }
}

function summary({ state, error, slowest, causes, duration_ms: ms, path, model, started_at: at, ...rest }) {
  const first = causes.find(({ cause }) => cause === slowest);
  const share = first ? ` of ${shownMs(ms)} (${percent(first.share)})` : "";
  const began = new Date(at * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "medium", hour12: false });
  const { prompt_tokens: prompt, cached_tokens: cached, generated_tokens: generated } = rest;
  const counts = [prompt, cached, generated].map((count) => count.toLocaleString("en"));
  const tokens = `${counts[0]} prompt tokens (${counts[1]} cached), ${counts[2]} generated`;
  return [
    element(
      "p",
      { class: "timeline-verdict" },
      first ? `${causeName(slowest)} took ${shownMs(first.ms)}${share}` : shownMs(ms),
    ),
    element("p", { class: "note" }, CAUSES[slowest]?.text ?? ""),
    element("p", { class: "note" }, [path, model, began, tokens, state].filter(Boolean).join(" · ")),
    error ? element("p", { class: "note problem" }, error) : null,
  ].filter(Boolean);
}

function causeRow({ cause, ms, share }) {
  const swatch = element("span", { class: `swatch cause-${cause}` });
  const bar = element("meter", { min: "0", max: "1", value: String(share), "aria-label": causeName(cause) });
  return element(
    "li",
    {},
    element("span", { class: "cause-name" }, swatch, causeName(cause)),
    bar,
    element("span", { class: "figures" }, `${exactMs(ms)} · ${percent(share)}`),
  );
}

/** Where attempts were placed; of many the first and the last. */
function placements(attempts) {
  const placed = attempts.filter((attempt) => attempt.placement);
  if (placed.length <= 2 * MAX_PLACEMENTS) return placed.map(placement);
  const between = placed.length - 2 * MAX_PLACEMENTS;
  return [
    ...placed.slice(0, MAX_PLACEMENTS).map(placement),
    element("p", { class: "note between" }, `${between} more between them`),
    ...placed.slice(-MAX_PLACEMENTS).map(placement),
  ];
}

/** Where an attempt was placed, and what else there was. */
function placement({ number, after, error, placement: found }) {
  const way = [found.prefill, found.decode].filter(Boolean).join(" → ") || "refused";
  const expected = found.cached_tokens?.toLocaleString("en");
  const cached = expected === undefined ? "" : `, ${expected} tokens expected there`;
  const more = found.num_candidates - found.candidates.length;
  return element(
    "section",
    { class: "placement" },
    element("h4", {}, number > 1 ? `Placement ${number}: ${way}` : `Placement: ${way}`),
    element("p", { class: "note" }, found.error || `Decided by: ${reasonText(found)}${cached}`),
    after ? element("p", { class: "note problem" }, `After: ${after}`) : null,
    error ? element("p", { class: "note problem" }, `Ended with: ${error}`) : null,
    found.candidates.length ? candidateTable(found) : null,
    more > 0 ? element("p", { class: "note" }, `${more} more workers`) : null,
  );
}

const REASONS = {
  kv: "lowest cost (mode kv)",
  only: "the only worker that could",
  direct: "the request named it",
  session: "its session was there",
};

function reasonText({ reason, is_short: isShort }) {
  return `${REASONS[reason] ?? reason}${isShort ? "; the prompt was too short for a transfer" : ""}`;
}

function candidateTable({ candidates, prefill, decode }) {
  const head = ["Worker", "Cost, blocks", "Cached, tokens", "Waiting, tokens", "KV blocks", "Requests"];
  const rows = candidates.map((one) => {
    const isChosen = [prefill, decode].includes(one.worker);
    const figures = [
      one.cost.toLocaleString("en", { maximumSignificantDigits: 3 }),
      ...[one.cached_tokens, one.waiting_tokens, one.num_blocks, one.num_requests].map((value) =>
        Math.round(value).toLocaleString("en"),
      ),
    ];
    const rank = one.dp_rank === null ? "" : ` rank ${one.dp_rank}`;
    const name = element("th", { scope: "row" }, `${one.worker}${rank}${isChosen ? " ✓" : ""}`);
    const cells = figures.map((text) => element("td", {}, text));
    return element("tr", { class: isChosen ? "chosen" : null }, name, ...cells);
  });
  return element(
    "div",
    { class: "table-wrap", tabindex: "0", role: "region", "aria-label": "Candidates" },
    element(
      "table",
      {},
      element("thead", {}, element("tr", {}, ...head.map((text) => element("th", { scope: "col" }, text)))),
      element("tbody", {}, ...rows),
    ),
  );
}

function gapRows({ tokens }) {
  const gaps = tokens.flatMap(({ deliveries, sequence }) =>
    deliveries.slice(1).map(([ms], before) => {
      const at = deliveries[before][0];
      return { sequence, at, took: ms - at, number: before + 1 };
    }),
  );
  gaps.sort((one, other) => other.took - one.took);
  const several = tokens.length > 1;
  return gaps.slice(0, MAX_GAPS).map(({ sequence, at, took, number }) => {
    const where = `${several ? `sequence ${sequence}, ` : ""}before delivery ${number + 1}, at ${shownMs(at)}`;
    return element("li", {}, element("span", {}, where), element("span", { class: "figures" }, exactMs(took)));
  });
}

function exactMs(ms) {
  return ms < 10 ? `${+ms.toFixed(1)} ms` : shownMs(ms);
}

function percent(share) {
  return share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(share * 100)} %`;
}
