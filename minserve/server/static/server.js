/** Whether the server is there and takes requests, what it serves, and how the page's head says so. */

import { listModels } from "/static/client.js";
import { loadKey } from "/static/store.js";

const $ = (id) => document.getElementById(id);
const CHECK_EVERY = 10_000; // ms between looks

const WORDS = {
  ready: "Ready",
  loading: "Loading the model",
  draining: "Shutting down",
  failed: "The engine has failed",
  ledger_unavailable: "The ledger can't be written",
  key: "An API key is needed",
  gone: "No connection",
};

export let model = null; // { id, max_model_len? }
let shown = null;
let changed = () => {};

/** callback(): the server was looked at; it may serve another model. */
export function onServer(callback) {
  changed = callback;
}

function showServer(state) {
  shown = state;
  document.querySelector(".dot").dataset.state = state;
  document.querySelector(".served").title = WORDS[state] ?? "Not ready";
  $("model").textContent = state === "ready" && model ? model.id : (WORDS[state] ?? "Not ready").toLowerCase();
  if (model) $("welcome-model").textContent = model.id;
}

/** Whether the server takes requests, and which model it serves. */
export async function checkServer() {
  let state = await fetch("/ready", { cache: "no-store" }).then((reply) => reply.json()).then((ready) => ready.status, () => "gone");
  if (state === "ready" && shown !== "ready") {
    try {
      [model] = await listModels({ key: loadKey() });
    } catch (error) {
      state = error.status === 401 ? "key" : "gone";
    }
  }
  showServer(state);
  changed();
}

/** Look again, at the model too. */
export function recheck() {
  shown = null;
  checkServer();
}

document.addEventListener("visibilitychange", () => document.hidden || checkServer());
setInterval(() => document.hidden || checkServer(), CHECK_EVERY);
