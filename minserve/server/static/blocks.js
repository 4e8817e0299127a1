/** The live view: asks /status twice a second and draws what the engine holds. */

import { getJson } from "/static/client.js";
import { element } from "/static/markdown.js";
import { loadKey, saveKey } from "/static/store.js";

const $ = (id) => document.getElementById(id);
const EVERY = 500; // ms between looks
const EVERY_AFTER_ERROR = 3000;
const STEPS = 120;
const MAX_HEIGHT = 300; // px of the block grid
const MIN_CELL = 5; // px of a block's side; where they don't fit, a cell stands for several

let paused = false;
let latest = null; // the last status, to be drawn again when the page changes its size or colours

async function look() {
  let wait = EVERY;
  if (!document.hidden && !paused) {
    try {
      show(await getJson(`/status?steps=${STEPS}&requests=1`, { key: loadKey() }));
    } catch (error) {
      wait = EVERY_AFTER_ERROR;
      showProblem(error);
    }
  }
  setTimeout(look, wait);
}

function showProblem(error) {
  const locked = error.status === 401 || error.status === 403;
  $("problem").hidden = false;
  if ($("problem-text").textContent !== error.message) $("problem-text").textContent = error.message;
  $("key-form").hidden = !locked;
  $("dot").dataset.state = locked ? "key" : "gone";
  $("model").textContent = locked ? "locked" : "no connection";
}

function show(status) {
  latest = status;
  $("problem").hidden = true;
  $("page").hidden = false;
  $("dot").dataset.state = status.state;
  $("model").textContent = status.state === "ready" ? status.model : `${status.model}, ${status.state}`;
  showNumbers(status.numbers);
  showFindings(status.findings);
  drawGrid(status);
  drawSteps(status.steps);
  showRequests(status);
}

// -- numbers

function showNumbers(numbers) {
  const { interactive, bulk } = numbers.pools;
  $("ttft").textContent = time(interactive.ttft_p99);
  $("ttft-more").textContent = `median ${time(interactive.ttft_p50)}, bulk p99 ${time(bulk.ttft_p99)}`;
  $("itl").textContent = time(interactive.itl_p99);
  $("itl-more").textContent = `median ${time(interactive.itl_p50)}, bulk p99 ${time(bulk.itl_p99)}`;
  $("utilization").textContent = share(numbers.utilization);
  $("utilization-more").textContent =
    `busy ${share(numbers.busy)}, ${count(numbers.decode_tokens_per_s)} tokens/s written, ${count(numbers.prefill_tokens_per_s)} read`;
}

function showFindings(findings) {
  const key = JSON.stringify(findings);
  if ($("findings").dataset.shown === key) return; // a reader may be selecting text
  $("findings").dataset.shown = key;
  $("findings").replaceChildren(...findings.map(({ weight, text }) => element("li", { class: weight }, text)));
}

function time(seconds) {
  if (seconds === null) return "–";
  if (seconds < 0.1) return `${(seconds * 1000).toFixed(1)} ms`;
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 1)} s`;
}

const share = (value) => `${Math.round(value * 100)} %`;
const count = (value) => Math.round(value).toLocaleString("en");

// -- drawing

/** A canvas's context in CSS pixels, cleared, sharp on any screen. */
function prepare(canvas, height = canvas.clientHeight) {
  const ratio = devicePixelRatio || 1;
  const width = canvas.clientWidth;
  canvas.style.height = `${height}px`;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width, height };
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  const get = (name) => style.getPropertyValue(name).trim();
  return { held: get("--accent"), cached: get("--wait"), free: get("--cell"), line: get("--line") };
}

/** A hue that stays with a request: requests next to each other in the grid can be told apart. */
function colourOf(id) {
  let hash = 0;
  for (const character of id) hash = (Math.imul(hash, 31) + character.charCodeAt(0)) >>> 0;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  return `hsl(${Math.round((hash * 137.508) % 360)} 42% ${dark ? 58 : 46}%)`;
}

/** One cell per block. */
function drawGrid(status) {
  const { blocks_total: total, blocks_free: free, blocks_cached: cached } = status;
  const held = total - free - cached;
  $("held").textContent = `${count(held)} held`;
  $("cached").textContent = `${count(cached)} cached`;
  $("free").textContent = `${count(free)} free`;
  const width = $("grid").clientWidth;
  const side = Math.max(MIN_CELL, Math.min(18, Math.floor(Math.sqrt((width * MAX_HEIGHT) / total))));
  const columns = Math.max(1, Math.floor(width / side));
  const rows = Math.max(1, Math.floor(MAX_HEIGHT / side));
  const each = Math.max(1, Math.ceil(total / (columns * rows)));
  const cells = Math.ceil(total / each);
  const { context } = prepare($("grid"), Math.ceil(cells / columns) * side);
  const owners = blockOwners(status);
  $("held-mark").className = owners.size ? "owned" : "held";
  const palette = colours();
  const colour = owners.size ? byOwner(owners, palette) : byCount(held, cached, palette);
  for (let cell = 0; cell < cells; cell++) {
    context.fillStyle = colour(cell * each, Math.min(total, (cell + 1) * each));
    const [x, y] = [(cell % columns) * side, Math.floor(cell / columns) * side];
    context.beginPath();
    context.roundRect(x, y, side - 1.5, side - 1.5, Math.min(3, side / 4));
    context.fill();
  }
  const meaning = each > 1 ? `A square is ${each} blocks. ` : "";
  const order = owners.size ? "Blocks of one request share a colour." : "In order: held, cached, free.";
  $("grid-text").textContent = `${count(total)} blocks, ${share(held / Math.max(1, total))} held. ${meaning}${order}`;
}

/** block id -> colour, where the server says which request holds what; shared blocks have the accent's. */
function blockOwners({ requests = [], cached_blocks: cached = [] }) {
  const palette = colours();
  const owners = new Map(cached.map((block) => [block, palette.cached]));
  for (const request of requests) {
    const own = colourOf(request.id);
    for (const block of request.blocks) owners.set(block, owners.has(block) ? palette.held : own);
  }
  return owners;
}

/** A cell of several blocks has the colour of the first one in use. */
function byOwner(owners, palette) {
  return (from, to) => {
    for (let block = from; block < to; block++) if (owners.has(block)) return owners.get(block);
    return palette.free;
  };
}

function byCount(held, cached, palette) {
  return (from) => (from < held ? palette.held : from < held + cached ? palette.cached : palette.free);
}

/** A bar per step, oldest first: its prompt tokens above its answer tokens. */
function drawSteps(steps) {
  const { context, width, height } = prepare($("steps"), 112);
  const palette = colours();
  const largest = Math.max(0, ...steps.map((step) => step.prefill_tokens + step.decode_tokens));
  const top = Math.max(16, largest); // few tokens are low bars
  const bar = width / STEPS;
  steps.forEach((step, i) => {
    const x = width - (steps.length - i) * bar;
    const scale = (tokens) => (tokens / top) * (height - 2);
    const decode = scale(step.decode_tokens);
    context.fillStyle = palette.held;
    context.fillRect(x, height - decode, Math.max(1, bar - 1.5), decode);
    context.fillStyle = palette.cached;
    const prefill = scale(step.prefill_tokens);
    context.fillRect(x, height - decode - prefill, Math.max(1, bar - 1.5), prefill);
  });
  context.fillStyle = palette.line;
  context.fillRect(0, height - 1, width, 1);
  const last = steps.at(-1);
  const worst = Math.max(0, ...steps.map((step) => step.run_ms));
  $("steps-text").textContent = last
    ? `The last ${steps.length} steps. The latest took ${last.run_ms.toFixed(1)} ms, the longest ${worst.toFixed(1)} ms; the tallest bar is ${count(largest)} ${largest === 1 ? "token" : "tokens"}.`
    : "Nothing has run yet.";
}

// -- requests

function showRequests({ running, waiting, requests = [], steps }) {
  $("pools").textContent = Object.keys(running)
    .map((pool) => `${pool}: ${running[pool]} running, ${waiting[pool]} waiting`)
    .join(" · ");
  $("requests").replaceChildren(...requests.slice(0, 64).map(requestRow));
  $("requests").closest(".table").hidden = !requests.length;
  const waits = Object.values(waiting).some(Boolean) ? Object.entries(steps.at(-1)?.waits ?? {}) : [];
  $("waits").textContent = waits.length ? `They wait for: ${waits.map(([why, n]) => `${WHY[why] ?? why} (${n})`).join(", ")}.` : "";
}

const WHY = {
  seats: "a seat",
  blocks: "blocks",
  step_budget: "room in a step",
  pool_share: "their pool's share",
  prefix: "a prefix that is being read",
};

function requestRow(request) {
  const swatch = element("canvas", { width: 1, height: 1, "aria-hidden": "true" });
  const context = swatch.getContext("2d");
  context.fillStyle = request.blocks.length ? colourOf(request.id) : colours().free;
  context.fillRect(0, 0, 1, 1);
  const numbers = [request.prompt, request.computed, request.output, request.blocks.length];
  return element(
    "tr",
    {},
    element("td", {}, swatch, element("code", {}, request.id)),
    element("td", {}, request.pool),
    element("td", {}, request.phase),
    ...numbers.map((value) => element("td", { class: "n" }, count(value))),
  );
}

// -- the page

$("pause").addEventListener("click", () => {
  paused = !paused;
  $("pause").setAttribute("aria-pressed", paused);
  $("pause").querySelector("span").textContent = paused ? "Go on" : "Pause";
});

$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  saveKey($("key").value.trim());
});

const redraw = () => latest && show(latest);
addEventListener("resize", redraw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
look();
