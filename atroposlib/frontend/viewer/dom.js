// Elements. Text only ever becomes textContent; attributes are those named here, never names from data.

const ATTRIBUTES = ["type", "name", "value", "placeholder", "title", "href", "download", "step", "label", "disabled", "open", "checked", "target", "rel"];

export const byId = (id) => document.getElementById(id);

export function make(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  if (options.className) made.className = options.className;
  if (options.text !== undefined) made.textContent = options.text;
  for (const name of ATTRIBUTES) if (options[name] !== undefined) made[name] = options[name];
  for (const [name, value] of Object.entries(options.data ?? {})) made.dataset[name] = value;
  for (const [event, listener] of Object.entries(options.on ?? {})) made.addEventListener(event, listener);
  made.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return made;
}

export function button(text, title, onClick, className = "") {
  return make("button", { type: "button", text, title, className, on: { click: onClick } });
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// Characters that would be invisible, or change the direction of what follows, are shown by their number.
const HIDDEN = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u061c\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]|\p{Surrogate}|[\u{e0000}-\u{e007f}]/u;
const EACH_HIDDEN = new RegExp(HIDDEN.source, "gu");

export function visible(text) {
  const all = document.createDocumentFragment();
  if (!HIDDEN.test(text)) {
    all.append(text);
    return all;
  }
  let at = 0;
  for (const found of text.matchAll(EACH_HIDDEN)) {
    all.append(text.slice(at, found.index));
    const code = found[0].codePointAt(0).toString(16).toUpperCase().padStart(4, "0");
    all.append(make("span", { className: "hidden-character", text: `U+${code}` }));
    at = found.index + found[0].length;
  }
  all.append(text.slice(at));
  return all;
}

const SHOWN = 60_000;

// Text of a model; of a very long one the rest is one click away.
export function modelText(text, className = "") {
  const block = make("pre", { className: `text ${className}` });
  block.append(visible(text.length > SHOWN ? text.slice(0, SHOWN) : text));
  if (text.length <= SHOWN) return block;
  const more = button(`show all ${text.length.toLocaleString("en")} characters`, "", () => {
    block.replaceChildren(visible(text));
    more.remove();
  });
  return make("div", {}, block, more);
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  return Math.abs(value) >= 1000 ? Math.round(value).toLocaleString("en") : String(+(Math.abs(value) < 1e-9 ? 0 : value).toPrecision(3));
}

export function sign(score) {
  if (score === null || score === undefined) return "none";
  return score > 0 ? "positive" : score < 0 ? "negative" : "zero";
}

export function dots(scores, matches) {
  const row = make("span", { className: "dots" });
  scores.forEach((score, at) => {
    const dimmed = matches && !matches[at] ? " dimmed" : "";
    row.append(make("span", { className: sign(score) + dimmed, title: `[${at}] score ${short(score)}` }));
  });
  return row;
}
