// The causes that a timeline names, and what each means.

export const CAUSES = {
  tokenizing: { name: "Tokenizing", text: "The prompt was turned into tokens." },
  placement: { name: "Placement", text: "The router chose the workers." },
  queue: { name: "Queue", text: "It waited in an engine until there was room in its batch." },
  prompt: { name: "Prompt", text: "Its own prompt was computed." },
  transfer: { name: "KV transfer", text: "The KV of its prompt came from prefill to decode." },
  generation: { name: "Generation", text: "Its own tokens were made." },
  neighbors: { name: "Prompts of others", text: "Its tokens waited while prompts of others were computed beside it." },
  migration: { name: "Migration", text: "A worker was lost or refused it; until it went on elsewhere nothing came." },
  reader: { name: "Slow reader", text: "Everything was made; its client had not taken it yet." },
  engine: { name: "To and from engines", text: "It was on its way to an engine or back, or in one that told no more." },
  other: { name: "Other", text: "Nothing that is measured." },
};

export function causeName(cause) {
  return CAUSES[cause]?.name ?? cause;
}

/** Parts of an engine's account -> their cause. */
export const CAUSE_OF_STEP = {
  tokenize: "tokenizing",
  queue: "queue",
  preempted: "queue",
  prefill_chunk: "prompt",
  transfer: "transfer",
  generate: "generation",
};
