// States of the last minute, and what they say about each second: counters only grow, so differences tell. Pure.

const KEPT_S = 60;
const SMOOTHED_S = 5; // over which a shown rate is taken
const FINE = ["stop", "length", "tool_calls", "placed", "CANCELLED"];

/** Keeps states, one a second or fewer. */
export class LiveHistory {
  #states = [];

  add(state) {
    const last = this.#states.at(-1);
    const isOther = last && (last.processes.answered !== state.processes.answered || last.at >= state.at);
    if (isOther) this.#states = []; // sums of other processes: differences would tell nothing
    this.#states.push(state);
    this.#states = this.#states.filter(({ at }) => at > state.at - KEPT_S);
  }

  /** Return what a second was like lately, null where there are no two states. */
  rates() {
    const now = this.#states.at(-1);
    const before = this.#states.find(({ at }) => at >= (now?.at ?? 0) - SMOOTHED_S - 0.5);
    return now && before !== now ? between(before, now) : null;
  }

  /** Return [seconds before now, value] of each step, by what `of` takes of it. */
  series(of) {
    const end = this.#states.at(-1)?.at;
    return this.#states.slice(1).map((state, at) => [state.at - end, of(between(this.#states[at], state))]);
  }

  /** Return the share of prompt tokens that were cached since the server began; null: none is known. */
  hitsSinceStart() {
    const counters = this.#states.at(-1)?.counters;
    return counters?.prompt_tokens ? counters.cached_tokens / counters.prompt_tokens : null;
  }
}

function between(before, now) {
  const seconds = now.at - before.at;
  const grown = (one, other) => Math.max(0, other - one) / seconds;
  const prompt = now.counters.prompt_tokens - before.counters.prompt_tokens;
  const cached = now.counters.cached_tokens - before.counters.cached_tokens;
  const flows = flowRates(before, now, grown);
  const workers = now.models.flatMap((model) => model.workers);
  const steps = new Map(before.models.flatMap((model) => model.workers).map((one) => [keyOf(one), one.steps]));
  return {
    ended: grown(count(before, () => true), count(now, () => true)),
    failed: grown(count(before, isFailure), count(now, isFailure)),
    hits: prompt > 0 ? Math.min(1, Math.max(0, cached / prompt)) : null,
    tokens: flows.reduce((sum, flow) => sum + flow.tokens, 0),
    active: now.models.reduce((sum, model) => sum + model.requests, 0),
    waiting: workers.reduce((sum, worker) => sum + (worker.waiting ?? 0), 0),
    flows,
    steps: (worker) => stepRate(steps.get(keyOf(worker)), worker.steps, grown),
  };
}

function keyOf({ id, life }) {
  return `${id} ${life}`; // another life counts from 0
}

function stepRate(before, now, grown) {
  return before === undefined || before === null || now === null ? null : grown(before, now);
}

function flowRates(before, now, grown) {
  const wayOf = (model, { prefill, decode }) => `${model.name} ${prefill} ${decode}`;
  const known = new Map(before.models.flatMap((model) => model.flows.map((flow) => [wayOf(model, flow), flow])));
  const none = { requests: 0, prompt_tokens: 0, cached_tokens: 0 };
  return now.models.flatMap((model) =>
    model.flows.map((flow) => {
      const was = known.get(wayOf(model, flow)) ?? none;
      return {
        model: model.name,
        prefill: flow.prefill,
        decode: flow.decode,
        requests: grown(was.requests, flow.requests),
        tokens: grown(was.prompt_tokens, flow.prompt_tokens),
        cached: grown(was.cached_tokens, flow.cached_tokens),
      };
    }),
  );
}

function count({ counters }, isCounted) {
  return Object.entries(counters.requests).reduce((sum, [outcome, n]) => sum + (isCounted(outcome) ? n : 0), 0);
}

function isFailure(outcome) {
  return !FINE.includes(outcome);
}
