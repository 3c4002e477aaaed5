// The page works without this: it copies the settings, and opens what is folded before it is printed.
for (const button of document.querySelectorAll("button[data-copies]")) {
  button.hidden = !navigator.clipboard;
  button.addEventListener("click", async () => {
    await navigator.clipboard.writeText(document.getElementById(button.dataset.copies).textContent);
    button.textContent = "Copied";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  });
}
addEventListener("beforeprint", () => document.querySelectorAll("details").forEach((each) => (each.open = true)));
