// What is shown, as the fragment of the page's address: every filter, group and token has one.

export const FILTERS = ["text", "task", "run", "weights", "finish", "failed", "min_score", "max_score", "min_tokens", "max_tokens", "min_rate", "max_rate", "min_gap", "max_gap", "sort"];
const NAMES = [...FILTERS, "view", "group", "other", "response", "token", "colour", "left", "right", "kind", "offset"];
const listeners = [];
let current = read();

function read() {
  const given = new URLSearchParams(location.hash.slice(1));
  const found = {};
  for (const name of NAMES) if (given.get(name)) found[name] = given.get(name);
  return found;
}

export const shown = () => current;

export function filters() {
  return Object.fromEntries(FILTERS.filter((name) => current[name] !== undefined).map((name) => [name, current[name]]));
}

export function hashWith(changes) {
  const next = new URLSearchParams();
  for (const name of NAMES) {
    const value = name in changes ? changes[name] : current[name];
    if (value !== undefined && value !== null && value !== "") next.set(name, value);
  }
  return "#" + next;
}

// Changes what is shown. Steps through a list replace the entry of the history, everything else adds one.
export function go(changes, { replace = false } = {}) {
  const hash = hashWith(changes);
  if (hash === (location.hash || "#")) return;
  history[replace ? "replaceState" : "pushState"](null, "", hash);
  follow();
}

export function filterBy(changes) {
  go({ ...changes, offset: null });
}

export function onChange(listener) {
  listeners.push(listener);
}

function follow() {
  const before = current;
  current = read();
  for (const listener of listeners) listener(current, before);
}

addEventListener("hashchange", follow);
addEventListener("popstate", follow);
