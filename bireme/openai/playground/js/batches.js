// Batches: a file of requests that the server answers when it has time, how far each is, and its results.

import { announce } from "./announcer.js";
import { ApiError, cancelBatch, fileContent, listBatches, startBatch } from "./api.js";
import { byId, element } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";

const LOOK_MS = 1000; // between two looks at batches under way
const SAVED_MS = 60_000; // until which the browser has surely begun to write a file
const FIRST_BYTES = 1 << 20; // of a file: its first line says where its requests go
const UNFINISHED = ["validating", "in_progress", "finalizing", "cancelling"];
const CANCELLABLE = ["validating", "in_progress"];
const MAX_PROBLEMS = 3; // that are shown
const EXAMPLES = ["What is 12 + 30?", "What colour is the sky?", "Count from 1 to 9.", "Say oar three times."];

/** The view in place of the chat while it is open. `model` gives the chosen model's name. */
export class BatchView {
  #model;
  #rows = new Map(); // id -> BatchRow
  #timer = null;

  constructor(model) {
    this.#model = model;
    byId("batch-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#start(byId("batch-file").files[0]);
    });
    byId("batch-example").addEventListener("click", () => this.#start(this.#example()));
  }

  get isOpen() {
    return !byId("batches").hidden;
  }

  open() {
    byId("batches").hidden = false;
    this.#look();
  }

  close() {
    byId("batches").hidden = true;
    clearTimeout(this.#timer);
  }

  async #start(file) {
    await this.#attempt(async () => {
      const batch = await startBatch(file, await endpointOf(file));
      announce(`Batch of ${file.name} started`);
      this.#show([batch]);
      this.#look();
    });
  }

  /** Show the newest batches, again and again while one is under way. */
  async #look() {
    clearTimeout(this.#timer);
    await this.#attempt(async () => {
      const batches = await listBatches();
      this.#show(batches.toReversed());
      clearTimeout(this.#timer); // of another look at the same time
      if (this.isOpen && batches.some(isUnderWay)) this.#timer = setTimeout(() => this.#look(), LOOK_MS);
    });
  }

  #show(batches) {
    byId("batch-none").hidden = batches.length + this.#rows.size > 0;
    for (const batch of batches) {
      let row = this.#rows.get(batch.id);
      if (!row) {
        row = new BatchRow((work) => this.#attempt(work));
        this.#rows.set(batch.id, row);
        byId("batch-list").prepend(row.node);
      }
      row.show(batch);
    }
  }

  /** Do something with the server, and show why it failed if it did. */
  async #attempt(work) {
    try {
      await work();
      byId("batch-error").replaceChildren();
    } catch (error) {
      const shown = error instanceof ApiError ? error : new ApiError(String(error.message ?? error));
      byId("batch-error").replaceChildren(errorBlock(shown, [remedy("retry", "Look again", () => this.#look())]));
    }
  }

  #example() {
    const lines = EXAMPLES.map((content, at) => ({
      custom_id: `example-${at + 1}`,
      method: "POST",
      url: "/v1/chat/completions",
      body: { model: this.#model(), messages: [{ role: "user", content }] },
    }));
    return new File([lines.map((line) => `${JSON.stringify(line)}\n`).join("")], "example.jsonl");
  }
}

/** A batch in the list. */
class BatchRow {
  #batch = null;
  #name = element("span", { class: "batch-name" });
  #status = element("span", { class: "batch-status" });
  #bar = element("progress", { max: "1", value: "0", "aria-label": "Progress" });
  #counts = element("span", { class: "batch-counts" });
  #problem = element("p", { class: "note problem" });
  #actions = element("div", { class: "row" });
  #attempt;

  constructor(attempt) {
    this.#attempt = attempt;
    const head = element("div", { class: "batch-head" }, this.#name, this.#status);
    this.node = element("li", { class: "batch" }, head, this.#bar, this.#counts, this.#problem, this.#actions);
  }

  show(batch) {
    const before = this.#batch;
    this.#batch = batch;
    const { total, completed, failed } = batch.request_counts;
    const began = new Date(batch.created_at * 1000).toLocaleString("en", { dateStyle: "medium", timeStyle: "short" });
    this.#name.textContent = `${batch.endpoint}, ${began}`;
    this.#status.textContent = batch.status.replace("_", " ");
    this.#bar.max = total || 1;
    this.#bar.value = completed + failed;
    this.#counts.textContent = `${completed + failed} of ${total}${failed ? `, ${failed} failed` : ""}`;
    const problems = batch.errors?.data ?? [];
    this.#problem.textContent = problems.slice(0, MAX_PROBLEMS).map(({ message }) => message).join(". ");
    if (before?.status === batch.status) return;
    if (before && !isUnderWay(batch)) announce(`Batch ${batch.status}: ${this.#counts.textContent}`);
    this.#actions.replaceChildren(...this.#buttons());
  }

  #buttons() {
    const { id, status, output_file_id: output, error_file_id: errors } = this.#batch;
    const cancel = async () => this.show(await cancelBatch(id));
    return [
      CANCELLABLE.includes(status) ? remedy("stop", "Cancel", () => this.#attempt(cancel)) : null,
      output ? remedy("down", "Save answers", () => this.#attempt(() => save(output, `${id}_output.jsonl`))) : null,
      errors ? remedy("down", "Save errors", () => this.#attempt(() => save(errors, `${id}_errors.jsonl`))) : null,
    ].filter(Boolean);
  }
}

function isUnderWay({ status }) {
  return UNFINISHED.includes(status);
}

/** Return where the requests of a file go, as its first line says. Raises ApiError. */
async function endpointOf(file) {
  const [first] = (await file.slice(0, FIRST_BYTES).text()).trimStart().split("\n", 1);
  try {
    const { url } = JSON.parse(first);
    if (typeof url === "string") return url;
  } catch {
    // told below
  }
  const form = 'Each line is {"custom_id", "method", "url", "body"}.';
  throw new ApiError(`${file.name}: its first line is no request. ${form}`);
}

/** Have the browser save a file of the server. The key goes into a header, so that no link could do it. */
async function save(id, name) {
  const address = URL.createObjectURL(await fileContent(id));
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), SAVED_MS);
}
