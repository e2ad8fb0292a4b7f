// What to begin with: each example shows something that the server can do, and sets what it needs.

import { EXAMPLE_SCHEMA } from "./response_format.js";
import { EXAMPLE_TOOLS } from "./tools.js";

const PLAIN = { effort: "", format: "text", tools: "", tool_choice: "auto" };
const SHOWN = (tree) => JSON.stringify(tree, null, 2);

export const EXAMPLES = [
  {
    title: "Tell a story",
    text: "Continue the story: Once upon a time, Rosa lost a red kite in the forest.",
    settings: PLAIN,
  },
  { title: "Think first", text: "What is 27 + 35?", settings: { ...PLAIN, effort: "medium" } },
  { title: "Call a tool", text: "What is the weather in Oslo?", settings: { ...PLAIN, tools: SHOWN(EXAMPLE_TOOLS) } },
  {
    title: "Answer by a schema",
    text: "Ada is 30 years old. Answer in JSON with name, age.",
    settings: { ...PLAIN, format: "json_schema", schema: SHOWN(EXAMPLE_SCHEMA) },
  },
];
