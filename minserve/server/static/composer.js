/** The message field: it grows with its text, Enter sends, and while an answer is on its way its button stops that. */

const $ = (id) => document.getElementById(id);
const input = $("input");

let busy = false;
let actions = { send: () => {}, stop: () => {} };

/** found: { send(text), stop() }. */
export function onComposer(found) {
  actions = found;
}

export function showBusy(value) {
  busy = value;
  show();
}

export function focusComposer() {
  input.focus();
}

/** A text that was sent comes back, before what has been written since. */
export function giveBack(text) {
  input.value = [text, input.value].filter(Boolean).join("\n");
  show();
  focusComposer();
}

function show() {
  $("send").classList.toggle("busy", busy);
  $("send").setAttribute("aria-label", busy ? "Stop" : "Send");
  $("send").disabled = !busy && !input.value.trim();
  input.style.height = "auto";
  input.style.height = `${input.scrollHeight}px`;
}

$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (busy) return actions.stop();
  const text = input.value.trim();
  if (!text) return;
  input.value = "";
  actions.send(text);
});

input.addEventListener("input", show);
input.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!busy) $("composer").requestSubmit();
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && busy && !$("settings").open) actions.stop();
});

for (const idea of document.querySelectorAll(".ideas button")) {
  idea.addEventListener("click", () => {
    input.value = idea.textContent;
    show();
    input.focus();
  });
}
