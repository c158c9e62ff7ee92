// Tokens one by one, coloured by what was recorded of them.

import { button, make, short, visible } from "./dom.js";
import { go, shown } from "./address.js";
import { ask } from "./server.js";

const PAGE = 4000;
const GAP_KEYS = ["trainer_logprobs", "old_logprobs", "ref_logprobs"];
const STEPS = 5;
const LEGENDS = {
  mask: "shaded: takes loss", logprob: "red: improbable", gap: "red: engine and trainer disagree", side: "green: chosen, red: rejected",
};

// The ways of colouring that this group has numbers for.
export function colourSelect(detail) {
  const names = { "": "text", mask: "tokens: loss", logprob: "tokens: log-probability" };
  for (const name of detail.channels) {
    if (GAP_KEYS.includes(name)) names.gap = "tokens: engine-trainer gap";
    else if (name !== "inference_logprobs") names[`rank:${name}`] = `tokens: rank of ${name}`;
  }
  if (detail.responses.some((response) => response.side)) names.side = "tokens: DPO side";
  const select = make("select", { title: "text or tokens (t)", on: { change: (event) => go({ colour: event.target.value, token: null }) } });
  for (const [value, text] of Object.entries(names)) select.append(make("option", { value, text }));
  select.value = shown().colour ?? "";
  return select;
}

export function tokenView(place, index, response, colour) {
  const box = make("div", { className: "token-box" }, make("p", { className: "quiet", text: "reading tokens" }));
  const wanted = shown().response === String(index) && shown().token ? Number(shown().token) : 0;
  load(box, place, index, response, colour, Math.floor(wanted / PAGE) * PAGE).catch((error) => box.replaceChildren(make("p", { className: "error", text: error.message })));
  return box;
}

async function load(box, place, index, response, colour, start) {
  const found = await ask("/api/tokens", { at: place, response: index, start });
  show(box, place, index, response, colour, found);
  if (found.reason === "loading") setTimeout(() => box.isConnected && load(box, place, index, response, colour, start).catch(() => {}), 300);
}

function show(box, place, index, response, colour, found) {
  const view = make("pre", { className: "tokens" });
  const shades = shadesOf(found, colour, response.side);
  const chosen = shown().response === String(index) ? Number(shown().token ?? -1) : -1;
  found.ids.forEach((id, at) => {
    const span = make("span", { className: `tok ${found.trained[at] ? "trained" : "masked"} ${shades[at]}`, data: { at: found.start + at }, title: facts(found, at) });
    const text = found.texts ? found.texts[at] : String(id);
    span.append(visible(text));
    if (text === "") span.classList.add("part");
    if (text.includes("\n")) span.classList.add("newline");
    if (found.start + at === chosen) span.classList.add("chosen");
    view.append(span, document.createElement("wbr"));
  });
  view.classList.toggle("ids", !found.texts);
  view.addEventListener("click", (event) => {
    const at = event.target.closest(".tok")?.dataset.at;
    if (at === undefined) return;
    view.querySelector(".chosen")?.classList.remove("chosen");
    event.target.closest(".tok").classList.add("chosen");
    box.querySelector(".token-facts").textContent = facts(found, Number(at) - found.start);
    go({ response: String(index), token: at }, { replace: true });
  });
  const note = found.texts ? "" : found.reason === "loading" ? `the tokenizer ${found.tokenizer} is being loaded` : found.reason;
  const pages = make("span", {});
  const turn = (start, text) => button(text, "", () => load(box, place, index, response, colour, start).catch(() => {}));
  if (found.total > PAGE) {
    pages.append(`tokens ${short(found.start)} to ${short(found.start + found.ids.length - 1)} of ${short(found.total)} `);
    if (found.start) pages.append(turn(found.start - PAGE, "‹"));
    if (found.start + PAGE < found.total) pages.append(turn(found.start + PAGE, "›"));
  }
  box.replaceChildren(
    make("p", { className: "legend" }, LEGENDS[colour] ?? "red: highest in this answer", ". ", note ? make("span", { className: "notice", text: note }) : "", pages),
    view, make("p", { className: "token-facts", text: chosen >= found.start && chosen < found.start + found.ids.length ? facts(found, chosen - found.start) : "" }));
  if (chosen >= 0) view.querySelector(".chosen")?.scrollIntoView({ block: "center" });
}

function facts(found, at) {
  const said = [`token ${found.start + at}`, `id ${found.ids[at]}`];
  if (!found.trained[at]) return [...said, "takes no loss"].join(", ");
  for (const [name, values] of Object.entries(found.channels)) {
    const value = values[at];
    said.push(`${name} ${value === null ? "–" : value.toFixed(4)}`);
    if (name === "inference_logprobs" && value !== null) said.push(`p ${Math.exp(value).toPrecision(3)}`);
  }
  return said.join(", ");
}

// A class for each token: "" or s1 to s5.
function shadesOf(found, colour, side) {
  const only = (values) => values.map((value, at) => (found.trained[at] && value !== null && value !== undefined ? value : null));
  const logprobs = found.channels.inference_logprobs;
  if (colour === "side") return found.trained.map((trained) => (trained && side ? `side-${side}` : ""));
  if (colour === "logprob" && logprobs) return only(logprobs).map((value) => (value === null ? "" : level(-value, [0.7, 1.6, 3, 5, 8])));
  const theirs = GAP_KEYS.map((name) => found.channels[name]).find((values) => values);
  if (colour === "gap" && theirs && logprobs) {
    return only(theirs).map((value, at) => (value === null || logprobs[at] === null ? "" : level(Math.abs(value - logprobs[at]), [0.02, 0.05, 0.15, 0.5, 1])));
  }
  const ranked = colour.startsWith("rank:") ? found.channels[colour.slice(5)] : null;
  if (!ranked) return found.trained.map(() => "");
  const sorted = only(ranked).filter((value) => value !== null).sort((a, b) => a - b);
  const limits = [0.5, 0.7, 0.8, 0.9, 0.95].map((share) => sorted[Math.floor(share * (sorted.length - 1))]);
  return only(ranked).map((value) => (value === null ? "" : level(value, limits)));
}

function level(value, limits) {
  let step = 0;
  while (step < STEPS && value > limits[step]) step += 1;
  return step ? `s${step}` : "";
}
