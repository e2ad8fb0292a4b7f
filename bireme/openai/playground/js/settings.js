// The settings panel: its fields, what is wrong with them, and that they are remembered. The API key is not among them.

import { button, byId, element } from "./dom.js";
import { parseExtra } from "./extra_fields.js";
import { NUMBER_FIELDS, numberProblem } from "./fields.js";
import { EXAMPLE_SCHEMA, parseFormat } from "./response_format.js";
import { recall, remember } from "./storage.js";
import { EXAMPLE_TOOLS, parseTools } from "./tools.js";

const DEFAULTS = {
  system: "",
  effort: "",
  stop: "",
  format: "text",
  schema: "",
  tools: "",
  extra: "",
  tool_choice: "auto",
  parallel: true,
  keep: false,
};
const SHOW = (tree) => JSON.stringify(tree, null, 2);

/** The panel's fields. `onChange(values)` is called after each change, `reveal` before a field gets the focus. */
export class Settings {
  #form = byId("settings-form");
  #onChange;
  #reveal;

  constructor(onChange, reveal) {
    this.#onChange = onChange;
    this.#reveal = reveal;
    byId("numbers").append(...NUMBER_FIELDS.map(numberField));
    byId("schema-actions").append(...jsonActions("schema", EXAMPLE_SCHEMA, () => this.#changed()));
    byId("tools-actions").append(...jsonActions("tools", EXAMPLE_TOOLS, () => this.#changed()));
    this.#form.addEventListener("input", () => this.#changed());
    this.#form.addEventListener("submit", (event) => event.preventDefault());
    byId("reset").addEventListener("click", () => this.apply({}, true));
    this.apply(recall("settings", {}), true);
    for (const problem of this.#problems()) problem.control.closest("details")?.setAttribute("open", "");
  }

  /** Return the texts of all fields, by name. */
  values() {
    const controls = [...this.#form.elements].filter((control) => control.name);
    return Object.fromEntries(
      controls.map((control) => [control.name, control.type === "checkbox" ? control.checked : control.value]),
    );
  }

  /** Set fields; the others stay, or take their defaults where `isReset`. */
  apply(values, isReset = false) {
    const numbers = Object.fromEntries(NUMBER_FIELDS.map(({ name }) => [name, ""]));
    const wanted = isReset ? { ...numbers, ...DEFAULTS, ...values } : values;
    if ("tools" in wanted) byId("tools").value = wanted.tools;
    this.#offerChoices(wanted.tool_choice);
    for (const [name, value] of Object.entries(wanted)) {
      const control = this.#form.elements.namedItem(name);
      if (!control) continue; // remembered by another version
      if (control.type === "checkbox") control.checked = value;
      else control.value = value;
    }
    this.#changed();
  }

  /** Go to the first field that can't be sent and return what is wrong with it; "" when all can be. */
  goToProblem() {
    const first = this.#problems()[0];
    if (!first) return "";
    this.#reveal();
    first.control.closest("details")?.setAttribute("open", "");
    first.control.focus();
    return first.text;
  }

  #changed() {
    this.#offerChoices(byId("tool_choice").value);
    const values = this.values();
    byId("schema-field").hidden = values.format !== "json_schema";
    for (const field of NUMBER_FIELDS) showNumber(field, values[field.name]);
    const { tools, problem } = parseTools(values.tools);
    showNote("tools", problem, tools.map((tool) => tool.function.name).join(", "));
    showNote("schema", parseFormat(values.format, values.schema).problem, "");
    showNote("extra", parseExtra(values.extra).problem, "");
    byId("format-problem").textContent = formatClash(values);
    remember("settings", values);
    this.#onChange(values);
  }

  #problems() {
    const values = this.values();
    const numbers = NUMBER_FIELDS.map(({ name, ...field }) => [name, numberProblem(field, values[name])]);
    const others = [
      ["schema", parseFormat(values.format, values.schema).problem],
      ["tools", parseTools(values.tools).problem],
      ["format", formatClash(values)],
      ["extra", parseExtra(values.extra).problem],
    ];
    return [...numbers, ...others].filter(([, text]) => text).map(([name, text]) => ({ control: byId(name), text }));
  }

  #offerChoices(chosen = "auto") {
    const names = parseTools(byId("tools").value).tools.map((tool) => tool.function.name);
    const choices = [
      ["auto", "The model decides"],
      ["required", "It must call one"],
      ["none", "It must not call any"],
    ];
    choices.push(...names.map((name) => [`function:${name}`, `It must call ${name}`]));
    const select = byId("tool_choice");
    select.replaceChildren(...choices.map(([value, text]) => element("option", { value }, text)));
    select.value = choices.some(([value]) => value === chosen) ? chosen : "auto";
  }
}

function formatClash({ format, tools }) {
  return format !== "text" && tools.trim() ? "Not together with tools: clear the tools, or answer in text" : "";
}

function numberField(field) {
  const { name, label, hint, min, max, step, hasSlider } = field;
  const input = element("input", {
    id: name,
    name,
    type: "text",
    inputmode: "decimal",
    placeholder: "default",
    "aria-describedby": `${name}-note`,
  });
  const note = element("p", { class: "note", id: `${name}-note` }, hint);
  const parts = [element("label", { for: name, title: hint }, label), input];
  if (hasSlider) parts.push(slider(input, { min, max, step, label }));
  return element("div", { class: hasSlider ? "field number with-slider" : "field number" }, parts, note);
}

/** The slider is for the mouse; keyboards and screen readers have the number beside it. */
function slider(input, { min, max, step, label }) {
  const move = () => {
    input.value = range.value;
    input.dispatchEvent(new Event("input", { bubbles: true }));
  };
  const range = element("input", {
    type: "range",
    id: `${input.id}-slider`,
    min,
    max,
    step,
    "aria-label": `${label}, slider`,
    tabindex: "-1",
    oninput: (event) => (event.stopPropagation(), move()),
  });
  return range;
}

function showNumber(field, text) {
  const problem = numberProblem(field, text);
  const input = byId(field.name);
  const note = byId(`${field.name}-note`);
  input.setAttribute("aria-invalid", String(Boolean(problem)));
  note.textContent = problem || field.hint;
  note.classList.toggle("problem", Boolean(problem));
  const range = document.getElementById(`${field.name}-slider`);
  if (!range) return;
  range.classList.toggle("unset", !text.trim());
  range.value = text.trim() && !problem ? text : field.max === 1 ? 1 : (field.min + field.max) / 2;
}

function showNote(name, problem, text) {
  const note = byId(`${name}-problem`);
  byId(name).setAttribute("aria-invalid", String(Boolean(problem)));
  note.textContent = problem || text;
  note.classList.toggle("problem", Boolean(problem));
}

function jsonActions(name, example, changed) {
  const set = (text) => {
    byId(name).value = text;
    changed();
    byId(name).focus();
  };
  const tidy = () => {
    try {
      set(SHOW(JSON.parse(byId(name).value)));
    } catch {
      byId(name).focus(); // the note says what is wrong
    }
  };
  const quiet = { shown: true, class: "button quiet small" };
  return [
    button("plus", "Example", () => set(SHOW(example)), { ...quiet, id: `${name}-example` }),
    button("code", "Tidy", tidy, { ...quiet, id: `${name}-tidy` }),
    button("close", "Clear", () => set(""), { ...quiet, id: `${name}-clear` }),
  ];
}
