/** What a conversation looks like: one view per message, and the words for what happens to it. */

import { element, renderInto } from "/static/markdown.js";

/** A message on the page. `show(message)` brings it up to date; call it as often as you like. */
export class MessageView {
  constructor(message, actions) {
    this.actions = actions;
    if (message.role === "user") {
      this.node = element("article", { class: "message user" }, element("h2", { class: "hidden" }, "You"));
      this.node.append(element("div", { class: "bubble" }, message.content));
      return;
    }
    this.thought = element("div", { class: "thought-text" });
    this.thinking = element("details", { class: "thinking", hidden: true }, element("summary"), this.thought);
    this.content = element("div", { class: "content" });
    this.progress = element("progress", { "aria-label": "Prompt read", hidden: true });
    this.state = element("p", { class: "state", hidden: true }, element("span", { class: "pulse" }), element("span"));
    this.failure = element("div", { class: "failure", role: "alert", hidden: true });
    this.stats = element("span", { class: "stats" });
    this.buttons = element("span", { class: "buttons" });
    const meta = element("footer", { class: "meta" }, this.stats, this.buttons);
    const title = element("h2", { class: "hidden" }, "Answer");
    this.node = element("article", { class: "message assistant" }, title);
    this.node.append(this.thinking, this.content, this.state, this.progress, this.failure, meta);
  }

  show(message, { last = false, phase = null } = {}) {
    if (message.role === "user") return;
    this.node.classList.toggle("writing", phase?.type === "writing");
    this.#showThinking(message, phase);
    renderInto(this.content, message.content);
    this.#showState(phase);
    this.#showFailure(message, last && !phase);
    this.stats.textContent = phase && phase.type !== "writing" ? "" : describeStats(message);
    this.#showButtons(message, last, phase);
  }

  #showThinking(message, phase) {
    this.thinking.hidden = !message.reasoning;
    if (!message.reasoning) return;
    const ongoing = phase?.type === "writing" && !message.content;
    this.thinking.firstChild.textContent = ongoing ? "Thinking" : "Thoughts";
    if (this.ongoing !== ongoing) this.thinking.open = ongoing; // once: the reader may open or close it as well
    this.ongoing = ongoing;
    renderInto(this.thought, message.reasoning);
  }

  #showState(phase) {
    const text = describePhase(phase);
    this.state.hidden = !text;
    this.state.lastChild.textContent = text;
    this.progress.hidden = phase?.type !== "reading" || phase.total < 2;
    if (!this.progress.hidden) Object.assign(this.progress, { max: phase.total, value: phase.done });
  }

  #showFailure(message, retry) {
    const { error } = message;
    this.failure.hidden = !error;
    const key = error && JSON.stringify([error, retry]);
    if (this.shownFailure === key) return;
    this.shownFailure = key;
    this.failure.replaceChildren();
    if (!error) return;
    const facts = [error.code, error.status ? `status ${error.status}` : null].filter(Boolean).join(", ");
    this.failure.append(element("p", {}, error.message), element("p", { class: "facts" }, facts));
    if (!retry) return;
    if (error.status === 401) {
      this.failure.append(element("button", { type: "button", onclick: this.actions.askKey }, "Enter the API key"));
    } else if ([400, 413].includes(error.status) && !message.content) {
      this.failure.append(element("button", { type: "button", onclick: this.actions.edit }, "Edit the message"));
    } else {
      const again = element("button", { type: "button", onclick: this.actions.retry }, "Try again");
      this.failure.append(again);
      countDown(again, error.retryAt);
    }
  }

  #showButtons(message, last, phase) {
    const names = [];
    if (!phase && message.content) names.push("Copy");
    if (!phase && last && !message.error) names.push("Try again");
    if (!phase && last && ["length", "stopped"].includes(message.end) && message.content) names.push("Continue");
    if (this.shownButtons === names.join()) return;
    this.shownButtons = names.join();
    const run = { "Copy": "copy", "Try again": "retry", "Continue": "resume" };
    this.buttons.replaceChildren(
      ...names.map((name) =>
        element("button", { type: "button", class: "link", onclick: (event) => this.actions[run[name]](message, event.target) }, name),
      ),
    );
  }
}

/** Until `time` (ms) the button only says how long it takes. */
function countDown(button, time) {
  const tick = () => {
    const seconds = Math.ceil(((time ?? 0) - Date.now()) / 1000);
    button.disabled = seconds > 0;
    button.textContent = seconds > 0 ? `Try again in ${seconds} s` : "Try again";
    if (seconds > 0 && button.isConnected) setTimeout(tick, 250);
  };
  queueMicrotask(tick);
}

export function describePhase(phase) {
  switch (phase?.type) {
    case "queued":
      return phase.ahead ? `Waiting, ${phase.ahead} ahead` : "Waiting for a seat";
    case "reading":
      return phase.total < 2 ? "Reading the prompt" : `Reading the prompt, ${number(phase.done)} of ${number(phase.total)} tokens`;
    default:
      return "";
  }
}

function describeStats({ stats, end }) {
  const facts = [];
  if (stats?.ttft !== undefined) facts.push(`First token ${seconds(stats.ttft)}`);
  if (stats?.rate) facts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`);
  if (stats?.tokens) facts.push(`${number(stats.tokens)} ${stats.tokens === 1 ? "token" : "tokens"}`);
  if (end === "length") facts.push("cut off at the limit");
  if (end === "stopped") facts.push("stopped");
  return facts.join(" · ");
}

function seconds(ms) {
  return ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(ms < 10_000 ? 2 : 1)} s`;
}

export function number(value) {
  return value.toLocaleString("en");
}
