// The page: what the address says is loaded and shown, and looked at again while a run lasts.

import { button, byId } from "./dom.js";
import { FILTERS, go, onChange, shown } from "./address.js";
import { loadComparison, loadPair } from "./comparison.js";
import { showExport } from "./exports.js";
import { loadFailures } from "./failures.js";
import { buildFilters, showFilters } from "./filters.js";
import { loadGroup, markResponse } from "./group.js";
import { first, loadGroups, markChosen, readState, total } from "./groups.js";
import { loadNumbers } from "./histograms.js";
import { showKeys } from "./keyboard.js";
import { ask } from "./server.js";
import { switchTheme } from "./theme.js";

const LOOK_MS = 2000;
const NO_ANSWER = "view-run does not answer; is it still running?";
const WIDE = matchMedia("(min-width: 801px)");
const VIEWS = { "": "groups", compare: "compare", failures: "failures" };

function say(text) {
  byId("state").textContent = text;
}

function guarded(work) {
  return Promise.resolve().then(work).catch((error) => say(error.message));
}

const changed = (now, before, ...names) => names.some((name) => now[name] !== before[name]);

function update(now, before = null) {
  const isNew = before === null || changed(now, before, "view");
  if (before !== null) say(readState()); // an error was of what is no longer shown
  document.body.dataset.pane = now.group || now.view === "failures" ? "detail" : "list";
  document.body.dataset.view = now.view ?? "groups";
  byId("views").replaceChildren(...Object.entries(VIEWS).map(([view, text]) =>
    button(text, "", () => go({ view, group: null, other: null, response: null, token: null, offset: null }), (now.view ?? "") === view ? "pressed" : "")));
  showFilters();
  for (const part of ["filter-panel", "search"]) byId(part).hidden = now.view === "failures"; // they are of groups
  const filtered = isNew || changed(now, before, ...FILTERS);
  if (filtered && before !== null && now.view !== "failures") guarded(loadNumbers); // at first when the panel opens
  if (now.view === "failures") return guarded(loadFailures);
  if (now.view === "compare") {
    if (filtered || changed(now, before, "left", "right", "offset")) guarded(loadComparison).then(() => markChosen());
    else markChosen();
    if (isNew || changed(now, before, "group", "other", "colour")) guarded(loadPair);
    return;
  }
  const lists = filtered || changed(now, before, "offset");
  const listed = lists ? guarded(() => loadGroups({ around: before === null })) : Promise.resolve();
  listed.then(() => {
    if (before === null && !shown().group && WIDE.matches && first()) go({ group: first() }, { replace: true });
    markChosen();
    if (readState()) say(readState());
  });
  if (now.group && (isNew || changed(now, before, "group", "colour"))) guarded(loadGroup);
  else if (!isNew && changed(now, before, "response")) markResponse({ scrolls: now.token === undefined });
}

// A run that continues adds groups; what is open stays as it is.
async function look() {
  if (!document.hidden) {
    const now = await ask("/api/state");
    if (now.state || [readState(), NO_ANSWER].includes(byId("state").textContent)) say(now.state);
    const grown = now.groups !== total();
    if (grown && !shown().view) {
      await loadGroups();
      if (!shown().group && WIDE.matches && first()) go({ group: first() }, { replace: true });
      markChosen();
      await loadNumbers();
    }
  }
}

async function watch() {
  for (;;) {
    await new Promise((resolve) => { setTimeout(resolve, LOOK_MS); });
    try { await look(); } catch { say(NO_ANSWER); }
  }
}

buildFilters();
byId("theme").addEventListener("click", switchTheme);
byId("help").addEventListener("click", showKeys);
byId("export").addEventListener("click", () => guarded(showExport));
byId("filter-panel").addEventListener("toggle", () => guarded(loadNumbers));
onChange(update);
byId("filter-panel").open = WIDE.matches && innerHeight > 700;
update(shown());
watch();
