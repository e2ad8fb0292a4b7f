// The form of an answer: text, any JSON, or JSON by a schema.

export const EXAMPLE_SCHEMA = {
  type: "object",
  properties: { name: { type: "string", maxLength: 20 }, age: { type: "integer" } },
  required: ["name", "age"],
  additionalProperties: false,
};

/** Return {format, problem} for a request; format null is text. A schema may come in OpenAI's wrapping. */
export function parseFormat(kind, schemaText) {
  if (kind === "json_object") return { format: { type: kind }, problem: "" };
  if (kind !== "json_schema") return { format: null, problem: "" };
  if (!schemaText.trim()) return { format: null, problem: "Write a JSON schema, or take the example" };
  let tree;
  try {
    tree = JSON.parse(schemaText);
  } catch (error) {
    return { format: null, problem: `Not valid JSON: ${error.message}` };
  }
  if (typeof tree !== "object" || tree === null || Array.isArray(tree))
    return { format: null, problem: "A schema is a JSON object" };
  const isWrapped = typeof tree.schema === "object" && typeof tree.name === "string";
  const schema = isWrapped ? tree : { name: "answer", strict: true, schema: tree };
  return { format: { type: kind, json_schema: schema }, problem: "" };
}
