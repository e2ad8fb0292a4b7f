// Embeddings: texts, a map of how alike they are, and the neighbors of the one that is chosen.

import { ApiError, embedTexts } from "./api.js";
import { byId, drawing, element } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";
import { cosine, project } from "./projection.js";

const MAX_TEXTS = 100; // more are a cloud in which nothing can be read
const MAX_NEIGHBORS = 5;
const [WIDTH, HEIGHT, MARGIN, SHORT] = [560, 360, 28, 24];

/** The view beside the chat. `model` gives the name of the chosen model. */
export class EmbeddingView {
  #abort = null;
  #model;
  #texts = [];
  #vectors = [];

  constructor(model) {
    this.#model = model;
    byId("embedding-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#embed();
    });
    byId("embedding-chosen").addEventListener("change", () => this.#choose(byId("embedding-chosen").selectedIndex));
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
    byId("embedding-map").replaceChildren(...this.#points());
    byId("embedding-result").hidden = false;
    this.#say(`${texts.length} texts, ${numTokens} tokens, ${vectors[0].length} numbers each`);
    this.#choose(0);
  }

  #points() {
    const places = fitted(project(this.#vectors));
    return places.map(([x, y], at) => {
      const label = shortened(this.#texts[at]);
      const isRight = x > WIDTH / 2;
      return drawing(
        "g",
        { class: "point", onclick: () => this.#choose(at) },
        drawing("title", {}, this.#texts[at]),
        drawing("circle", { cx: x, cy: y, r: 5 }),
        drawing("text", { x: isRight ? x - 9 : x + 9, y: y + 4, class: isRight ? "before" : "behind" }, label),
      );
    });
  }

  /** Show what is nearest to a text. */
  #choose(chosen) {
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
function fitted(points) {
  const [xs, ys] = [points.map(([x]) => x), points.map(([, y]) => y)];
  const middle = (values) => (Math.min(...values) + Math.max(...values)) / 2;
  const spread = (values) => Math.max(...values) - Math.min(...values) || 1e-9;
  const scale = Math.min((WIDTH - 2 * MARGIN) / spread(xs), (HEIGHT - 2 * MARGIN) / spread(ys));
  const [x0, y0] = [middle(xs), middle(ys)];
  return points.map(([x, y]) => [WIDTH / 2 + (x - x0) * scale, HEIGHT / 2 - (y - y0) * scale]);
}

function shortened(text) {
  const letters = [...text];
  return letters.length > SHORT ? `${letters.slice(0, SHORT - 1).join("")}…` : text;
}
