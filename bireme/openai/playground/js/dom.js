// Elements without markup: what a string says is always text. There is no other way to make elements here.

/**
 * Make an element. Attributes: `class` and others as they are, `onclick` and its like as listeners, booleans as
 * present or absent, null left out. Children: nodes, strings (as text), null.
 */
export function element(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** Make an element of a drawing (SVG), otherwise the same. */
export function drawing(tag, attributes = {}, ...children) {
  return filled(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
}

function filled(made, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return made;
}

/** Return an icon of index.html's sheet. It says nothing to screen readers: the button around it has a name. */
export function icon(name) {
  return drawing("svg", { class: "icon", "aria-hidden": "true" }, drawing("use", { href: `#icon-${name}` }));
}

/** Return a button that shows an icon, and a text beside it where `shown`. */
export function button(name, label, onclick, { shown = false, ...attributes } = {}) {
  const named = shown ? {} : { "aria-label": label, title: label };
  const kind = shown ? "button quiet" : "button icon-only";
  return element(
    "button",
    { type: "button", class: kind, onclick, ...named, ...attributes },
    icon(name),
    shown ? label : null,
  );
}

/** Return the element with this id; a page without it is broken. */
export function byId(id) {
  const found = document.getElementById(id);
  if (!found) throw new Error(`index.html has no #${id}`);
  return found;
}
