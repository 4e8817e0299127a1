/**
 * What outlives a reload: the conversation and the settings in localStorage, the API key in sessionStorage only. A tab's
 * own conversation stands in sessionStorage too: tabs don't overwrite each other's, and a new one goes on with the latest.
 * A browser that refuses storage (private mode, full disk) costs the memory, never the page.
 */

const CHAT = "minserve.chat";
const SETTINGS = "minserve.settings";
const KEY = "minserve.key";

export const DEFAULTS = { system: "", temperature: 0.7, maxTokens: 512 };

function read(storage, name, fallback) {
  try {
    return JSON.parse(storage.getItem(name)) ?? fallback;
  } catch {
    return fallback;
  }
}

function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, JSON.stringify(value));
  } catch {
    // Nothing to be done about it, and nothing depends on it.
  }
}

/** Messages as { role, content, reasoning?, stats?, end?, error? }; damaged entries are left out. */
export function loadChat() {
  const messages = read(sessionStorage, CHAT, null) ?? read(localStorage, CHAT, []);
  if (!Array.isArray(messages)) return [];
  return messages.filter((m) => ["user", "assistant"].includes(m?.role) && typeof m.content === "string");
}

export function saveChat(messages) {
  write(sessionStorage, CHAT, messages);
  write(localStorage, CHAT, messages.length ? messages : null);
}

export function loadSettings() {
  return { ...DEFAULTS, ...read(localStorage, SETTINGS, {}) };
}

export function saveSettings(settings) {
  write(localStorage, SETTINGS, settings);
}

export function loadKey() {
  return read(sessionStorage, KEY, "");
}

export function saveKey(key) {
  write(sessionStorage, KEY, key || null);
}
