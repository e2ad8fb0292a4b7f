// The server's API: the key, errors as ApiError, a chat as a stream of chunks. Nothing else calls fetch.

import { ResponseReader } from "./responses.js";
import { eventsOf } from "./sse.js";

const KEY = "bireme.api-key";
const UNREACHABLE = "The server can't be reached. It may be restarting, or the connection is down.";
const NOT_UNDERSTOOD = "The server sent something that was not understood.";
const CUT = "The connection ended before the answer did.";

/** What went wrong with a call, in the server's words where it had any. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = "", requestId = "" } = {}) {
    super(message);
    Object.assign(this, { name: "ApiError", status, code, requestId });
  }

  /** Plain fields, to be kept; `new ApiError(kept.message, kept)` makes it again. */
  toJSON() {
    return { ...this, message: this.message };
  }

  get needsKey() {
    return this.status === 401;
  }
}

/** The key lives as long as the tab and goes nowhere but into the header of calls. */
export const apiKey = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (key) => sessionStorage.setItem(KEY, key),
  forget: () => sessionStorage.removeItem(KEY),
};

/** Return the address of an API path; relative to the page, so that a proxy may put both under a prefix. */
export function addressOf(path) {
  return new URL(path, document.baseURI).href;
}

/** Return the models: [{id, max_model_len, bireme: {input_modalities, output_modalities}, ...}]. Raises ApiError. */
export async function listModels() {
  return (await (await call("v1/models")).json()).data;
}

/** Return {vectors, numTokens} of texts. Raises ApiError, AbortError. */
export async function embedTexts(model, input, signal) {
  const reply = await (await call("v1/embeddings", { model, input }, signal)).json();
  return { vectors: reply.data.map((one) => one.embedding), numTokens: reply.usage.prompt_tokens };
}

/** Upload a file of requests to `endpoint` and start it; return the batch. Raises ApiError. */
export async function startBatch(file, endpoint) {
  const form = new FormData();
  form.append("purpose", "batch");
  form.append("file", file, file.name);
  const { id } = await (await call("v1/files", form)).json();
  return (await call("v1/batches", { input_file_id: id, endpoint, completion_window: "24h" })).json();
}

/** Return the newest batches, the newest first. Raises ApiError. */
export async function listBatches() {
  return (await (await call("v1/batches")).json()).data;
}

/** Return the batch as it is then. Raises ApiError. */
export async function cancelBatch(id) {
  return (await call(`v1/batches/${id}/cancel`, {})).json();
}

/** Return a Blob. Raises ApiError. */
export async function fileContent(id) {
  return (await call(`v1/files/${id}/content`)).blob();
}

/** Return what took a request's time, by its id or its answer's. Raises ApiError. */
export async function requestTimeline(id) {
  return (await call(`v1/requests/${encodeURIComponent(id)}/timeline`)).json();
}

/** Yield states of workers and queues, an array for each piece from the network. Raises ApiError, AbortError. */
export function watchLive(signal) {
  return streamOf("v1/live", null, signal);
}

/** Yield the progress of a video, and last the video. Raises ApiError, AbortError. */
export async function* streamVideo(request, signal) {
  for await (const chunks of streamOf("v1/videos/generations", request, signal)) yield* chunks;
}

/** Yield the chunks of a streamed chat, an array for each piece from the network. Raises ApiError, AbortError. */
export function streamChat(request, signal) {
  return streamOf("v1/chat/completions", request, signal);
}

/** The same of an answer that the server keeps; the last chunk has its id as `keptAs`. */
export async function* streamResponse(request, signal) {
  const reader = new ResponseReader();
  for await (const events of streamOf("v1/responses", request, signal, ResponseReader.isLast)) {
    const chunks = events.map((event) => reader.chunk(event)).filter(Boolean);
    const failed = chunks.find((chunk) => chunk.error);
    yield chunks.filter((chunk) => !chunk.error);
    if (failed) throw new ApiError(failed.error.message, { code: failed.error.code });
  }
}

/** Return all items of the conversation that ends with this response. Raises ApiError. */
export async function keptItems(id) {
  const { output } = await (await call(`v1/responses/${id}`)).json();
  const items = [];
  for (let page = { has_more: true, last_id: "" }; page.has_more; ) {
    const after = page.last_id ? `&after=${page.last_id}` : "";
    page = await (await call(`v1/responses/${id}/input_items?order=asc&limit=100${after}`)).json();
    items.push(...page.data);
  }
  return [...items, ...output];
}

/** Remove a response and those that it goes on from, as far as they are there. Raises ApiError. */
export async function forgetResponse(id) {
  for (let next = id; next; ) {
    try {
      const { previous_response_id: previous } = await (await call(`v1/responses/${next}`)).json();
      await call(`v1/responses/${next}`, null, null, "DELETE");
      next = previous;
    } catch (error) {
      if (error.status === 404 && next !== id) return;
      throw error;
    }
  }
}

async function* streamOf(path, request, signal, isLast = (event) => event === "[DONE]") {
  const response = await call(path, request, signal);
  let isComplete = false;
  try {
    for await (const events of eventsOf(response.body)) {
      isComplete ||= events.some(isLast);
      yield* chunksOf(events, response);
    }
  } catch (error) {
    if (error instanceof TypeError && !signal.aborted) throw new ApiError(CUT);
    throw error;
  }
  if (!isComplete) throw new ApiError(CUT);
}

async function call(path, body = null, signal = null, method = "GET") {
  const headers = apiKey.get() ? { authorization: `Bearer ${apiKey.get()}` } : {};
  const options = { method, headers, signal, cache: "no-store" };
  if (body instanceof FormData) Object.assign(options, { method: "POST", body }); // the browser names its boundary
  else if (body !== null) {
    Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    headers["content-type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(addressOf(path), options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(UNREACHABLE);
  }
  if (!response.ok) throw await errorOf(response);
  return response;
}

/** Yield what came before an error, then raise it: what was said stays said. */
function* chunksOf(events, response) {
  const chunks = [];
  for (const event of events.filter((each) => each !== "[DONE]")) {
    const chunk = parsed(event);
    if (chunk && !chunk.error) {
      if (response.headers.has("traceresponse")) chunk.requestId = idOf(response); // there may be a timeline of it
      chunks.push(chunk);
      continue;
    }
    yield chunks;
    const { message, code } = chunk?.error ?? { message: NOT_UNDERSTOOD };
    throw new ApiError(message, { code: code ?? "", requestId: idOf(response) });
  }
  yield chunks;
}

/** Return the JSON of an event, or null. */
function parsed(event) {
  try {
    return JSON.parse(event);
  } catch {
    return null;
  }
}

async function errorOf(response) {
  const told = await response.json().then(
    (body) => body.error,
    () => null,
  );
  return new ApiError(told?.message ?? `${response.status} ${response.statusText}`, {
    status: response.status,
    code: told?.code ?? "",
    requestId: idOf(response),
  });
}

function idOf(response) {
  return response.headers.get("x-request-id") ?? "";
}
