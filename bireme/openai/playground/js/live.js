// The live view: workers, queues, ways of requests and faults, as the server tells them each second.

import { ApiError, watchLive } from "./api.js";
import { byId, element } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";
import { faultRow } from "./live_faults.js";
import { FlowView } from "./live_flows.js";
import { planRow } from "./live_plans.js";
import { LiveHistory } from "./live_rates.js";
import { Tile } from "./live_tile.js";
import { WorkerCards } from "./live_workers.js";
import { shownRate } from "./meter.js";

const RETRY_MS = 2000;
const MOST_PLANS = 8; // that are shown

/** The view in place of the chat while it is open. It watches only while it can be seen. */
export class LiveView {
  #history = new LiveHistory();
  #watching = null; // AbortController of the stream
  #timer = null;
  #models = new Map(); // name -> ModelSection
  #askKey;
  #tiles = {
    active: new Tile("Requests under way"),
    ended: new Tile("Requests ended", "a second"),
    failed: new Tile("Requests failed", "a second"),
    tokens: new Tile("Prompt tokens sent", "a second"),
    hits: new Tile("Prompt tokens cached"),
    waiting: new Tile("Waiting in engines"),
  };

  /** `askKey` opens the dialog for a key. */
  constructor(askKey) {
    this.#askKey = askKey;
    byId("live-tiles").append(...Object.values(this.#tiles).map((tile) => tile.node));
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.resume()));
  }

  get isOpen() {
    return !byId("live").hidden;
  }

  open() {
    byId("live").hidden = false;
    this.resume();
  }

  close() {
    byId("live").hidden = true;
    this.stop();
  }

  /** Watch on where it is open: after a key was given, or the tab came back. */
  resume() {
    this.stop();
    if (this.isOpen && !document.hidden) this.#watch();
  }

  stop() {
    clearTimeout(this.#timer);
    this.#watching?.abort();
    this.#watching = null;
  }

  async #watch() {
    const watching = new AbortController();
    this.#watching = watching;
    try {
      for await (const states of watchLive(watching.signal)) this.#show(states.at(-1));
      this.#again("The server has ended the stream.");
    } catch (error) {
      if (watching.signal.aborted) return;
      if (error instanceof ApiError && error.status) this.#fail(error);
      else this.#again(error.message);
    }
  }

  #again(why) {
    this.#say(`${why} Trying again…`, true);
    this.#timer = setTimeout(() => this.resume(), RETRY_MS);
  }

  #fail(error) {
    this.#say("");
    const remedies = [remedy("retry", "Try again", () => this.resume())];
    if ([401, 403].includes(error.status)) remedies.unshift(remedy("key", "Enter a key", () => this.#askKey()));
    byId("live-error").replaceChildren(errorBlock(error, remedies));
  }

  #show(state) {
    if (!state) return;
    this.#history.add(state);
    byId("live-error").replaceChildren();
    const { count, answered } = state.processes;
    const processes = count > 1 ? ` · ${answered} of ${count} frontend processes` : "";
    this.#say(`${new Date(state.at * 1000).toLocaleTimeString("en", { hour12: false })}${processes}`, answered < count);
    this.#showTiles(state);
    const rates = this.#history.rates();
    for (const model of state.models) this.#section(model.name).show(model, rates);
    byId("live-planner").hidden = !state.plans.length;
    byId("live-plans").replaceChildren(...state.plans.slice(0, MOST_PLANS).map(planRow));
    byId("live-no-faults").hidden = state.faults.length > 0;
    byId("live-faults").replaceChildren(...state.faults.map((fault) => faultRow(fault, state.models.length > 1)));
  }

  #showTiles({ models }) {
    const { active, ended, failed, tokens, hits, waiting } = this.#tiles;
    const now = this.#history.rates();
    const series = (name) => this.#history.series((step) => step[name]);
    const limit = models.length === 1 ? ` of ${models[0].max_requests.toLocaleString("en")}` : "";
    active.show(`${sum(models, (model) => model.requests)}`, series("active"), limit);
    ended.show(rate(now?.ended), series("ended"));
    failed.show(rate(now?.failed), series("failed"));
    tokens.show(rate(now?.tokens), series("tokens"));
    hits.show(percent(now?.hits ?? this.#history.hitsSinceStart()), series("hits"));
    const reports = models.flatMap((model) => model.workers).filter((worker) => worker.waiting !== null);
    waiting.show(reports.length ? `${sum(reports, (worker) => worker.waiting)}` : "–", series("waiting"));
  }

  #section(name) {
    let section = this.#models.get(name);
    if (!section) {
      section = new ModelSection(name);
      this.#models.set(name, section);
      byId("live-models").append(section.node);
    }
    return section;
  }

  #say(text, isProblem = false) {
    byId("live-status").textContent = text;
    byId("live-status").classList.toggle("problem", isProblem);
  }
}

/** A model: its workers, and which way its requests go. */
class ModelSection {
  #note = element("p", { class: "note" });
  #cards = new WorkerCards();
  #flows = new FlowView();

  constructor(name) {
    this.node = element(
      "section",
      { class: "live-model", "aria-label": name },
      element("h3", {}, name),
      this.#note,
      this.#cards.node,
      this.#flows.node,
    );
  }

  show(model, rates) {
    const load = model.follows_load ? "" : ". Workers tell no load in this mode; router.mode kv has it";
    this.#note.textContent = `Routing: ${model.routing}${load}${model.problem ? `. ${model.problem}` : ""}`;
    this.#cards.show(model.workers, rates);
    this.#flows.show(model, rates);
  }
}

function sum(values, of) {
  return values.reduce((total, one) => total + of(one), 0);
}

function rate(value) {
  if (value === null || value === undefined) return "–";
  return value ? shownRate(value) : "0";
}

function percent(share) {
  return share === null || share === undefined ? "–" : `${Math.round(share * 100)} %`;
}
