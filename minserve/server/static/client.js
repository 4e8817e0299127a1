/**
 * A streaming chat client in one file, for this page and for yours. No dependencies; any OpenAI-compatible server.
 *
 *   import { chat, ApiError } from "http://127.0.0.1:8000/static/client.js";
 *
 *   const controller = new AbortController();            // controller.abort() stops the answer
 *   const messages = [{ role: "user", content: "Hello" }];
 *   try {
 *     for await (const event of chat({ messages, signal: controller.signal })) {
 *       if (event.type === "text") output.textContent += event.text;
 *     }
 *   } catch (error) {
 *     if (error instanceof ApiError) alert(`${error.message} (${error.code})`);
 *   }
 *
 * Events, in the order in which they come:
 *   { type: "queued", ahead }           the request waits; so many are before it, null as long as nobody said
 *   { type: "reading", done, total }    prompt tokens read so far
 *   { type: "reasoning", text }         a piece of the model's thinking
 *   { type: "text", text }              a piece of the answer
 *   { type: "usage", usage }            token counts so far (with `continuous_usage_stats`) or in the end
 *   { type: "end", reason }             "stop" or "length"
 * The first comes at once. Later ones and reading are comments in minserve's stream; other servers don't send them.
 *
 * Failures are thrown: ApiError for everything a server said or a network did, the signal's reason (an AbortError) after
 * an abort. Leaving the loop early (break, return) closes the connection, and the server stops the work.
 */

const HOME = new URL(import.meta.url).origin;

/** What went wrong. status 0: no answer from a server at all. retryAfter: seconds, or null. */
export class ApiError extends Error {
  constructor(message, { status = 0, code = null, type = null, param = null, retryAfter = null } = {}) {
    super(message);
    this.name = "ApiError";
    Object.assign(this, { status, code, type, param, retryAfter });
  }
}

/**
 * Streams one answer.
 * @param {object} request
 *   messages, and any other field of /v1/chat/completions (model, temperature, max_tokens, ...), plus
 *   url: the server's address, default: where this module comes from
 *   key: an API key, if the server wants one
 *   signal: an AbortSignal
 */
export async function* chat({ url = HOME, key, signal, ...fields }) {
  yield { type: "queued", ahead: null };
  const body = { stream: true, stream_options: { include_usage: true, continuous_usage_stats: true }, ...fields };
  const response = await call(url, "/v1/chat/completions", { key, signal, body });
  let finished = false;
  for await (const { comment, data } of parseEvents(response.body, signal)) {
    if (comment !== undefined) {
      const state = waiting(comment);
      if (state) yield state;
    } else if (data === "[DONE]") {
      return;
    } else {
      const chunk = parseJson(data);
      if (chunk.error) throw toError(chunk.error, 200);
      const choice = chunk.choices?.[0];
      if (choice?.delta?.reasoning_content) yield { type: "reasoning", text: choice.delta.reasoning_content };
      if (choice?.delta?.content) yield { type: "text", text: choice.delta.content };
      if (chunk.usage) yield { type: "usage", usage: chunk.usage };
      if (choice?.finish_reason) {
        finished = true;
        yield { type: "end", reason: choice.finish_reason };
      }
    }
  }
  if (!finished) throw new ApiError("The connection closed before the answer was complete.", { code: "connection_lost" });
}

/** The models a server has: [{ id, max_model_len?, ... }]. */
export async function listModels({ url = HOME, key, signal } = {}) {
  const response = await call(url, "/v1/models", { key, signal });
  return (await readJson(response)).data;
}

/** GET a JSON resource of the server, errors as ApiError. */
export async function getJson(path, { url = HOME, key, signal } = {}) {
  return readJson(await call(url, path, { key, signal }));
}

/** A request whose failures are readable: whatever goes wrong is an ApiError, unless `signal` was aborted. */
async function call(url, path, { key, signal, body }) {
  const headers = {};
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(url + path, {
      method: body ? "POST" : "GET",
      headers,
      body: body && JSON.stringify(body),
      signal,
      cache: "no-store",
    });
  } catch (error) {
    signal?.throwIfAborted();
    throw new ApiError(unreachable(url), { code: "unreachable" });
  }
  if (response.ok) return response;
  const retryAfter = Number.parseFloat(response.headers.get("retry-after"));
  const text = await response.text().catch(() => "");
  let detail = {};
  try {
    detail = JSON.parse(text).error ?? {};
  } catch {
    // Not JSON: a proxy's page. The status says enough.
  }
  throw toError({ retry_after: retryAfter, ...detail }, response.status);
}

/** A browser doesn't tell a page whether nobody answered, or whether the answer is not for pages of its origin. */
function unreachable(url) {
  const message = "The server can't be reached";
  if (new URL(url, location.href).origin === location.origin) return `${message}.`;
  return `${message}, or it doesn't list ${location.origin} in server.allowed_origins.`;
}

function toError(detail, status) {
  return new ApiError(detail.message || `The server answered with status ${status}.`, {
    status,
    code: detail.code ?? null,
    type: detail.type ?? null,
    param: detail.param ?? null,
    retryAfter: Number.isFinite(detail.retry_after) ? detail.retry_after : null,
  });
}

async function readJson(response) {
  return parseJson(await response.text());
}

function parseJson(text) {
  try {
    return JSON.parse(text);
  } catch {
    throw new ApiError("The server sent something that is not JSON.", { code: "bad_response" });
  }
}

/** minserve tells by comments what a request waits for: "queued 3", "prefill 120/400". */
function waiting(comment) {
  const queued = /^queued (\d+)$/.exec(comment);
  if (queued) return { type: "queued", ahead: Number(queued[1]) };
  const prefill = /^prefill (\d+)\/(\d+)$/.exec(comment);
  if (prefill) return { type: "reading", done: Number(prefill[1]), total: Number(prefill[2]) };
  return null;
}

/**
 * Server-sent events of a byte stream, as the HTML standard parses them, comments included:
 * yields { comment } or { event, data }. Chunks may end anywhere, inside a character or between CR and LF.
 */
export async function* parseEvents(stream, signal) {
  const reader = stream.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  let event = "message";
  let data = [];
  try {
    for (;;) {
      let piece;
      try {
        piece = await reader.read();
      } catch {
        signal?.throwIfAborted();
        throw new ApiError("The connection was lost.", { code: "connection_lost" });
      }
      rest += piece.done ? decoder.decode() : decoder.decode(piece.value, { stream: true });
      const held = !piece.done && rest.endsWith("\r") ? "\r" : ""; // a LF may follow
      const lines = rest.slice(0, rest.length - held.length).split(/\r\n|\n|\r/);
      rest = lines.pop() + held;
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield { event, data: data.join("\n") };
          event = "message";
          data = [];
        } else if (line.startsWith(":")) {
          yield { comment: line.slice(1).trimStart() };
        } else {
          const [, field, value = ""] = /^([^:]*)(?:: ?(.*))?$/s.exec(line);
          if (field === "data") data.push(value);
          else if (field === "event") event = value;
        }
      }
      if (piece.done) return; // an event without its blank line is incomplete, and dropped
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
