// The server's API: the key, errors as ApiError, and a chat as a stream of chunks. Nothing else calls fetch.

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

/** Yield the progress of a video, and last the video. Raises ApiError, AbortError. */
export async function* streamVideo(request, signal) {
  for await (const chunks of streamOf("v1/videos/generations", request, signal)) yield* chunks;
}

/** Yield the chunks of a streamed chat, an array for each piece from the network. Raises ApiError, AbortError. */
export function streamChat(request, signal) {
  return streamOf("v1/chat/completions", request, signal);
}

async function* streamOf(path, request, signal) {
  const response = await call(path, request, signal);
  let isComplete = false;
  try {
    for await (const events of eventsOf(response.body)) {
      isComplete ||= events.includes("[DONE]");
      yield* chunksOf(events, response);
    }
  } catch (error) {
    if (error instanceof TypeError && !signal.aborted) throw new ApiError(CUT);
    throw error;
  }
  if (!isComplete) throw new ApiError(CUT);
}

async function call(path, body = null, signal = null) {
  const headers = apiKey.get() ? { authorization: `Bearer ${apiKey.get()}` } : {};
  const options = { headers, signal, cache: "no-store" };
  if (body !== null) {
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
