// The list of groups: a line each, with a dot for every response.

import { button, byId, dots, make, short } from "./dom.js";
import { filters, go, shown } from "./address.js";
import { ask } from "./server.js";
import { offer, orderSelect } from "./filters.js";

const AGAIN_MS = 600; // while a search still reads
let found = null;
let asked = 0;

export async function loadGroups({ around = false } = {}) {
  const mine = ++asked;
  const place = around && shown().group ? { around: shown().group } : { offset: shown().offset };
  const answer = await ask("/api/groups", { ...filters(), ...place });
  if (mine !== asked) return;
  found = answer;
  offer(found.facets);
  showList();
  if (found.unread) setTimeout(() => mine === asked && loadGroups().catch(() => {}), AGAIN_MS);
}

export const total = () => found?.groups_total ?? 0;
export const readState = () => found?.state ?? "";
export const first = () => found?.groups[0]?.at;

function showList() {
  const count = `${short(found.matching)} of ${short(found.groups_total)} groups, ${short(found.matching_responses)} of ${short(found.responses_total)} responses`;
  byId("list-head").replaceChildren(
    make("span", { text: count }),
    found.unread ? make("span", { className: "notice", text: `reading, ${short(found.unread)} groups to go` }) : "",
    orderSelect(),
  );
  byId("list").replaceChildren(...found.groups.map(entry));
  if (!found.groups.length) byId("list").append(make("li", { className: "quiet", text: found.groups_total ? "no group matches the filters" : "no groups yet" }));
  const pages = byId("pages");
  pages.replaceChildren();
  if (found.matching > found.page) {
    const here = found.offset / found.page + 1, last = Math.ceil(found.matching / found.page);
    const previous = button("‹", "previous page", () => turn(-1)), next = button("›", "next page", () => turn(1));
    previous.disabled = here === 1;
    next.disabled = here === last;
    pages.append(previous, ` ${here} of ${last} `, next);
  }
}

function entry(group) {
  const lengths = group.tokens.filter((count) => count >= 0);
  const from = Math.min(...lengths), to = Math.max(...lengths);
  const known = group.scores.filter((score) => score !== null);
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const line = button("", group.at, () => go({ group: group.at, response: null, token: null, other: null }), group.at === shown().group ? "chosen" : "");
  line.dataset.at = group.at;
  line.append(
    make("span", { className: "task", text: group.task || "(no task)" }),
    make("span", { className: "mean", text: short(mean) }),
    dots(group.scores, group.matches),
    make("small", {}, group.at.replace(/\.jsonl(\.\w+)?(?=:\d+$)/, "").replace(/^.*(?=.{22}$)/, "…"), lengths.length ? `, ${from === to ? short(from) : `${short(from)}–${short(to)}`} tokens` : "",
      group.failed ? make("span", { className: "failure-mark", text: " failed" }) : ""),
  );
  return make("li", {}, line);
}

export function markChosen() {
  for (const line of byId("list").querySelectorAll("button")) line.classList.toggle("chosen", line.dataset.at === shown().group);
  byId("list").querySelector(".chosen")?.scrollIntoView({ block: "nearest" });
}

async function turn(step) {
  go({ offset: String(Math.max(0, found.offset + step * found.page)) }, { replace: true });
}

// The next group in the list, on the next page where this one ends.
export async function step(by) {
  const places = found?.groups.map((group) => group.at) ?? [];
  if (!places.length) return;
  const at = places.indexOf(shown().group) + by;
  if (places.indexOf(shown().group) >= 0 && (at < 0 || at >= places.length)) {
    const offset = found.offset + by * found.page;
    if (offset < 0 || offset >= found.matching) return;
    const answer = await ask("/api/groups", { ...filters(), offset });
    const next = answer.groups.at(by > 0 ? 0 : -1);
    if (next) go({ offset: String(offset), group: next.at, response: null, token: null }, { replace: true });
    return;
  }
  go({ group: places[Math.max(0, at)], response: null, token: null, other: null }, { replace: true });
}
