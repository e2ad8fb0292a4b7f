// The numbers of a request that the user may set. Left empty, a field is not sent: the server's default holds.

export const NUMBER_FIELDS = [
  {
    name: "temperature",
    label: "Temperature",
    min: 0,
    max: 2,
    step: 0.05,
    hasSlider: true,
    hint: "0 always takes the likeliest token",
  },
  {
    name: "top_p",
    label: "Top p",
    min: 0,
    max: 1,
    step: 0.01,
    hasSlider: true,
    hint: "Only the likeliest tokens that make up this share",
  },
  {
    name: "max_completion_tokens",
    label: "Max tokens",
    min: 1,
    step: 1,
    isInteger: true,
    hint: "The longest answer, thoughts included",
  },
  {
    name: "seed",
    label: "Seed",
    min: 0,
    max: Number.MAX_SAFE_INTEGER,
    step: 1,
    isInteger: true,
    hint: "The same seed gives the same answer",
  },
  {
    name: "top_k",
    label: "Top k",
    min: 0,
    step: 1,
    isInteger: true,
    isExtension: true,
    hint: "Only so many of the likeliest tokens; 0 is off",
  },
  {
    name: "min_p",
    label: "Min p",
    min: 0,
    max: 1,
    step: 0.01,
    isExtension: true,
    hint: "Only tokens at least this share as likely as the likeliest",
  },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    min: -2,
    max: 2,
    step: 0.1,
    hint: "Against what was said at all",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    min: -2,
    max: 2,
    step: 0.1,
    hint: "Against what was said often",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 0,
    isMinOpen: true,
    step: 0.05,
    isExtension: true,
    hint: "1 is off",
  },
];

/** Return what is wrong with the text of a field, "" when nothing is. */
export function numberProblem(field, text) {
  if (!text.trim()) return "";
  const value = Number(text);
  if (!Number.isFinite(value)) return "Enter a number";
  if (field.isInteger && !Number.isInteger(value)) return "Enter a whole number";
  if (field.isMinOpen && value <= field.min) return `Enter more than ${field.min}`;
  if (value < field.min || value > (field.max ?? Infinity)) return rangeOf(field);
  return "";
}

function rangeOf({ min, max }) {
  return max === undefined ? `Enter ${min} or more` : `Enter ${min} to ${max}`;
}
