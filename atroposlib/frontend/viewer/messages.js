// What was said: thoughts folded, tool calls and their results as such, every other key of a message behind it.

import { make, modelText } from "./dom.js";

const REASONING_KEYS = ["reasoning_content", "reasoning", "thinking"];
const USUAL = new Set(["role", "content", "tool_calls", "function_call", ...REASONING_KEYS]);
const TAGGED = /<think>([\s\S]*?)(?:<\/think>|$)|<tool_call>([\s\S]*?)(?:<\/tool_call>|$)|<tool_response>([\s\S]*?)(?:<\/tool_response>|$)/g;

export function conversation(messages, { unfolded = false } = {}) {
  if (typeof messages === "string") return [make("div", { className: "message" }, ...spoken(messages, unfolded))];
  if (!Array.isArray(messages)) return [];
  return messages.map((message) => turn(message, unfolded));
}

function turn(message, unfolded) {
  if (message === null || typeof message !== "object") return make("div", { className: "message" }, modelText(String(message)));
  const role = String(message.role ?? "");
  const block = make("div", { className: "message", data: { role: role === "tool" ? "tool" : role === "assistant" ? "assistant" : "other" } });
  block.append(make("h4", { text: role + (typeof message.name === "string" ? ` (${message.name})` : "") }));
  for (const key of REASONING_KEYS) if (typeof message[key] === "string" && message[key]) block.append(thinking(message[key], unfolded));
  block.append(...content(message.content, role, unfolded));
  for (const call of calls(message)) block.append(call);
  for (const [key, value] of Object.entries(message)) {
    if (value === null || (USUAL.has(key) && !(REASONING_KEYS.includes(key) && typeof value !== "string"))) continue;
    if (key === "name" && typeof value === "string") continue;
    block.append(make("h5", { text: key }), modelText(asText(value)));
  }
  return block;
}

function content(value, role, unfolded) {
  if (value === null || value === undefined) return [];
  if (typeof value === "string" && role === "tool") return [result(value)];
  const parts = Array.isArray(value) ? value : [value];
  return parts.flatMap((part) => {
    if (typeof part === "string") return spoken(part, unfolded);
    const url = part && typeof part === "object" && (part.image_url?.url || part.image);
    if (typeof url === "string" && url.startsWith("data:image/")) return [image(url)];
    if (typeof part?.thinking === "string" || typeof part?.reasoning === "string") return [thinking(part.thinking ?? part.reasoning, unfolded)];
    return typeof part?.text === "string" ? spoken(part.text, unfolded) : [modelText(asText(part))];
  });
}

// A text with what stands in tags taken apart. A template may have begun the thoughts before the text did.
function spoken(text, unfolded) {
  const blocks = [];
  const end = text.indexOf("</think>");
  if (end >= 0 && !text.slice(0, end).includes("<think>")) {
    blocks.push(thinking(text.slice(0, end), unfolded));
    text = text.slice(end + "</think>".length);
  }
  let at = 0;
  const plain = (piece) => { if (piece.trim()) blocks.push(modelText(piece.replace(/^\n+|\s+$/g, ""))); };
  for (const found of text.matchAll(TAGGED)) {
    plain(text.slice(at, found.index));
    if (found[1] !== undefined) blocks.push(thinking(found[1], unfolded));
    else if (found[2] !== undefined) blocks.push(call(null, found[2]));
    else blocks.push(result(found[3]));
    at = found.index + found[0].length;
  }
  plain(text.slice(at));
  return blocks;
}

function thinking(text, unfolded) {
  const words = text.trim() ? text.trim().split(/\s+/).length : 0;
  return make("details", { className: "thinking", open: unfolded },
    make("summary", { text: `thinking, ${words.toLocaleString("en")} words` }), modelText(text.trim()));
}

function calls(message) {
  const given = [...(Array.isArray(message.tool_calls) ? message.tool_calls : []), message.function_call];
  return given.filter((each) => each && typeof each === "object").map((each) => {
    const called = each.function && typeof each.function === "object" ? each.function : each;
    return call(String(called.name ?? ""), called.arguments ?? null, each.id);
  });
}

function call(name, given, id) {
  let value = given;
  if (typeof given === "string") try { value = JSON.parse(given); } catch { /* shown as it is */ }
  if (name === null && value && typeof value === "object") {
    name = String(value.name ?? "");
    value = value.arguments ?? value;
  }
  return make("div", { className: "call" },
    make("h5", {}, "call ", make("code", { text: name ?? "" }), typeof id === "string" ? ` ${id}` : ""),
    modelText(asText(value)));
}

function result(text) {
  const long = text.length > 1500;
  const shown = modelText(asText(pretty(text)));
  return long
    ? make("details", { className: "result" }, make("summary", { text: `result, ${text.length.toLocaleString("en")} characters` }), shown)
    : make("div", { className: "result" }, shown);
}

function pretty(text) {
  try {
    const value = JSON.parse(text);
    return value && typeof value === "object" ? value : text;
  } catch { return text; }
}

export function asText(value) {
  return typeof value === "string" ? value : JSON.stringify(value, null, 1) ?? "";
}

export function image(url) {
  const made = make("img");
  made.alt = "image of the record";
  made.src = url;
  return made;
}
