// Two runs, or two steps, next to each other: the same items, who did better, and what is different.

import { button, byId, make, modelText, short } from "./dom.js";
import { filters, go, shown } from "./address.js";
import { ask } from "./server.js";
import { offer } from "./filters.js";
import { answer, promptView } from "./group.js";
import { asText } from "./messages.js";
import { changedWords } from "./words.js";

let found = null;

export async function loadComparison() {
  const { facets } = await ask("/api/groups", {});
  offer(facets);
  const sides = [...facets.run.map((name) => `run:${name}`), ...facets.weights.filter(Boolean).map((name) => `step:${name}`)];
  const [left, right] = defaults(sides);
  if (!left) {
    byId("list-head").replaceChildren(make("span", { text: "There is one run at one step; give view-run two runs, or one whose engine names its weights." }));
    byId("list").replaceChildren();
    byId("pages").replaceChildren();
    return;
  }
  found = await ask("/api/compare", { ...filters(), sort: null, left, right, offset: shown().offset });
  const choose = (name, value) => {
    const select = make("select", { on: { change: (event) => go({ [name]: event.target.value, offset: null, group: null, other: null }) } });
    for (const side of sides) select.append(make("option", { value: side, text: side }));
    select.value = value;
    return select;
  };
  byId("list-head").replaceChildren(
    make("label", {}, "A ", choose("left", left)), make("label", {}, "B ", choose("right", right)),
    verdict(found));
  byId("list").replaceChildren(...found.items.map(entry));
  const isFiltered = Object.keys(filters()).some((name) => name !== "sort");
  if (!found.items.length) byId("list").append(make("li", { className: "quiet", text: isFiltered ? "no item that the filters leave is in both" : "no item is in both" }));
  const pages = byId("pages");
  pages.replaceChildren();
  if (found.matching > found.page) {
    const turn = (by, text) => {
      const made = button(text, "", () => go({ offset: String(found.offset + by * found.page) }, { replace: true }));
      made.disabled = found.offset + by * found.page < 0 || found.offset + by * found.page >= found.matching;
      return made;
    };
    pages.append(turn(-1, "‹"), ` ${found.offset / found.page + 1} of ${Math.ceil(found.matching / found.page)} `, turn(1, "›"));
  }
}

// Means of different items cannot be compared, so each stands with its number of items.
function verdict({ wins, ties, mean, own, only, matching }) {
  const alone = ["A", "B"].map((name, at) => `${name} has ${short(only[at])} ${only[at] === 1 ? "item" : "items"}${only[at] ? ` with a mean score of ${short(own[at])}` : ""}`);
  return matching
    ? make("p", { className: "verdict" }, make("b", { text: `A better on ${short(wins[0])}, B on ${short(wins[1])}` }),
      `, equal on ${short(ties)}; mean score ${short(mean[0])} and ${short(mean[1])}; only in A ${short(only[0])}, only in B ${short(only[1])}`)
    : make("p", { className: "verdict" }, make("b", { text: "No item in common" }), `: ${alone.join(", ")}`);
}

function defaults(sides) {
  if (shown().left && shown().right) return [shown().left, shown().right];
  const runs = sides.filter((side) => side.startsWith("run:")), steps = sides.filter((side) => side.startsWith("step:"));
  if (runs.length > 1) return [runs[0], runs[1]];
  return steps.length > 1 ? [steps[0], steps.at(-1)] : [];
}

function entry(item) {
  const [a, b] = item.scores;
  const line = button("", item.groups.join("  |  "), () => go({ group: item.groups[0], other: item.groups[1] }), item.groups[0] === shown().group ? "chosen" : "");
  line.dataset.at = item.groups[0];
  line.append(
    make("span", { className: "task", text: b > a ? "B better" : b < a ? "A better" : "equal" }),
    make("span", { className: "mean", text: `${short(a)} → ${short(b)}` }),
    make("small", { text: `${item.groups[0]}, tokens ${short(item.tokens[0])} → ${short(item.tokens[1])}` }));
  return make("li", {}, line);
}

export function stepItem(by) {
  const places = found?.items.map((item) => item.groups) ?? [];
  const at = places.findIndex(([left]) => left === shown().group) + by;
  if (at >= 0 && at < places.length) go({ group: places[at][0], other: places[at][1] }, { replace: true });
}

export async function loadPair() {
  const { group, other } = shown();
  if (!group || !other) return byId("detail-pane").replaceChildren(make("p", { className: "quiet", text: "choose an item" }));
  const [a, b] = await Promise.all([ask("/api/group", { at: group }), ask("/api/group", { at: other })]);
  if (group !== shown().group || other !== shown().other) return;
  const same = JSON.stringify(a.prompt) === JSON.stringify(b.prompt);
  const column = (name, side) => make("div", { className: "side" },
    make("h2", {}, `${name}: `, make("span", { text: side.at })), same ? "" : promptView(side), ...side.responses.map((response, at) => answer(side, response, at)));
  byId("detail-pane").replaceChildren(
    make("div", { className: "detail-head" }, button("‹ list", "back to the list", () => go({ group: null, other: null }), "to-list"),
      make("h2", { text: a.task || "(no task)" })),
    same ? promptView(a) : "", changes(a, b), best(a, b),
    make("div", { className: "sides" }, column("A", a), column("B", b)));
}

// The settings and facts that are not the same.
function changes(a, b) {
  const flat = (about) => {
    const all = {};
    for (const [key, value] of Object.entries(about)) {
      if (value && typeof value === "object" && !Array.isArray(value)) for (const [inner, each] of Object.entries(value)) all[`${key}.${inner}`] = asText(each);
      else all[key] = asText(value);
    }
    return all;
  };
  const left = flat(a.about), right = flat(b.about);
  const rows = [...new Set([...Object.keys(left), ...Object.keys(right)])].filter((key) => left[key] !== right[key] && !["group_id", "created_at", "duration_s"].includes(key));
  if (!rows.length) return "";
  const table = make("table", {}, make("tr", {}, make("th", { text: "what changed" }), make("th", { text: "A" }), make("th", { text: "B" })));
  for (const key of rows) table.append(make("tr", {}, make("td", { text: key }), make("td", { text: left[key] ?? "–" }), make("td", { text: right[key] ?? "–" })));
  return make("details", { className: "changes", open: true }, make("summary", { text: `${rows.length} facts differ` }), table);
}

// The best answer of each side, with the words that only one of them has.
function best(a, b) {
  const pick = (side) => side.responses.reduce((top, each) => ((each.score ?? -Infinity) > (top?.score ?? -Infinity) ? each : top), side.responses[0]);
  const text = (response) => (typeof response?.messages === "string" ? response.messages : (response?.messages ?? []).map((message) => asText(message?.content ?? "")).join("\n"));
  const [left, right] = changedWords(text(pick(a)), text(pick(b)));
  const mark = (pieces, className) => {
    const block = make("pre", { className: "text" });
    for (const [piece, changed] of pieces) block.append(changed ? make("mark", { className, text: piece }) : piece);
    return block;
  };
  return make("details", { className: "changes" }, make("summary", { text: "best answers, word by word" }),
    make("div", { className: "sides" }, mark(left, "removed"), mark(right, "added")));
}
