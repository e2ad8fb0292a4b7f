// Fields of a request that the page has no control for, as the user writes them.

const OWN = new Set(["model", "messages", "stream", "stream_options", "n"]); // the page depends on them

/** Return {fields, problem} of a text: a JSON object whose `bireme` part joins the page's own. */
export function parseExtra(text) {
  if (!text.trim()) return { fields: {}, problem: "" };
  let tree;
  try {
    tree = JSON.parse(text);
  } catch (error) {
    return { fields: {}, problem: `Not valid JSON: ${error.message}` };
  }
  if (typeof tree !== "object" || tree === null || Array.isArray(tree))
    return { fields: {}, problem: "Write a JSON object" };
  const own = Object.keys(tree).find((name) => OWN.has(name));
  return own ? { fields: {}, problem: `The page sets ${own} itself` } : { fields: tree, problem: "" };
}
