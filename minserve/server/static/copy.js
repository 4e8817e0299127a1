/** Text for the clipboard, of answers and of the code in them; the button says whether it got there. */

export async function copyText(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed";
  }
  setTimeout(() => (button.textContent = label), 1500);
}

document.getElementById("messages").addEventListener("click", (event) => {
  const button = event.target.closest("[data-copy=code]");
  if (button) copyText(button.closest(".code").querySelector("code").textContent, button);
});
