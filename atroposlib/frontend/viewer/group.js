// One group: the prompt once, then every answer with its score, what was said of it, and its messages or tokens.

import { button, byId, make, modelText, short, sign } from "./dom.js";
import { go, hashWith, shown } from "./address.js";
import { asText, conversation, image } from "./messages.js";
import { ask } from "./server.js";
import { colourSelect, tokenView } from "./tokens.js";

let detail = null;
let preferences = { columns: false, unfolded: false };
try { preferences = { ...preferences, ...JSON.parse(localStorage.getItem("atropos-view") ?? "{}") }; } catch { /* as it comes */ }

export async function loadGroup() {
  const place = shown().group;
  if (!place) return;
  const answer = await ask("/api/group", { at: place });
  if (place !== shown().group || shown().view) return;
  detail = answer;
  showGroup();
}

export function showGroup() {
  const pane = byId("detail-pane");
  pane.replaceChildren(head(), ...parts());
  pane.scrollTop = 0;
  markResponse({ scrolls: shown().response !== undefined });
}

function head() {
  const tokens = detail.responses.some((response) => response.tokens);
  return make("div", { className: "detail-head" },
    button("‹ list", "back to the list", () => go({ group: null, response: null, token: null }), "to-list"),
    make("h2", {}, make("span", { text: detail.task || "(no task)" }), " ",
      make("a", { href: hashWith({}), text: detail.at, title: "the address of this group" })),
    make("span", { className: "buttons" },
      tokens ? colourSelect(detail) : "",
      toggle("columns", "columns", "answers in columns (c)"),
      toggle("unfolded", "thinking", "unfold the thinking (f)")));
}

function toggle(name, text, title) {
  return button(text, title, () => prefer(name), preferences[name] ? "pressed" : "");
}

export function prefer(name) {
  preferences[name] = !preferences[name];
  try { localStorage.setItem("atropos-view", JSON.stringify(preferences)); } catch { /* forgotten then */ }
  if (detail && !shown().view) showGroup();
}

function parts() {
  const answers = make("div", { className: preferences.columns ? "answers columns" : "answers" }, ...detail.responses.map((response, at) => answer(detail, response, at)));
  return [
    promptView(detail),
    ...detail.images.map(image),
    answers,
    ...detail.unscored.map(unscored),
    make("details", { className: "about" }, make("summary", { text: "about this group" }), modelText(asText(detail.about))),
  ];
}

export function promptView(group) {
  if (!group.prompt.length) return "";
  return make("details", { className: "prompt", open: true },
    make("summary", { text: `prompt of all ${group.responses.length} answers` }), ...conversation(group.prompt, { unfolded: preferences.unfolded }));
}

export function answer(group, response, at) {
  const card = make("article", { data: { response: at } });
  const facts = [
    response.finish && response.finish !== "stop" ? make("span", { className: "tag warn", text: response.finish }) : "",
    make("span", { className: "tag", text: response.completion >= 0 ? `${short(response.completion)} tokens` : "no ids" }),
    response.side ? make("span", { className: `tag ${response.side}`, text: response.side, title: "side of a DPO pair by the default rules" }) : "",
  ];
  card.append(make("h3", {},
    make("a", { href: hashWith({ group: group.at, response: at, token: null, view: null }), text: `[${at}]`, title: "the address of this answer" }),
    make("span", { className: `score ${sign(response.score)}`, text: short(response.score) }), ...facts));
  const verdict = verdictView(response.facts);
  if (verdict) card.append(verdict);
  const colour = shown().colour;
  if (response.tokens && (colour || !response.messages)) card.append(tokenView(group.at, at, response, colour ?? "mask"));
  else card.append(...conversation(response.messages ?? [], { unfolded: preferences.unfolded }));
  return card;
}

// The verifier's words and everything else that was recorded for this response.
function verdictView(facts) {
  const entries = Object.entries(facts);
  if (!entries.length) return null;
  const list = make("dl", { className: "facts" });
  for (const [name, value] of entries) {
    const inner = value && typeof value === "object" && !Array.isArray(value) ? Object.entries(value) : [[name, value]];
    for (const [key, each] of inner) list.append(make("dt", { text: key }), make("dd", {}, modelText(asText(each))));
  }
  return list;
}

function unscored(failed) {
  const { index, failure, error, messages, ...rest } = failed;
  return make("article", { className: "failed" },
    make("h3", {}, make("span", { text: `[${short(index)}]` }), make("span", { className: "tag warn", text: String(failure ?? "failed") }), "has no score"),
    modelText(asText(error ?? "")), ...conversation(messages ?? []),
    Object.keys(rest).length ? modelText(asText(rest)) : "");
}

// The chosen answer is marked, and comes into view when it was asked for.
export function markResponse({ scrolls = true } = {}) {
  const wanted = shown().response;
  for (const card of document.querySelectorAll("#detail-pane article[data-response]")) {
    const chosen = card.dataset.response === wanted;
    card.classList.toggle("chosen", chosen);
    if (chosen && scrolls) card.scrollIntoView({ block: "start", inline: "nearest" });
  }
}

export function stepResponse(by) {
  if (!detail || shown().view) return;
  const at = shown().response === undefined ? (by > 0 ? 0 : detail.responses.length - 1) : Number(shown().response) + by;
  if (at >= 0 && at < detail.responses.length) go({ response: String(at), token: null }, { replace: true });
}

export const current = () => detail;
