// The drawing of a timeline: a row for each part, time from left to right, each gap between tokens as high as long.

import { drawing } from "./dom.js";
import { shownMs } from "./meter.js";
import { CAUSE_OF_STEP } from "./timeline_causes.js";

const [ROW, BAR, GAPS, AXIS, LEFT, RIGHT, NARROW, LABEL] = [26, 16, 72, 22, 170, 14, 520, 250];
const STEP_NAMES = { prefill_chunk: "prompt chunk", generate: "generation", tokenize: "tokenizing" };

/** Draw into an <svg>, in the page's own pixels. */
export function drawTimeline(svg, timeline) {
  const width = Math.round(svg.clientWidth);
  if (!width) return;
  const left = width < NARROW ? 8 : LEFT;
  const rows = rowsOf(timeline);
  const scale = (ms) => left + ((width - left - RIGHT) * ms) / (timeline.duration_ms || 1);
  const parts = [];
  let y = AXIS;
  for (const row of rows) {
    const labelled = left !== LEFT ? 14 : 0; // above it, where there is no room beside
    const height = (row.gaps ? GAPS : ROW) + labelled;
    parts.push(...drawnRow(row, scale, y, labelled, left, timeline.duration_ms));
    y += height;
  }
  const lines = ticks(timeline.duration_ms, width - left).map((ms) => tick(ms, scale(ms), y, width));
  svg.setAttribute("viewBox", `0 0 ${width} ${y + 4}`);
  svg.setAttribute("height", String(y + 4));
  svg.replaceChildren(...lines, ...parts);
}

/** Return [{label, bars: [{start, end, cause, text}], gaps}]. */
function rowsOf({ steps, attempts, tokens, delivery, duration_ms: now }) {
  const several = tokens.length > 1;
  const rows = steps.map((step) => ({ label: STEP_NAMES[step.name] ?? step.name, bars: [bar(step, now)] }));
  for (const attempt of attempts) {
    const prefix = several ? `${attempt.sequence}: ` : "";
    if (isInVain(attempt)) {
      addTry(rows, prefix, attempt, now);
      continue;
    }
    if (attempt.placement) {
      const text = `placement ${attempt.number}`;
      const { start_ms: start, end_ms: end } = attempt.placement;
      rows.push({ label: `${prefix}placement`, bars: [{ start, end: end ?? now, cause: "placement", text }] });
    }
    for (const stage of ["prefill", "decode"]) {
      const call = attempt[stage];
      if (call) rows.push({ label: `${prefix}${call.worker || stage}`, bars: callBars(call, now), error: call.error });
    }
  }
  for (const { sequence, deliveries } of tokens)
    if (deliveries.length) {
      const gaps = gapsOf(deliveries, attempts.filter((attempt) => attempt.sequence === sequence));
      rows.push({ label: several ? `${sequence}: tokens` : "tokens", bars: [], gaps, first: deliveries[0][0] });
    }
  if (delivery) rows.push({ label: "to the client", bars: deliveryBars(delivery, now) });
  return rows;
}

/** A further attempt that no engine began with; while a worker starts there are many. */
function isInVain({ number, decode, prefill, error }) {
  return number > 1 && error && !prefill && !decode?.steps.length;
}

function addTry(rows, prefix, { start_ms: start, end_ms: end, error }, now) {
  let row = rows.at(-1);
  if (!row.tries) rows.push((row = { bars: [], tries: 0, error: true }));
  row.tries += 1;
  row.label = `${prefix}tried again × ${row.tries}`;
  row.bars.push({ start, end: end ?? now, cause: "migration", text: error });
}

/** Return {start, end, count, cause} of each gap between two deliveries. */
function gapsOf(deliveries, attempts) {
  const moves = attempts.filter(({ number }) => number > 1).map(({ start_ms: ms }) => ms);
  const steps = attempts.flatMap(({ decode }) => decode?.steps ?? []);
  const told = steps.find(({ name }) => name === "generate");
  const moved = steps.filter(({ name }) => name === "transfer");
  let neighbors = told?.neighbors_ms ?? 0;
  const later = deliveries.slice(1);
  const gaps = later.map(([end, count], at) => ({ start: deliveries[at][0], end, count, cause: "generation" }));
  for (const gap of gaps) {
    const middle = (gap.start + gap.end) / 2;
    if (moves.some((ms) => ms >= gap.start && ms <= gap.end)) gap.cause = "migration";
    else if (moved.some(({ start_ms: start, end_ms: end }) => start < middle && middle < end)) gap.cause = "transfer";
  }
  for (const gap of gaps.toSorted((one, other) => other.end - other.start - (one.end - one.start))) {
    const length = gap.end - gap.start;
    if (neighbors < length / 2) break; // what others' prompts took is in the longest gaps
    if (gap.cause === "generation") gap.cause = "neighbors";
    neighbors -= length;
  }
  return gaps;
}

function bar({ name, start_ms: start, end_ms: end, tokens, bytes, way, step }, now) {
  const facts = [
    tokens === undefined ? null : `${tokens.toLocaleString("en")} tokens`,
    bytes === undefined ? null : `${bytes.toLocaleString("en")} bytes`,
    way || null,
    step === undefined ? null : `step ${step}`,
  ].filter(Boolean);
  const text = [`${STEP_NAMES[name] ?? name}: ${shownMs((end ?? now) - start)}`, ...facts].join(", ");
  return { start, end: end ?? now, cause: CAUSE_OF_STEP[name] ?? "other", text };
}

function callBars({ start_ms: start, end_ms: end, steps, error }, now) {
  const whole = { start, end: end ?? now, cause: "call", text: error || `call: ${shownMs((end ?? now) - start)}` };
  return [whole, ...steps.map((step) => bar(step, now))];
}

function deliveryBars({ start_ms: start, end_ms: end, waited_ms: waited, waits }, now) {
  const whole = { start, end: end ?? now, cause: "call", text: `events: ${shownMs((end ?? now) - start)}` };
  const text = `waited for the client, ${shownMs(waited)} in all`;
  return [whole, ...waits.map(([at, ms]) => ({ start: at, end: at + ms, cause: "reader", text }))];
}

function drawnRow({ label, bars, gaps, first, error }, scale, top, labelled, left, now) {
  const x = labelled ? left : left - 10;
  const anchor = labelled ? "start" : "end";
  const middle = labelled ? top + 11 : top + (gaps ? GAPS - 8 : ROW / 2 + 4);
  const place = { class: error ? "row-label lost" : "row-label", x, y: middle, "text-anchor": anchor };
  const name = drawing("text", place, cut(label));
  const y = top + labelled;
  return [name, ...bars.map((one) => drawnBar(one, scale, y)), ...(gaps ? drawnGaps(gaps, first, scale, y, now) : [])];
}

function drawnBar({ start, end, cause, text }, scale, y) {
  const x = scale(start);
  const width = Math.max(1.5, scale(end) - x);
  const place = { x: x.toFixed(1), y: y + (ROW - BAR) / 2, width: width.toFixed(1), height: BAR, rx: 2 };
  return drawing("rect", { class: `cause-${cause}`, ...place }, drawing("title", {}, text));
}

/** Each gap as a bar from one delivery to the next, as high as it is long; those under a pixel share one. */
function drawnGaps(gaps, firstMs, scale, top, now) {
  const longest = Math.max(0, ...gaps.map(({ start, end }) => end - start));
  const most = Math.max(longest, now / 200);
  const room = GAPS - 24;
  const drawn = [];
  let last = -1;
  for (const { start, end, count, cause } of gaps) {
    const x = scale(start);
    const height = Math.max(2, (room * (end - start)) / most);
    const width = Math.max(1, scale(end) - x - 0.5);
    if (scale(end) - last < 1 && height < room / 2) continue;
    last = scale(end);
    const text = `${(end - start).toFixed(1)} ms until the next ${count === 1 ? "token" : `${count} tokens`}`;
    const y = top + 16 + room - height;
    const place = { x: x.toFixed(1), y: y.toFixed(1), width: width.toFixed(1), height: height.toFixed(1) };
    drawn.push(drawing("rect", { class: `cause-${cause}`, ...place }, drawing("title", {}, text)));
  }
  const first = scale(firstMs);
  const base = top + 16 + room;
  drawn.push(drawing("line", { class: "first-token", x1: first, x2: first, y1: top + 8, y2: base }));
  const x = Math.min(first + 4, scale(now) - LABEL);
  const label = `first token ${shownMs(firstMs)} · longest gap ${shownMs(longest)}`;
  const at = { x: Math.max(x, scale(0)), y: top + 12 };
  drawn.push(drawing("text", { class: "axis-label", ...at }, label));
  return drawn;
}

function ticks(duration, width) {
  const step = niceStep(duration / Math.max(2, Math.floor(width / 110)));
  const found = [];
  for (let ms = 0; ms <= duration; ms += step) found.push(ms);
  return found;
}

function niceStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1e-3)));
  return [1, 2, 5, 10].map((factor) => factor * power).find((step) => step >= least);
}

function tick(ms, x, bottom, width) {
  const place = x > width - 50 ? { x: x - 3, "text-anchor": "end" } : { x: x + 3 };
  return drawing(
    "g",
    {},
    drawing("line", { class: "axis-line", x1: x, x2: x, y1: AXIS - 4, y2: bottom }),
    drawing("text", { class: "axis-label", ...place, y: 11 }, ms ? exact(ms) : "0"),
  );
}

function exact(ms) {
  return ms < 1000 ? `${+ms.toPrecision(3)} ms` : `${+(ms / 1000).toPrecision(3)} s`;
}

function cut(label) {
  return label.length > 24 ? `${label.slice(0, 23)}…` : label;
}

