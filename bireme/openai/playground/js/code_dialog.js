// The next request as a program: curl, Python, JSON.

import { addressOf, apiKey } from "./api.js";
import { byId, element } from "./dom.js";
import { codeBlock } from "./markdown.js";
import { shortened } from "./picture.js";

const KEY = "BIREME_API_KEY";
const KINDS = {
  curl: ["curl", "bash", asCurl],
  python: ["Python", "python", asPython],
  json: ["JSON", "json", (request) => JSON.stringify(request, null, 2)],
};
const SHORTENED = "Pictures are shortened here. The copy button copies them whole.";
// OpenAI's names; its client takes all others in extra_body alone.
const OPENAI = new Set([
  "messages", "model", "stream", "stream_options", "max_tokens", "max_completion_tokens", "temperature", "top_p", "n",
  "stop", "seed", "logit_bias", "presence_penalty", "frequency_penalty", "logprobs", "top_logprobs", "tools",
  "tool_choice", "parallel_tool_calls", "response_format", "prediction", "reasoning_effort", "verbosity", "modalities",
  "service_tier", "user", "safety_identifier", "prompt_cache_key", "metadata", "store",
]);
const OPENAI_RESPONSES = new Set([
  "model", "stream", "input", "instructions", "previous_response_id", "store", "max_output_tokens", "temperature",
  "top_p", "tools", "tool_choice", "parallel_tool_calls", "text", "reasoning", "include", "truncation", "background",
  "service_tier", "user", "safety_identifier", "prompt_cache_key", "metadata", "top_logprobs",
]);
const READ_CHUNKS = [
  "for chunk in stream:",
  "    if chunk.choices:",
  '        print(chunk.choices[0].delta.content or "", end="", flush=True)',
];
const READ_EVENTS = [
  "for event in stream:",
  '    if event.type == "response.output_text.delta":',
  '        print(event.delta, end="", flush=True)',
];

/** The dialog; `request()` returns the request to show. */
export class CodeDialog {
  #dialog = byId("code-dialog");
  #request;
  #kind = "curl";

  constructor(request) {
    this.#request = request;
    byId("code-close").addEventListener("click", () => this.#dialog.close());
    byId("code-kinds").append(...Object.entries(KINDS).map(([kind, [label]]) => this.#choice(kind, label)));
  }

  open() {
    this.#show();
    this.#dialog.showModal();
  }

  #choice(kind, label) {
    const choose = () => {
      this.#kind = kind;
      this.#show();
    };
    const input = element("input", {
      type: "radio",
      name: "code-kind",
      value: kind,
      checked: kind === this.#kind,
      onchange: choose,
    });
    return element("label", {}, input, element("span", {}, label));
  }

  #show() {
    const [, language, write] = KINDS[this.#kind];
    const request = this.#request();
    const text = (one) => write(one, addressOf("v1"), Boolean(apiKey.get()));
    const short = shortened(request);
    byId("code-text").replaceChildren(
      codeBlock(text(short ?? request), language, short && text(request)),
      ...(short ? [element("p", { class: "note" }, SHORTENED)] : []),
    );
  }
}

/** Return a curl command. Pure. */
export function asCurl(request, address, hasKey) {
  const json = JSON.stringify(request, null, 2);
  const isKept = "input" in request;
  const hasPictures = (request.messages ?? request.input).some(({ content }) => Array.isArray(content));
  // A picture is longer than what systems take as one argument.
  const body = hasPictures ? `@- <<'END'\n${json}\nEND` : `'${json.replaceAll("'", "'\\''")}'`;
  const key = hasKey ? ` \\\n  -H "authorization: Bearer $${KEY}"` : "";
  const url = `${address}/${isKept ? "responses" : "chat/completions"}`;
  return `curl -sN ${url} \\\n  -H 'content-type: application/json'${key} \\\n  -d ${body}`;
}

/** Return a program with OpenAI's client. Pure. */
export function asPython(request, address, hasKey) {
  const isKept = "input" in request;
  const known = isKept ? OPENAI_RESPONSES : OPENAI;
  const extra = Object.fromEntries(Object.entries(request).filter(([name]) => !known.has(name)));
  const own = Object.entries(request).filter(([name]) => known.has(name));
  const fields = [...own, ["extra_body", extra]].map(([name, value]) => `    ${name}=${literal(value, 4)},`);
  const key = hasKey ? `os.environ["${KEY}"]` : '"none"';
  return [
    ...(hasKey ? ["import os", ""] : []),
    "import openai",
    "",
    `client = openai.OpenAI(base_url="${address}", api_key=${key})`,
    `stream = client.${isKept ? "responses" : "chat.completions"}.create(`,
    ...fields,
    ")",
    ...(isKept ? READ_EVENTS : READ_CHUNKS),
  ].join("\n");
}

/** Return a value as Python writes it. */
function literal(value, indent) {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const isList = Array.isArray(value);
  const parts = isList
    ? value.map((part) => literal(part, indent + 4))
    : Object.entries(value).map(([name, part]) => `${JSON.stringify(name)}: ${literal(part, indent + 4)}`);
  const [open, close] = isList ? "[]" : "{}";
  const short = `${open}${parts.join(", ")}${close}`;
  if (short.length <= 88 && !short.includes("\n")) return short;
  const pad = " ".repeat(indent + 4);
  return `${open}\n${parts.map((part) => `${pad}${part},`).join("\n")}\n${" ".repeat(indent)}${close}`;
}
