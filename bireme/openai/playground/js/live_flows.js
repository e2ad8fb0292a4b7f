// Which way requests go: from the frontend over prefill to decode, as thick as they are many.

import { drawing, element } from "./dom.js";
import { shownRate } from "./meter.js";

const [ROW, TOP, NODE, MAX_LINE] = [34, 22, 26, 14];
const COLUMNS = ["frontend", "prefill", "decode"];
const MAX_WAYS = 24; // that are shown, the busiest

export class FlowView {
  #map = drawing("svg", { class: "flow-map", role: "img", "aria-label": "Ways of requests; numbers are below" });
  #list = element("ul", { class: "flows", "aria-label": "Ways of requests" });
  #none = element("p", { class: "note" }, "No requests in the last seconds.");

  constructor() {
    const head = element("h4", {}, "Who sends what where");
    this.node = element("div", { class: "flow-view" }, head, this.#map, this.#none, this.#list);
  }

  show(model, rates) {
    const flows = (rates?.flows ?? []).filter((flow) => flow.model === model.name && flow.requests > 0);
    flows.sort((one, other) => other.requests - one.requests);
    const shown = flows.slice(0, MAX_WAYS);
    this.#none.hidden = shown.length > 0;
    this.#map.classList.toggle("empty", !shown.length);
    this.#list.replaceChildren(...shown.map(row));
    this.#draw(model.workers, shown);
  }

  #draw(workers, flows) {
    const width = Math.round(this.#map.clientWidth) || 600;
    const columns = columnsOf(workers);
    const height = TOP + ROW * Math.max(1, ...columns.map(({ names }) => names.length));
    this.#map.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.#map.setAttribute("height", String(height));
    const places = placed(columns, width, height);
    const most = Math.max(...flows.map(({ requests }) => requests), 1e-9);
    const lines = flows.flatMap(({ prefill, decode, requests }) => {
      const stops = ["frontend", ...(prefill ? [`prefill ${prefill}`] : []), `decode ${decode}`];
      const thick = Math.max(1.5, (MAX_LINE * requests) / most);
      return stops.slice(1).map((stop, at) => curve(places.get(stops[at]), places.get(stop), thick));
    });
    const heads = columns.map(({ title, x }) =>
      drawing("text", { class: "flow-title", x: x * width, y: 12, "text-anchor": anchor(x) }, title),
    );
    this.#map.replaceChildren(...heads, ...lines.filter(Boolean), ...[...places.values()].map(node));
  }
}

/** Return [{title, x, names, keys}] of the columns that this model has. */
function columnsOf(workers) {
  const of = (stage) => workers.filter((worker) => worker.stage === stage).map(({ id }) => id);
  const names = { frontend: ["frontend"], prefill: of("prefill"), decode: of("decode") };
  const shown = COLUMNS.filter((title) => names[title].length);
  return shown.map((title, at) => ({ title, x: shown.length > 1 ? at / (shown.length - 1) : 0, names: names[title] }));
}

/** Return the places of all nodes by their keys. */
function placed(columns, width, height) {
  const places = new Map();
  for (const { title, x, names } of columns) {
    const gap = (height - TOP) / names.length;
    names.forEach((name, at) => {
      const key = title === "frontend" ? title : `${title} ${name}`;
      places.set(key, { name, x, px: x * width, y: TOP + gap * (at + 0.5) });
    });
  }
  return places;
}

function curve(from, to, thick) {
  if (!from || !to) return null; // a worker that has just left
  const [start, end] = [from.px + (from.x === 0 ? 70 : NODE * 1.6), to.px - (to.x === 1 ? 92 : NODE * 1.6)];
  const middle = (start + end) / 2;
  const d = `M${start} ${from.y}C${middle} ${from.y} ${middle} ${to.y} ${end} ${to.y}`;
  return drawing("path", { class: "flow-line", d, "stroke-width": thick.toFixed(1) });
}

function node({ name, x, px, y }) {
  return drawing("text", { class: "flow-node", x: px, y: y + 4, "text-anchor": anchor(x) }, short(name));
}

function anchor(x) {
  return x === 0 ? "start" : x === 1 ? "end" : "middle";
}

function short(name) {
  const [worker, server] = name.split("@");
  const host = server ? `@${server.split(":")[0].slice(0, 6)}` : "";
  return `${worker}${host}`.slice(0, 15);
}

function row({ prefill, decode, requests, tokens, cached }) {
  const way = [prefill, decode].filter(Boolean).join(" → ");
  const share = tokens ? `, ${Math.round((100 * cached) / tokens)} % cached` : "";
  return element(
    "li",
    {},
    element("span", { class: "way" }, way),
    element("span", { class: "figures" }, `${shownRate(requests)} requests/s · ${shownRate(tokens)} tokens/s${share}`),
  );
}
