/** The chat page: the conversation, what its reader does with it, and the answer that is on its way. */

import { plainError, receive, requestOf } from "/static/answer.js";
import { focusComposer, giveBack, onComposer, showBusy } from "/static/composer.js";
import { copyText } from "/static/copy.js";
import { keepPlace, toEnd } from "/static/scroll.js";
import { checkServer, model, onServer, recheck } from "/static/server.js";
import { onSettings, openSettings } from "/static/settings.js";
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

// -- what is seen

const actions = { copy: (message, button) => copyText(message.content, button), retry, edit, resume, askKey: () => openSettings("key") };

function redraw() {
  views.length = 0;
  $("messages").replaceChildren();
  for (const message of messages) addView(message);
  showAll();
}

function add(message) {
  messages.push(message);
  addView(message);
}

function addView(message) {
  const view = new MessageView(message, actions);
  views.push(view);
  $("messages").append(view.node);
}

function showAll() {
  messages.forEach((_, i) => showMessage(i));
  $("welcome").hidden = messages.length > 0;
  $("restore").hidden = !cleared;
  showContext();
  showBusy(Boolean(busy));
}

function showMessage(i) {
  const last = i === messages.length - 1;
  views[i].show(messages[i], { last, phase: last && busy ? busy.phase : null });
}

let drawing = false;
/** The last message, at most once a frame. */
function showLast() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    if (messages.length) keepPlace(() => showMessage(messages.length - 1));
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

function announce(text) {
  $("announcer").textContent = text;
}

// -- an answer

/** Have the conversation so far answered. resume: go on with the answer that stands last. */
async function answer({ resume = false } = {}) {
  const request = requestOf(messages, resume);
  if (!resume) add({ role: "assistant", content: "" });
  const message = messages.at(-1);
  const job = (busy = { controller: new AbortController(), phase: null });
  delete message.end;
  delete message.error;
  showAll();
  toEnd();
  store.saveChat(messages);
  try {
    await follow(receive(message, request, job.controller.signal), job);
  } catch (error) {
    if (job.controller.signal.aborted || leaving(error)) message.end = "stopped";
    else message.error = plainError(error);
  }
  if (busy === job) busy = null;
  store.saveChat(messages);
  keepPlace(showAll);
  if (!messages.includes(message)) return; // the conversation was put away meanwhile
  announce(message.error ? message.error.message : message.end === "stopped" ? "Stopped." : `Answer: ${message.content}`);
  if ([401, 404].includes(message.error?.status)) recheck(); // another key, another model
}

/** Show and save an answer while it grows. */
async function follow(phases, job) {
  let saved = performance.now();
  for await (const phase of phases) {
    const words = describePhase(phase);
    if (words && job.phase?.type !== phase.type) announce(words);
    job.phase = phase;
    if (performance.now() - saved > SAVE_EVERY) {
      saved = performance.now();
      store.saveChat(messages);
    }
    showLast();
  }
}

function leaving(error) {
  return ["connection_lost", "unreachable"].includes(error.code) && performance.now() - left < LEAVING;
}

// -- what the reader does

function send(text) {
  add({ role: "user", content: text });
  answer();
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
  focusComposer();
}

/** The last question was refused as it stands: take it back, or it would be sent with every later one. */
function edit() {
  if (busy) return;
  const [question] = messages.splice(-2);
  store.saveChat(messages);
  redraw();
  toEnd();
  giveBack(question.content);
}

function resume() {
  if (!busy) answer({ resume: true });
  focusComposer();
}

$("new-chat").addEventListener("click", () => {
  stop();
  if (messages.length) cleared = messages.splice(0);
  store.saveChat(messages);
  redraw();
  announce("New chat.");
  focusComposer();
});

$("restore").addEventListener("click", () => {
  messages.push(...cleared);
  cleared = null;
  store.saveChat(messages);
  redraw();
  toEnd();
  focusComposer();
});

// Leaving ends the answer as Stop does. Some browsers cut its connection first: that is no failure of the server's.
addEventListener("beforeunload", () => (left = performance.now()));
addEventListener("pagehide", () => {
  left = performance.now();
  if (!busy) return; // saved already
  messages.at(-1).end = "stopped";
  stop();
  store.saveChat(messages);
});

onComposer({ send, stop });
onServer(showContext);
onSettings(() => {
  recheck(); // perhaps with another key
  focusComposer();
});

redraw();
toEnd();
checkServer();
