// Videos: a prompt, a size, a length and a seed; progress while one is made; a player for the result.

import { ApiError, streamVideo } from "./api.js";
import { byId } from "./dom.js";
import { errorBlock, remedy } from "./error_view.js";

const SOON_S = 1.5;

/** The view beside the chat. `model` gives the name of the chosen model. */
export class VideoView {
  #abort = null;
  #address = "";
  #model;

  constructor(model) {
    this.#model = model;
    byId("video-form").addEventListener("submit", (event) => {
      event.preventDefault();
      if (this.#abort) this.stop();
      else this.#make();
    });
  }

  /** End what is under way; the server stops after its step. */
  stop() {
    this.#abort?.abort();
  }

  /** The request as the form says it; what is empty is the server's to choose. */
  request() {
    const request = { model: this.#model(), prompt: byId("video-prompt").value.trim(), stream: true };
    const size = byId("video-size").value.trim();
    if (size) request.size = size;
    for (const [id, name] of [["video-seconds", "seconds"], ["video-seed", "seed"]]) {
      const { value } = byId(id);
      if (value !== "") request[name] = Number(value);
    }
    return request;
  }

  async #make() {
    this.#abort = new AbortController();
    this.#begin();
    try {
      for await (const news of streamVideo(this.request(), this.#abort.signal)) this.#take(news);
    } catch (error) {
      if (error.name === "AbortError") this.#say("Stopped.");
      else this.#fail(error instanceof ApiError ? error : new ApiError(String(error)));
    } finally {
      this.#abort = null;
      byId("video-make").textContent = "Make video";
      byId("video-progress").hidden = true;
    }
  }

  #begin() {
    byId("video-make").textContent = "Stop";
    byId("video-error").replaceChildren();
    byId("video-result").hidden = true;
    byId("video-progress").value = 0;
    byId("video-progress").hidden = false;
    this.#say("Waiting for the server…");
  }

  #take(news) {
    if (news.object === "video") {
      this.#show(news);
      return;
    }
    byId("video-progress").value = news.progress;
    this.#say(news.queue_position ? `Waiting: ${news.queue_position} before this one` : stepText(news));
  }

  #show(made) {
    const bytes = Uint8Array.from(atob(made.data[0].b64_json), (letter) => letter.charCodeAt(0));
    if (this.#address) URL.revokeObjectURL(this.#address);
    this.#address = URL.createObjectURL(new Blob([bytes], { type: "video/mp4" }));
    byId("video-player").src = this.#address;
    byId("video-save").href = this.#address;
    byId("video-result").hidden = false;
    const took = `made in ${made.inference_time_s.toFixed(1)} s`;
    this.#say(`${made.num_frames} frames, ${made.size}, ${made.fps} a second, seed ${made.seed}, ${took}`);
  }

  #fail(error) {
    this.#say("");
    byId("video-error").replaceChildren(errorBlock(error, [remedy("retry", "Try again", () => this.#make())]));
  }

  #say(text) {
    byId("video-status").textContent = text;
  }
}

function stepText({ step, total_steps, eta_s }) {
  if (!total_steps) return "Accepted";
  const left = eta_s !== null && eta_s > SOON_S ? `, about ${Math.round(eta_s)} s left` : "";
  return `Step ${step} of ${total_steps}${left}`;
}
