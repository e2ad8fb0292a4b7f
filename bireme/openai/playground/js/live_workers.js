// Workers as cards: state, place, life, load.

import { element } from "./dom.js";
import { shownRate } from "./meter.js";

const STAGES = { multimodal_encoder: "encoder" };

/** All workers of a model; a card stays its worker's. */
export class WorkerCards {
  #cards = new Map();

  constructor() {
    this.node = element("ul", { class: "workers", "aria-label": "Workers" });
  }

  show(workers, rates) {
    const ids = new Set(workers.map(({ id }) => id));
    for (const [id, card] of this.#cards) {
      if (ids.has(id)) continue;
      card.node.remove();
      this.#cards.delete(id);
    }
    for (const worker of workers) {
      let card = this.#cards.get(worker.id);
      if (!card) {
        card = new WorkerCard(worker);
        this.#cards.set(worker.id, card);
      }
      card.show(worker, rates?.steps(worker) ?? null);
    }
    const nodes = workers.map(({ id }) => this.#cards.get(id).node);
    if (nodes.some((node, at) => this.node.children[at] !== node)) this.node.append(...nodes);
  }
}

class WorkerCard {
  #state = element("span", { class: "state" });
  #reason = element("p", { class: "note" });
  #kv = element("meter", { min: "0", max: "1", high: "0.9", "aria-label": "KV blocks in use" });
  #kvText = element("span", {});
  #facts = element("dl", {});

  constructor({ id, stage, server }) {
    const name = id.split("@")[0];
    this.node = element(
      "li",
      { class: "worker" },
      element("div", { class: "worker-head" }, element("strong", {}, name), this.#state),
      element("p", { class: "note" }, [STAGES[stage] ?? stage, server || "own server"].join(" · ")),
      this.#reason,
      element("div", { class: "worker-kv" }, this.#kv, this.#kvText),
      this.#facts,
    );
  }

  show(worker, steps) {
    this.node.dataset.state = worker.state;
    this.#state.textContent = worker.state;
    this.#reason.textContent = worker.reason;
    const { kv_blocks_used: used, kv_blocks: all } = worker;
    this.#kv.parentElement.hidden = !all;
    this.#kv.value = all ? used / all : 0;
    this.#kvText.textContent = `KV ${number(used)} of ${number(all)} blocks`;
    const facts = [
      ["Running", number(worker.running)],
      ["Waiting", waiting(worker)],
      ["Sent from here", number(worker.sent)],
      ["Engine steps/s", steps === null ? null : shownRate(steps)],
      ["Drafts", worker.nextn ? `up to ${number(worker.nextn)} tokens` : null],
      ["Generation", worker.generation ? `${worker.generation}, weight ${worker.weight}` : null],
      ["Engine since", worker.life ? shownSince(worker.life) : null],
    ].filter(([, text]) => text !== null);
    this.#facts.replaceChildren(
      ...facts.flatMap(([name, text]) => [element("dt", {}, name), element("dd", {}, text)]),
    );
  }
}

function waiting({ waiting: requests, waiting_tokens: tokens }) {
  if (requests === null) return null;
  return tokens ? `${number(requests)} · ${number(tokens)} tokens` : number(requests);
}

/** A life is named by when it began, in ms; of another day than today with its date. */
function shownSince(life) {
  const began = new Date(life);
  const isToday = began.toDateString() === new Date().toDateString();
  const date = isToday ? "" : `${began.toLocaleDateString("en", { month: "short", day: "numeric" })}, `;
  return `${date}${began.toLocaleTimeString("en", { hour12: false })}`;
}

function number(value) {
  return value === null ? null : value.toLocaleString("en");
}
