// The view-run page. Rollout text only ever becomes textContent.
"use strict";

const PAGE = 50;
const REFRESH_MS = 2000;
const REASONING_KEYS = ["reasoning_content", "reasoning", "thinking"];
const $ = (id) => document.getElementById(id);
let offset = 0;
let chosen = null;
let detail = null;

function element(tag, className, text) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text !== undefined) made.textContent = text;
  return made;
}

function sign(score) {
  return score > 0 ? "positive" : score < 0 ? "negative" : "zero";
}

async function fetchJson(path) {
  const reply = await fetch(path);
  if (!reply.ok) throw new Error((await reply.json()).detail || reply.statusText);
  return reply.json();
}

async function loadGroups() {
  const query = new URLSearchParams({ offset });
  for (const [name, value] of new FormData($("filters"))) if (value !== "") query.set(name, value);
  const found = await fetchJson("/api/groups?" + query);
  $("state").textContent = found.state;
  $("count").textContent = `${found.matching} of ${found.groups_total} groups, ${found.responses_total} responses`;
  showTasks(found.tasks);
  $("groups").replaceChildren(...found.groups.map(groupEntry));
  $("previous").disabled = offset === 0;
  $("next").disabled = offset + PAGE >= found.matching;
  if (chosen === null && found.groups.length) await choose(found.groups[0].row);
  if (found.state) setTimeout(() => loadGroups().catch(showError), REFRESH_MS);
}

function showTasks(tasks) {
  const select = $("filters").elements.task;
  const known = new Set([...select.options].map((option) => option.value));
  for (const task of tasks) {
    if (known.has(task)) continue;
    const option = element("option", "", task || "(none)");
    option.value = task;
    select.append(option);
  }
}

function groupEntry(group) {
  const button = element("button", group.row === chosen ? "chosen" : "", group.task || "(no task)");
  const dots = element("span", "dots");
  for (const score of group.scores) {
    const dot = element("span", sign(score));
    dot.title = `score ${score}`;
    dots.append(dot);
  }
  button.append(" ", dots, element("small", "", `${group.where}, tokens ${Math.min(...group.tokens)} to ${Math.max(...group.tokens)}`));
  button.addEventListener("click", () => choose(group.row).then(loadGroups).catch(showError));
  const entry = element("li");
  entry.append(button);
  return entry;
}

async function choose(row) {
  chosen = row;
  detail = await fetchJson(`/api/group/${row}`);
  showDetail();
}

function showDetail() {
  if (!detail) return;
  $("responses").replaceChildren(...detail.responses.map(responseCard));
  $("about").textContent = JSON.stringify(detail.about, null, 1);
}

function responseCard(response, index) {
  const card = element("article");
  card.append(element("h2", "", `[${index}] score ${response.score}, ${response.finish || "end not recorded"}`));
  if ($("as-tokens").checked && response.tokens) card.append(tokenView(response.tokens));
  else if (typeof response.messages === "string") card.append(element("pre", "", response.messages));
  else if (response.messages) for (const message of response.messages) addMessage(card, message);
  else if (response.tokens) card.append(tokenView(response.tokens));
  if (index === 0) for (const image of detail.images) addImage(card, image);
  return card;
}

// All that a message holds: thoughts before its content, every other key, as JSON, behind it.
function addMessage(card, message) {
  const { role, content, ...rest } = message;
  card.append(element("h3", "", role));
  for (const key of REASONING_KEYS) if (typeof rest[key] === "string") addKey(card, key, rest[key]);
  const parts = Array.isArray(content) ? content : content === null || content === undefined ? [] : [content];
  for (const part of parts) {
    const url = part && typeof part === "object" && (part.image_url?.url || part.image);
    if (typeof url === "string" && url.startsWith("data:image/")) addImage(card, url);
    else card.append(element("pre", "", typeof part === "string" ? part : part?.text ?? JSON.stringify(part)));
  }
  for (const [key, value] of Object.entries(rest)) {
    if (value === null || (REASONING_KEYS.includes(key) && typeof value === "string")) continue;
    addKey(card, key, typeof value === "string" ? value : JSON.stringify(value, null, 1));
  }
}

function addKey(card, key, text) {
  card.append(element("h4", "", key), element("pre", "", text));
}

function addImage(card, url) {
  const image = element("img");
  image.src = url;
  card.append(image);
}

function tokenView(tokens) {
  const view = element("pre");
  tokens.texts.forEach((text, at) => {
    const logprob = tokens.logprobs ? tokens.logprobs[at] : null;
    const span = element("span", "tok " + (tokens.trained[at] ? "trained " + shade(logprob) : "masked"), text);
    span.title = `id ${tokens.ids[at]}` + (logprob !== null && tokens.trained[at] ? `, logprob ${logprob.toFixed(3)}` : "");
    view.append(span, document.createElement("wbr"));
  });
  if (tokens.left_out) view.append(`\n[... ${tokens.left_out} more tokens ...]`);
  return view;
}

function shade(logprob) {
  if (logprob === null || logprob > -0.7) return "";
  return logprob > -1.6 ? "p1" : logprob > -3 ? "p2" : "p3";
}

function showError(error) {
  $("state").textContent = error.message;
}

function move(step) {
  offset = Math.max(0, offset + step);
  loadGroups().catch(showError);
}

$("filters").addEventListener("submit", (event) => {
  event.preventDefault();
  offset = 0;
  chosen = null;
  loadGroups().catch(showError);
});
$("as-tokens").addEventListener("change", showDetail);
$("previous").addEventListener("click", () => move(-PAGE));
$("next").addEventListener("click", () => move(PAGE));
if (location.hash === "#tokens") $("as-tokens").checked = true;
loadGroups().catch(showError);
