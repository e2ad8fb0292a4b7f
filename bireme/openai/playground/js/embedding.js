// Embeddings: texts, a map of how alike they are, and the neighbors of the one that is chosen.

import { ApiError, embedTexts } from "./api.js";
import { byId, drawing, element } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";
import { placedLabels } from "./labels.js";
import { cosine, project } from "./projection.js";

const MAX_TEXTS = 100; // more are a cloud in which nothing can be read
const MAX_NEIGHBORS = 5;
const [HEIGHT, MARGIN] = [360, 28]; // pixels

/** The view beside the chat. `model` gives the name of the chosen model. */
export class EmbeddingView {
  #abort = null;
  #model;
  #texts = [];
  #vectors = [];
  #chosen = 0;
  #width = 0; // of the map that is drawn, in pixels

  constructor(model) {
    this.#model = model;
    byId("embedding-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#embed();
    });
    byId("embedding-chosen").addEventListener("change", () => this.#choose(byId("embedding-chosen").selectedIndex));
    new ResizeObserver(() => this.#draw()).observe(byId("embedding-map"));
  }

  /** End what is under way. */
  stop() {
    this.#abort?.abort();
  }

  async #embed() {
    this.stop();
    const lines = byId("embedding-texts").value.split("\n");
    const texts = lines.map((line) => line.trim()).filter(Boolean);
    byId("embedding-error").replaceChildren();
    if (texts.length < 2 || texts.length > MAX_TEXTS) {
      this.#say(`Enter 2 to ${MAX_TEXTS} texts, one a line; there are ${texts.length}.`);
      return;
    }
    const abort = (this.#abort = new AbortController());
    this.#say("Waiting for the server…");
    try {
      const reply = await embedTexts(this.#model(), texts, abort.signal);
      this.#show(texts, reply);
    } catch (error) {
      if (error.name !== "AbortError") this.#fail(error instanceof ApiError ? error : new ApiError(String(error)));
    }
  }

  #show(texts, { vectors, numTokens }) {
    this.#texts = texts;
    this.#vectors = vectors;
    byId("embedding-chosen").replaceChildren(...texts.map((text) => element("option", {}, text)));
    byId("embedding-result").hidden = false;
    this.#chosen = 0;
    this.#width = 0;
    this.#draw();
    this.#say(`${texts.length} texts, ${numTokens} tokens, ${vectors[0].length} numbers each`);
    this.#choose(0);
  }

  /** Draw the map in the page's own pixels, so that its letters have the same size on each screen. */
  #draw() {
    const map = byId("embedding-map");
    const width = Math.round(map.clientWidth);
    if (!width || width === this.#width || !this.#vectors.length) return;
    this.#width = width;
    map.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    map.replaceChildren(...this.#points(width));
    this.#choose(this.#chosen);
  }

  #points(width) {
    const places = fitted(project(this.#vectors), width);
    const labels = placedLabels(places, this.#texts, width, HEIGHT);
    return places.map(([x, y], at) => {
      const label = labels[at];
      return drawing(
        "g",
        { class: "point", onclick: () => this.#choose(at) },
        drawing("title", {}, this.#texts[at]),
        ...(label && label.end !== null ? [drawing("line", { x1: x, y1: y, x2: label.end, y2: label.y })] : []),
        drawing("circle", { cx: x, cy: y, r: 5 }),
        ...(label ? [drawing("text", { x: label.x, y: label.y + 4, "text-anchor": label.anchor }, label.text)] : []),
      );
    });
  }

  /** Show what is nearest to a text. */
  #choose(chosen) {
    this.#chosen = chosen;
    byId("embedding-chosen").selectedIndex = chosen;
    const others = this.#vectors.map((vector, at) => [at, cosine(this.#vectors[chosen], vector)]);
    const nearest = others.filter(([at]) => at !== chosen).sort((one, other) => other[1] - one[1]);
    const shown = nearest.slice(0, MAX_NEIGHBORS);
    byId("embedding-neighbors").replaceChildren(...shown.map(([at, likeness]) => neighbor(this.#texts[at], likeness)));
    const near = new Set(shown.map(([at]) => at));
    [...byId("embedding-map").children].forEach((point, at) => {
      point.classList.toggle("chosen", at === chosen);
      point.classList.toggle("near", near.has(at));
    });
  }

  #fail(error) {
    this.#say("");
    byId("embedding-error").replaceChildren(errorBlock(error, [remedy("retry", "Try again", () => this.#embed())]));
  }

  #say(text) {
    byId("embedding-status").textContent = text;
  }
}

function neighbor(text, likeness) {
  const bar = element("meter", { min: "-1", max: "1", value: String(likeness), "aria-label": "Cosine" });
  return element("li", {}, element("span", {}, text), bar, element("span", { class: "cosine" }, likeness.toFixed(2)));
}

/** Return the points moved and stretched into the map, in both directions alike. */
function fitted(points, width) {
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const middle = (values) => (Math.min(...values) + Math.max(...values)) / 2;
  const spread = (values) => Math.max(...values) - Math.min(...values) || 1e-9;
  const scale = Math.min((width - 2 * MARGIN) / spread(xs), (HEIGHT - 2 * MARGIN) / spread(ys));
  const [x0, y0] = [middle(xs), middle(ys)];
  return points.map(([x, y]) => [width / 2 + (x - x0) * scale, HEIGHT / 2 - (y - y0) * scale]);
}
