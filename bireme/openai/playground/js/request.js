// From settings and messages to a request. Pure: what is shown as code is what is sent.

import { parseExtra } from "./extra_fields.js";
import { NUMBER_FIELDS } from "./fields.js";
import { parseFormat } from "./response_format.js";
import { parseTools } from "./tools.js";

/** Return the request's JSON. `settings` are the texts of the settings, without problems. */
export function buildRequest(model, messages, settings) {
  const request = {
    model,
    messages: [...systemMessages(settings), ...messages],
    stream: true,
    stream_options: { include_usage: true },
  };
  const extensions = { return_timing: true };
  for (const field of NUMBER_FIELDS) {
    const text = (settings[field.name] ?? "").trim();
    if (text) (field.isExtension ? extensions : request)[field.name] = Number(text);
  }
  Object.assign(request, words(settings), toolFields(settings));
  const { format } = parseFormat(settings.format, settings.schema);
  if (format) request.response_format = format;
  const { bireme, ...extra } = parseExtra(settings.extra).fields;
  return { ...request, ...extra, bireme: { ...extensions, ...bireme } };
}

function systemMessages({ system }) {
  return system.trim() ? [{ role: "system", content: system }] : [];
}

function words({ stop, effort }) {
  const lines = stopStrings(stop);
  return { ...(lines.length ? { stop: lines } : {}), ...(effort ? { reasoning_effort: effort } : {}) };
}

/** Return the stop strings: one a line, \n and \t for what can't be typed in one. */
export function stopStrings(text) {
  const lines = text.split("\n").filter((line) => line !== "");
  return lines.map((line) => line.replace(/\\([nt\\])/g, (_, sign) => ({ n: "\n", t: "\t", "\\": "\\" })[sign]));
}

function toolFields({ tools: text, tool_choice: choice, parallel }) {
  const { tools } = parseTools(text);
  if (!tools.length) return {};
  const fields = { tools };
  if (["none", "required"].includes(choice)) fields.tool_choice = choice;
  else if (choice.startsWith("function:"))
    fields.tool_choice = { type: "function", function: { name: choice.slice(9) } };
  if (!parallel) fields.parallel_tool_calls = false;
  return fields;
}
