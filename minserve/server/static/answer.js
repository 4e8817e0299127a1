/** One answer: what is asked for, what comes and when, and what went wrong, in words. */

import { ApiError, chat } from "/static/client.js";
import { model } from "/static/server.js";
import { settings } from "/static/settings.js";
import { loadKey } from "/static/store.js";

/** What to send after `history`. resume: its last message is an answer that goes on. */
export function requestOf(history, resume) {
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

/** Read an answer into `message`; yields its phase after each event. Times are this browser's own: what a reader waits. */
export async function* receive(message, request, signal) {
  const sent = performance.now();
  let first = null;
  let phase = null;
  for await (const event of chat({ ...request, key: loadKey(), signal })) {
    const now = performance.now();
    if (event.type === "queued" || event.type === "reading") {
      phase = event;
    } else if (event.type === "text" || event.type === "reasoning") {
      first ??= now;
      phase = { type: "writing" };
      if (event.type === "text") message.content += event.text;
      else message.reasoning = (message.reasoning ?? "") + event.text;
    } else if (event.type === "usage" && first !== null) {
      message.stats = measure(event.usage, first - sent, now - first);
    } else if (event.type === "end") {
      message.end = event.reason;
    }
    yield phase;
  }
}

/** The first token's wait and the pace of the others. The totals come a moment after the last token: keep the pace. */
function measure(usage, ttft, writing) {
  const tokens = usage.completion_tokens;
  const rate = writing > 0 && tokens > 1 ? ((tokens - 1) / writing) * 1000 : undefined;
  return { ttft, rate, tokens, total: usage.total_tokens };
}

/** An error as a message keeps it: { message, code, status?, retryAt? }. */
export function plainError(error) {
  if (!(error instanceof ApiError)) {
    console.error(error);
    return { message: `This page failed: ${error.message}`, code: error.name };
  }
  const { message, code, status, retryAfter } = error;
  return { message, code, status, retryAt: retryAfter === null ? null : Date.now() + retryAfter * 1000 };
}
