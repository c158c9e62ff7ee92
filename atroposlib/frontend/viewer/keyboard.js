// Keys. They are left alone where something is typed, and with Ctrl, Alt or Meta.

import { button, byId, make } from "./dom.js";
import { go, shown } from "./address.js";
import { showExport } from "./exports.js";
import { step } from "./groups.js";
import { prefer, stepResponse } from "./group.js";
import { stepItem } from "./comparison.js";
import { switchTheme } from "./theme.js";

const along = (by) => (shown().view === "compare" ? stepItem(by) : shown().view ? undefined : step(by));
const KEYS = {
  j: ["next group", () => along(1)], k: ["previous group", () => along(-1)],
  ArrowRight: ["next answer", () => stepResponse(1)], ArrowLeft: ["previous answer", () => stepResponse(-1)],
  "/": ["search", () => byId("search").focus()],
  t: ["text, or tokens", () => go({ colour: shown().colour ? null : "logprob", token: null })],
  c: ["answers in columns", () => prefer("columns")], f: ["unfold thinking", () => prefer("unfolded")],
  h: ["filters and histograms", () => { byId("filter-panel").open = !byId("filter-panel").open; }],
  g: ["groups", () => go({ view: null, other: null })], v: ["compare", () => go({ view: "compare", group: null, offset: null })], x: ["failures", () => go({ view: "failures" })],
  e: ["export", showExport], d: ["light or dark", switchTheme], "?": ["these keys", showKeys],
};

export function showKeys() {
  const dialog = byId("dialog");
  const table = make("table", {});
  for (const [key, [text]] of Object.entries(KEYS)) table.append(make("tr", {}, make("td", {}, make("kbd", { text: { ArrowRight: "→", ArrowLeft: "←" }[key] ?? key })), make("td", { text })));
  dialog.replaceChildren(make("h2", { text: "Keys" }), table, make("p", { text: "↑ ↓ scroll; Esc leaves a field or closes this." }), button("close", "Esc", () => dialog.close()));
  if (!dialog.open) dialog.showModal();
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.altKey || event.metaKey || byId("dialog").open) return;
  const typing = event.target.closest?.("input, select, textarea");
  if (event.key === "Escape") return typing?.blur();
  if (typing || !Object.hasOwn(KEYS, event.key)) return;
  event.preventDefault();
  Promise.resolve(KEYS[event.key][1]()).catch((error) => { byId("state").textContent = error.message; });
});
