// A number with its unit and its last minute as a line.

import { drawing, element } from "./dom.js";

const [WIDTH, HEIGHT, SPAN_S] = [120, 28, 60];

export class Tile {
  #value = element("span", { class: "tile-value" });
  #rest = element("span", { class: "tile-rest" });
  #line = drawing("polyline", {});

  constructor(name, unit = "") {
    const view = { class: "tile-line", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" };
    this.#rest.textContent = unit;
    this.node = element(
      "div",
      { class: "tile" },
      element("span", { class: "tile-name" }, name),
      element("p", {}, this.#value, " ", this.#rest),
      drawing("svg", { ...view, "aria-hidden": "true" }, this.#line),
    );
  }

  /** `series`: [seconds before now, value or null]; the line's top is the largest of them. */
  show(value, series, rest = null) {
    this.#value.textContent = value;
    if (rest !== null) this.#rest.textContent = rest;
    const known = series.filter(([, one]) => one !== null);
    const top = Math.max(1e-9, ...known.map(([, one]) => one));
    const point = ([at, one]) => [WIDTH * (1 + at / SPAN_S), HEIGHT - 2 - (HEIGHT - 4) * (one / top)];
    this.#line.setAttribute("points", known.map((one) => point(one).map((x) => x.toFixed(1)).join(",")).join(" "));
  }
}
