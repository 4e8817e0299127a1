/** The chat page: sends messages, shows what happens to them, remembers the conversation. */

import { ApiError, chat } from "/static/client.js";
import { checkServer, model, onServer, recheck } from "/static/server.js";
import { onSettings, openSettings, settings } from "/static/settings.js";
import * as store from "/static/store.js";
import { describePhase, MessageView, number } from "/static/view.js";

const $ = (id) => document.getElementById(id);
const SAVE_EVERY = 1000; // ms between saves of a growing answer
const LEAVING = 2000; // ms within which a lost connection is the leaving reader's doing

const messages = store.loadChat();
const views = [];
let busy = null; // { controller, phase } while an answer is on its way
let left = -Infinity; // when the reader began to leave this page; some leave for a download, and stay
let cleared = null; // the conversation that New chat put away

// -- the conversation on the page

const actions = { copy, retry, resume, askKey: () => openSettings("key") };

function redraw() {
  views.length = 0;
  $("messages").replaceChildren();
  for (const message of messages) addView(message);
  showAll();
}

function addView(message) {
  const view = new MessageView(message, actions);
  views.push(view);
  $("messages").append(view.node);
}

function showAll() {
  views.forEach((view, i) => view.show(messages[i], { last: i === messages.length - 1, phase: phaseOf(i) }));
  $("welcome").hidden = messages.length > 0;
  $("restore").hidden = !cleared;
  showContext();
  showComposer();
}

function phaseOf(index) {
  return busy && index === messages.length - 1 ? busy.phase : null;
}

let drawing = false;
/** The last message, at most once a frame. */
function showLast() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    const following = atEnd();
    const i = messages.length - 1;
    views[i]?.show(messages[i], { last: true, phase: phaseOf(i) });
    if (following) toEnd();
  });
}

function showContext() {
  const used = messages.findLast((message) => message.stats?.total)?.stats.total;
  $("context").hidden = !used || !model?.max_model_len;
  if ($("context").hidden) return;
  const meter = $("context-meter");
  Object.assign(meter, { max: model.max_model_len, high: model.max_model_len * 0.85, low: 0, optimum: 0, value: used });
  $("context-text").textContent = `${number(used)} of ${number(model.max_model_len)} tokens`;
}

// -- scrolling: stay at the end unless the reader went up

const scroller = $("scroller");

function atEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
}

function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

scroller.addEventListener("scroll", () => ($("to-end").hidden = atEnd()), { passive: true });
$("to-end").addEventListener("click", toEnd);

// -- sending

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy) return stop();
  const text = $("input").value.trim();
  if (!text) return;
  $("input").value = "";
  const user = { role: "user", content: text };
  messages.push(user);
  addView(user);
  answer();
});

/** Have the conversation so far answered. resume: go on with the answer that stands last. */
async function answer({ resume = false } = {}) {
  let message = messages.at(-1);
  if (!resume) {
    message = { role: "assistant", content: "" };
    messages.push(message);
    addView(message);
  }
  const job = (busy = { controller: new AbortController(), phase: null });
  delete message.end;
  delete message.error;
  showAll();
  toEnd();
  store.saveChat(messages);
  try {
    await receive(message, requestOf(message, resume), job);
  } catch (error) {
    if (job.controller.signal.aborted || leaving(error)) message.end = "stopped";
    else message.error = plainError(error);
  }
  if (busy === job) busy = null;
  store.saveChat(messages);
  const following = atEnd();
  showAll();
  if (following) toEnd();
  if (!messages.includes(message)) return; // the conversation was put away meanwhile
  announce(message.error ? message.error.message : message.end === "stopped" ? "Stopped." : `Answer: ${message.content}`);
  if ([401, 404].includes(message.error?.status)) recheck(); // another key, another model
}

function requestOf(message, resume) {
  const history = messages.slice(0, messages.indexOf(message) + (resume ? 1 : 0));
  const past = history.filter((m) => m.content).map(({ role, content }) => ({ role, content }));
  const system = settings.system.trim() ? [{ role: "system", content: settings.system }] : [];
  return {
    model: model?.id,
    messages: [...system, ...past],
    temperature: settings.temperature,
    max_tokens: settings.maxTokens,
    ...(resume ? { continue_final_message: true, add_generation_prompt: false } : {}),
  };
}

/** Read one answer into `message`. Times are this browser's own: what a reader waits. */
async function receive(message, request, job) {
  const sent = performance.now();
  let first = null;
  let saved = sent;
  for await (const event of chat({ ...request, key: store.loadKey(), signal: job.controller.signal })) {
    const now = performance.now();
    if (event.type === "queued" || event.type === "reading") {
      if (job.phase?.type !== event.type) announce(describePhase(event));
      job.phase = event;
    } else if (event.type === "text" || event.type === "reasoning") {
      first ??= now;
      job.phase = { type: "writing" };
      if (event.type === "text") message.content += event.text;
      else message.reasoning = (message.reasoning ?? "") + event.text;
    } else if (event.type === "usage" && first !== null) {
      message.stats = measure(event.usage, first - sent, now - first);
    } else if (event.type === "end") {
      message.end = event.reason;
    }
    if (now - saved > SAVE_EVERY) {
      saved = now;
      store.saveChat(messages);
    }
    showLast();
  }
}

/** The first token's wait and the pace of the others. The totals come a moment after the last token: keep the pace. */
function measure(usage, ttft, writing) {
  const tokens = usage.completion_tokens;
  const rate = writing > 0 && tokens > 1 ? ((tokens - 1) / writing) * 1000 : undefined;
  return { ttft, rate, tokens, total: usage.total_tokens };
}

function leaving(error) {
  return ["connection_lost", "unreachable"].includes(error.code) && performance.now() - left < LEAVING;
}

function plainError(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return { message: `This page failed: ${error.message}`, code: error.name };
  }
  const { message, code, status, retryAfter } = error;
  return { message, code, status, retryAt: retryAfter === null ? null : Date.now() + retryAfter * 1000 };
}

function stop() {
  busy?.controller.abort();
}

function retry() {
  if (busy) return;
  if (messages.at(-1)?.role === "assistant") {
    messages.pop();
    views.pop().node.remove();
  }
  answer();
  $("input").focus();
}

function resume() {
  if (!busy) answer({ resume: true });
  $("input").focus();
}

async function copy(message, button) {
  await copyText(message.content, button);
}

async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

$("messages").addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy=code]");
  if (button) copyText(button.closest(".code").querySelector("code").textContent, button);
});

// -- the message field

const input = $("input");

function showComposer() {
  $("send").classList.toggle("busy", Boolean(busy));
  $("send").setAttribute("aria-label", busy ? "Stop" : "Send");
  $("send").disabled = !busy && !input.value.trim();
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

input.addEventListener("input", showComposer);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!busy) $("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && busy && !$("settings").open) stop();
});

for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => {
    input.value = idea.textContent;
    showComposer();
    input.focus();
  });
}

$("new-chat").addEventListener("click", () => {
  stop();
  if (messages.length) cleared = messages.splice(0);
  store.saveChat(messages);
  redraw();
  announce("New chat.");
  input.focus();
});

$("restore").addEventListener("click", () => {
  messages.push(...cleared);
  cleared = null;
  store.saveChat(messages);
  redraw();
  toEnd();
  input.focus();
});

function announce(text) {
  $("announcer").textContent = text;
}

// Leaving ends the answer as Stop does. Some browsers cut its connection first: that is no failure of the server's.
addEventListener("beforeunload", () => (left = performance.now()));
addEventListener("pagehide", () => {
  left = performance.now();
  if (!busy) return; // saved already
  messages.at(-1).end = "stopped";
  stop();
  store.saveChat(messages);
});
onServer(showContext);
onSettings(() => {
  recheck(); // perhaps with another key
  input.focus();
});

redraw();
toEnd();
checkServer();
