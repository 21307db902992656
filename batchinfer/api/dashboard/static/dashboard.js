// Keeps a page true while it is open. Without it every page works all the same, and stands still.
"use strict";

// Regions with data-live are replaced by what the server renders now, each at its own pace (data-every, seconds).
// A region with data-ended will not change any more.
(() => {
  const shownAt = new Map();

  const isDue = (region, now) => {
    const every = Number(region.dataset.every || 3) * 1000;
    return !("ended" in region.dataset) && now - (shownAt.get(region.dataset.live) || 0) >= every - 200;
  };

  // what somebody reads, types into or has opened must not be pulled away
  const isHeld = (region) =>
    region.contains(document.activeElement) && document.activeElement.matches("input, select, textarea, button");

  const adopt = (old, fresh) => {
    const open = [...old.querySelectorAll("details")].map((item) => item.open);
    const scrolled = [...old.querySelectorAll(".scroll")].map((item) => [item.scrollLeft, item.scrollTop]);
    const focused = old.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
    old.replaceWith(fresh);
    fresh.querySelectorAll("details").forEach((item, i) => { item.open = Boolean(open[i]); });
    fresh.querySelectorAll(".scroll").forEach((item, i) => {
      if (scrolled[i]) [item.scrollLeft, item.scrollTop] = scrolled[i];
    });
    if (focused) [...fresh.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
  };

  const refresh = async () => {
    const now = Date.now();
    const due = [...document.querySelectorAll("[data-live][data-every]")].filter((region) => isDue(region, now));
    if (due.length === 0 || document.visibilityState !== "visible") return;
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, credentials: "same-origin" });
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    const names = new Set(due.map((region) => region.dataset.live));
    for (const old of document.querySelectorAll("[data-live]")) {
      const name = old.dataset.live;
      if ((old.dataset.every && !names.has(name)) || isHeld(old)) continue;
      shownAt.set(name, now);
      const fresh = page.querySelector(`[data-live="${name}"]`);
      if (fresh && fresh.outerHTML !== old.outerHTML) adopt(old, document.adoptNode(fresh));
    }
  };

  const loop = async () => {
    try {
      await refresh();
    } catch {
      // the server restarts or the network is away: the next look will tell
    }
    setTimeout(loop, 1000);
  };
  document.querySelectorAll("[data-live]").forEach((region) => shownAt.set(region.dataset.live, Date.now()));
  setTimeout(loop, 1000);
})();

document.addEventListener("submit", (event) => {
  const question = event.target.dataset.confirm;
  if (question && !window.confirm(question)) {
    event.preventDefault();
    return;
  }
  // a second click must not send a second time
  for (const button of event.target.querySelectorAll("button")) button.disabled = true;
});
window.addEventListener("pageshow", () => {
  for (const button of document.querySelectorAll("form[method=post] button")) button.disabled = false;
});

// Uploads go to the same door as every client's; the file's id becomes an input.
document.addEventListener("change", async (event) => {
  const field = event.target;
  if (!field.dataset || !field.dataset.upload || field.files.length === 0) return;
  const word = field.parentElement.querySelector("output");
  const inputs = field.form.elements[field.dataset.upload];
  const body = new FormData();
  body.append("purpose", "input");
  body.append("file", field.files[0]);
  word.textContent = "uploading…";
  try {
    const answer = await fetch("/v1/files", { method: "POST", body, credentials: "same-origin" });
    const file = await answer.json();
    if (!answer.ok) throw new Error(file.error.message);
    inputs.value = `${inputs.value.trim()}\n${file.id}`.trim();
    word.textContent = `${file.filename} is ${file.id}`;
  } catch (error) {
    word.textContent = `not uploaded: ${error.message}`;
  }
});
