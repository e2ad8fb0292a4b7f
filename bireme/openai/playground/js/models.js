// The choice of a model.

import { listModels } from "./api.js";
import { byId, element } from "./dom.js";
import { recall, remember } from "./storage.js";

/** The list in the bar; what was chosen last is chosen again. */
export class ModelPicker {
  #select = byId("model");
  #models = [];

  constructor(onChange) {
    this.#select.addEventListener("change", () => {
      remember("model", this.#select.value);
      onChange();
    });
  }

  /** The chosen model's name, "" while none is known. */
  get name() {
    return this.#models.length ? this.#select.value : "";
  }

  /** The chosen model's longest sequence in tokens, or null where the server does not know it yet. */
  get maxTokens() {
    return this.#chosen?.max_model_len ?? null;
  }

  /** Does the chosen model make videos? */
  get makesVideos() {
    return this.#chosen?.bireme.output_modalities.includes("video") ?? false;
  }

  /** Does the chosen model make embeddings? */
  get makesEmbeddings() {
    return this.#chosen?.bireme.output_modalities.includes("embedding") ?? false;
  }

  /** What to say where pictures are meant for the chosen model: "" when it takes them. */
  get pictureProblem() {
    if (!this.#chosen || takesPictures(this.#chosen)) return "";
    const other = this.#models.find((model) => takesPictures(model));
    const remedy = other ? `Choose ${other.id}, or go on without pictures.` : "Go on without pictures.";
    return `${this.#chosen.id} reads text only. ${remedy}`;
  }

  /** Ask the server. Raises ApiError. */
  async load() {
    const before = this.name || recall("model", "");
    try {
      this.#models = await listModels();
    } catch (error) {
      this.#models = [];
      this.#show([element("option", {}, "No models")], true);
      throw error;
    }
    this.#show(
      this.#models.map((model) => element("option", { value: model.id }, model.id)),
      false,
    );
    if (this.#models.some((model) => model.id === before)) this.#select.value = before;
  }

  get #chosen() {
    return this.#models.find((model) => model.id === this.name);
  }

  #show(options, isDisabled) {
    this.#select.replaceChildren(...options);
    this.#select.disabled = isDisabled;
  }
}

function takesPictures({ bireme }) {
  return bireme.input_modalities.includes("image");
}
