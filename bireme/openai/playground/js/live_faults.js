// What went wrong in the last hour: when, what, where, why.

import { element } from "./dom.js";

const NAMES = {
  engine_lost: "Engine ended",
  engine_restarted: "Engine restarted",
  worker_left: "Worker left",
  unreachable: "Worker out of reach",
  migration: "Request moved",
  transfer_failed: "KV transfer failed",
  busy: "Refused: busy",
};

export function faultRow({ at, last_at: last, count, kind, model, worker, reason }, hasModels) {
  const began = time(at);
  const times = time(last) === began ? began : `${began} to ${time(last)}`;
  const where = [hasModels ? model : null, worker || null].filter(Boolean).join(" · ");
  return element(
    "li",
    { class: "fault" },
    element("span", { class: "fault-time" }, times),
    element("strong", {}, NAMES[kind] ?? kind, count > 1 ? ` × ${count.toLocaleString("en")}` : ""),
    element("span", { class: "fault-where" }, where),
    element("span", { class: "fault-reason" }, reason),
  );
}

function time(seconds) {
  return new Date(seconds * 1000).toLocaleTimeString("en", { hour12: false });
}
