/** The settings dialog: what it shows, and what it leaves behind when it is closed. */

import * as store from "/static/store.js";

const $ = (id) => document.getElementById(id);

export let settings = store.loadSettings();
let closed = () => {};

/** callback(): the dialog was closed, and what stood in it holds. */
export function onSettings(callback) {
  closed = callback;
}

/** Open the dialog at one of its fields. */
export function openSettings(field) {
  $("system").value = settings.system;
  $("temperature").value = settings.temperature;
  $("max-tokens").value = settings.maxTokens;
  $("key").value = store.loadKey();
  showTemperature();
  $("settings").showModal();
  $(field).focus();
}

function showTemperature() {
  $("temperature-value").textContent = Number($("temperature").value).toFixed(1);
}

$("open-settings").addEventListener("click", () => openSettings("system"));
$("temperature").addEventListener("input", showTemperature);
$("reset-settings").addEventListener("click", () => {
  $("system").value = store.DEFAULTS.system;
  $("temperature").value = store.DEFAULTS.temperature;
  $("max-tokens").value = store.DEFAULTS.maxTokens;
  showTemperature();
});
$("settings").addEventListener("click", (event) => {
  if (event.target === $("settings")) $("settings").close(); // outside of the form
});
$("settings").addEventListener("close", () => {
  const asked = Math.round(Number($("max-tokens").value));
  settings = {
    system: $("system").value,
    temperature: Number($("temperature").value),
    maxTokens: asked > 0 ? asked : settings.maxTokens,
  };
  store.saveSettings(settings);
  store.saveKey($("key").value.trim());
  closed();
});
