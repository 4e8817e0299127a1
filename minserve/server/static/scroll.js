/** Scrolling: the conversation stays at its end unless the reader went up. */

const scroller = document.getElementById("scroller");
const button = document.getElementById("to-end");

function atEnd() {
  return scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight < 40;
}

export function toEnd() {
  scroller.scrollTop = scroller.scrollHeight;
}

/** Let `change` alter the conversation for a reader who stays where they are: at its end, or above. */
export function keepPlace(change) {
  const following = atEnd();
  change();
  if (following) toEnd();
}

let following = true; // after the latest scrolling
scroller.addEventListener("scroll", () => (button.hidden = following = atEnd()), { passive: true });
// What stands below the conversation grows: the message field with its text, the context's meter.
new ResizeObserver(() => following && toEnd()).observe(scroller);
button.addEventListener("click", toEnd);
