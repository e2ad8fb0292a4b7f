// Tools as the user writes them: JSON, checked before it is sent.

const NAME = /^[A-Za-z0-9_.-]{1,64}$/;

export const EXAMPLE_TOOLS = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "Weather in a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];

/** Return {tools, problem} of a text. One tool may stand without the list, a function without its wrapping. */
export function parseTools(text) {
  if (!text.trim()) return { tools: [], problem: "" };
  let tree;
  try {
    tree = JSON.parse(text);
  } catch (error) {
    return { tools: [], problem: `Not valid JSON: ${error.message}` };
  }
  const tools = (Array.isArray(tree) ? tree : [tree]).map(wrapped);
  const problem = tools.map(toolProblem).find(Boolean) ?? doubleName(tools);
  return { tools: problem ? [] : tools, problem };
}

function wrapped(tool) {
  return isObject(tool) && !tool.function && typeof tool.name === "string"
    ? { type: "function", function: tool }
    : tool;
}

function toolProblem(tool, at) {
  const where = `Tool ${at + 1}`;
  if (!isObject(tool) || !isObject(tool.function)) return `${where}: write {"type": "function", "function": {...}}`;
  if (tool.type !== "function") return `${where}: "type" must be "function"`;
  const { name, parameters, description } = tool.function;
  if (typeof name !== "string" || !NAME.test(name)) return `${where}: "name" takes 1 to 64 letters, digits, _ . or -`;
  if (description !== undefined && typeof description !== "string") return `${where}: "description" must be a string`;
  if (parameters !== undefined && !isObject(parameters)) return `${where}: "parameters" must be a JSON schema`;
  return "";
}

function doubleName(tools) {
  const names = tools.map((tool) => tool.function.name);
  const double = names.find((name, at) => names.indexOf(name) !== at);
  return double ? `Two tools are called ${double}` : "";
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
