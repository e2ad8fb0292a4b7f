// Chats as Responses, which the server keeps: requests, the events of an answer, and what was said before. Pure.

const EFFORT = "reasoning_effort";

/** Return a chat's request as one of Responses that goes on from `previous`, the id of an answer, or from nothing. */
export function asResponse(request, previous) {
  const { messages, stream_options: _, response_format: format, [EFFORT]: effort, ...rest } = request;
  const { max_completion_tokens: limit, tools, tool_choice: choice, ...fields } = rest;
  const [system] = messages.filter(({ role }) => role === "system");
  return {
    ...fields,
    ...(system ? { instructions: system.content } : {}),
    input: messages.filter(({ role }) => role !== "system").flatMap(itemsOf),
    store: true,
    ...(previous ? { previous_response_id: previous } : {}),
    ...(limit ? { max_output_tokens: limit } : {}),
    ...(effort ? { reasoning: { effort } } : {}),
    ...(format ? { text: { format: { type: format.type, ...format.json_schema } } } : {}),
    ...(tools ? { tools: tools.map((tool) => ({ type: "function", ...tool.function })) } : {}),
    ...(choice ? { tool_choice: choice.function ? { type: "function", ...choice.function } : choice } : {}),
  };
}

function itemsOf({ role, content, tool_calls: calls = [], tool_call_id: id, reasoning_content: thought }) {
  if (role === "tool") return [{ type: "function_call_output", call_id: id, output: content }];
  const parts = Array.isArray(content) ? content.map(partOf) : content;
  return [
    ...(thought ? [{ type: "reasoning", summary: [], content: [{ type: "reasoning_text", text: thought }] }] : []),
    ...(content ? [{ role, content: parts }] : []),
    ...calls.map((call) => ({ type: "function_call", call_id: call.id, ...call.function })),
  ];
}

function partOf({ type, text, image_url: image }) {
  return type === "text" ? { type: "input_text", text } : { type: "input_image", image_url: image.url };
}

/** Reads the events of an answer as the chunks of a chat. */
export class ResponseReader {
  #numCalls = 0;

  /** Is this, as text, the last event? */
  static isLast(event) {
    return /"type":"response\.(completed|incomplete|failed)"/.test(event); // in what a model says quotes are escaped
  }

  /** Return the chunk of an event, or null where it says nothing new. */
  chunk({ type, delta, item, response }) {
    if (type === "response.created") return { model: response.model };
    if (type === "response.output_text.delta") return saying({ content: delta });
    if (type === "response.reasoning_text.delta") return saying({ reasoning_content: delta });
    if (type === "response.output_item.added" && item.type === "function_call") {
      this.#numCalls += 1;
      return this.#calling({ id: item.call_id, function: { name: item.name } });
    }
    if (type === "response.function_call_arguments.delta") return this.#calling({ function: { arguments: delta } });
    if (type === "response.failed") return { error: response.error };
    if (type === "response.completed" || type === "response.incomplete") return this.#end(response);
    return null;
  }

  #calling(part) {
    return saying({ tool_calls: [{ index: this.#numCalls - 1, ...part }] });
  }

  #end({ id, status, usage, bireme }) {
    const reason = status === "incomplete" ? "length" : this.#numCalls ? "tool_calls" : "stop";
    const told = {
      prompt_tokens: usage.input_tokens,
      completion_tokens: usage.output_tokens,
      prompt_tokens_details: usage.input_tokens_details,
      completion_tokens_details: usage.output_tokens_details,
    };
    return { keptAs: id, bireme, usage: told, choices: [{ delta: {}, finish_reason: reason }] };
  }
}

function saying(delta) {
  return { choices: [{ delta }] };
}

/** Return the turns of a kept conversation: {text, pictures} of the user, {content, reasoning, calls} of the model. */
export function turnsOf(items) {
  const turns = [];
  for (const item of items) {
    if (item.type === "function_call_output") {
      const call = turns.flatMap((turn) => turn.calls ?? []).findLast((one) => one.id === item.call_id);
      if (call) call.result = textOf(item.output);
    } else if (item.role === "user") turns.push(userTurn(item.content));
    else if (item.type !== "message" || item.role === "assistant") take(answerOf(turns), item);
  }
  return turns;
}

/** Return the answer that grows: the last turn, unless its calls have results already. */
function answerOf(turns) {
  const last = turns.at(-1);
  if (!last?.calls || last.calls.some((call) => call.result !== null))
    turns.push({ content: "", reasoning: "", calls: [] });
  return turns.at(-1);
}

function take(answer, item) {
  if (item.type === "message") answer.content += textOf(item.content);
  else if (item.type === "reasoning") answer.reasoning += textOf(item.content ?? item.summary);
  else answer.calls.push({ id: item.call_id, name: item.name, arguments: item.arguments, result: null });
}

function userTurn(parts) {
  const pictures = parts.filter(({ type }) => type === "input_image");
  const shown = pictures.map(({ image_url: url }, at) => ({ name: `picture ${at + 1}`, url }));
  return { text: textOf(parts), pictures: shown };
}

function textOf(parts) {
  return typeof parts === "string" ? parts : parts.map((part) => part.text ?? "").join("");
}
