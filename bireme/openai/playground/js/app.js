// Puts the page's parts together. A part knows its own elements only; what happens between parts is here.
// What else the server can make (pictures, video) gets a module of its own beside chat.js.

import { BatchView } from "./batches.js";
import { Chat } from "./chat.js";
import { CodeDialog } from "./code_dialog.js";
import { Composer } from "./composer.js";
import { byId } from "./dom.js";
import { EmbeddingView } from "./embedding.js";
import { errorBlock, remedy } from "./error_view.js";
import { History } from "./history.js";
import { KeyDialog } from "./key_dialog.js";
import { LiveView } from "./live.js";
import { ModelPicker } from "./models.js";
import { Panel } from "./panel.js";
import { Settings } from "./settings.js";
import { bindTheme } from "./theme.js";
import { TimelineView } from "./timeline.js";
import { VideoView } from "./video.js";

let composer = null;
const panel = new Panel();
const models = new ModelPicker(() => {
  showContext(null);
  showView();
});
const settings = new Settings(
  (values) => composer?.showSettings(values),
  () => panel.open(),
);
const keyDialog = new KeyDialog(() => {
  loadModels();
  live.resume();
});
const kept = new History((turns, id) => {
  chat.open(turns, id);
  composer.focus();
});
const chat = new Chat({
  models,
  settings,
  composer: () => composer,
  keyDialog: () => keyDialog,
  onUsage: showContext,
  onKept: (id, previous, title) => kept.note(id, previous, title),
});
composer = new Composer({
  send: (text, pictures) => chat.send(text, pictures),
  stop: () => chat.stop(),
  editLast: () => chat.editLast(),
  clear: (values) => settings.apply(values),
  pictureProblem: () => models.pictureProblem,
});
const video = new VideoView(() => models.name);
const embedding = new EmbeddingView(() => models.name);
const batches = new BatchView(() => models.name);
const live = new LiveView(() => keyDialog.ask());
const timeline = new TimelineView(() => keyDialog.ask());
// Views by the button that opens them, and closes them again
const opened = { "show-batches": batches, "show-live": live, "show-timeline": timeline };
const code = new CodeDialog(() => chat.request(byId("prompt").value, composer.pictures));

byId("new-chat").addEventListener("click", () => {
  chat.clear();
  composer.say("");
  composer.focus();
});
for (const [id, view] of Object.entries(opened)) {
  byId(id).addEventListener("click", () => openView(view.isOpen ? null : view));
}
byId("show-code").addEventListener("click", () => code.open());
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (!panel.closeIfOver()) chat.stop();
});
addEventListener("pagehide", () => {
  live.stop();
  video.stop();
  embedding.stop();
});
addEventListener("beforeunload", () => chat.leave()); // before the browser itself cuts the connection
addEventListener("pagehide", () => chat.leave()); // a page that the browser keeps for "back" would go on reading
bindTheme(byId("theme"));
composer.showSettings(settings.values());
chat.restore();
composer.focus();
loadModels();
openAddressed();
addEventListener("hashchange", openAddressed);

/** Open what the address names: #view=live, #timeline=ID. */
function openAddressed() {
  const named = new URLSearchParams(location.hash.slice(1));
  if (named.get("view") === "live") openView(live);
  if (named.has("timeline")) showTimeline(named.get("timeline"));
}

function showTimeline(id) {
  openView(timeline);
  timeline.show(id);
}

/** Open one of the views in place of the chat; null: the chat. */
function openView(view) {
  if (view !== timeline && location.hash) history.replaceState(null, "", location.pathname + location.search);
  for (const other of Object.values(opened)) if (other !== view) other.close();
  if (view && !view.isOpen) view.open();
  showView();
}

async function loadModels() {
  const banner = byId("banner");
  try {
    await models.load();
    banner.hidden = true;
    showView();
  } catch (error) {
    const remedies = [remedy("retry", "Try again", loadModels)];
    if (error.needsKey) remedies.unshift(remedy("key", "Enter a key", () => keyDialog.ask()));
    banner.replaceChildren(errorBlock(error, remedies));
    banner.hidden = false;
    if (error.needsKey) keyDialog.ask();
  }
}

/** Batches, the live view, and models that make videos or embeddings, have a view in place of the chat. */
function showView() {
  document.body.classList.toggle("text-only", models.pictureProblem !== "");
  composer.say(chat.pictureProblem(composer.pictures));
  const isOpen = Object.values(opened).some((view) => view.isOpen);
  for (const id of ["show-batches", "show-live"]) byId(id).setAttribute("aria-pressed", String(opened[id].isOpen));
  byId("video").hidden = isOpen || !models.makesVideos;
  byId("embedding").hidden = isOpen || !models.makesEmbeddings;
  document.body.classList.toggle("without-chat", isOpen || models.makesVideos || models.makesEmbeddings);
}

/** Say how much of the context the conversation takes. */
function showContext(usage) {
  if (usage && !models.maxTokens)
    models.load().then(
      () => show(usage),
      () => {},
    ); // known after the first answer
  show(usage);
}

function show(usage) {
  const { maxTokens } = models;
  const used = usage ? usage.prompt_tokens + usage.completion_tokens : 0;
  const limit = maxTokens ? ` of ${maxTokens.toLocaleString("en")}` : "";
  byId("context").textContent = usage ? `${used.toLocaleString("en")}${limit} tokens of context` : "";
}
