// The filters: a form for all of them, and a chip for each that is set.

import { button, byId, make } from "./dom.js";
import { FILTERS, filterBy, filters, shown } from "./address.js";

const CHOICES = { task: "task", run: "run", weights: "step", finish: "ended by", failed: "failed sibling" };
const RANGES = { score: "score", tokens: "tokens", rate: "pass rate", gap: "gap" };
const ORDERS = {
  "": "as recorded", "-score": "best score first", score: "worst score first", "-spread": "widest spread first", spread: "narrowest spread first",
  "-tokens": "longest first", tokens: "shortest first", "-rate": "easiest first", rate: "hardest first", task: "by task", gap: "largest gap first",
};

let fields = null;

export function buildFilters() {
  fields = {};
  const select = (name, label) => {
    fields[name] = make("select", { name, on: { change: (event) => filterBy({ [name]: event.target.value }) } }, make("option", { value: "", text: "all" }));
    return make("label", {}, label, " ", fields[name]);
  };
  const number = (name, hint) => {
    fields[name] = make("input", { type: "number", step: "any", name, placeholder: hint, on: { change: (event) => filterBy({ [name]: event.target.value }) } });
    return fields[name];
  };
  byId("filters").replaceChildren(
    ...Object.entries(CHOICES).map(([name, label]) => select(name, label)),
    ...Object.entries(RANGES).map(([name, label]) => make("label", {}, label, " ", number(`min_${name}`, "from"), " ", number(`max_${name}`, "to"))),
  );
  const search = byId("search");
  let waiting = 0;
  search.addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => filterBy({ text: search.value }), 250);
  });
}

export function orderSelect() {
  const select = make("select", { title: "order of the groups", on: { change: (event) => filterBy({ sort: event.target.value }) } });
  for (const [value, text] of Object.entries(ORDERS)) select.append(make("option", { value, text }));
  select.value = shown().sort ?? "";
  return select;
}

// What can be chosen, as far as files are known; a choice with nothing to choose from is left out.
export function offer(facets) {
  for (const name of Object.keys(CHOICES)) {
    const select = fields[name];
    const known = new Set([...select.options].map((option) => option.value));
    const wanted = shown()[name];
    const values = facets[name].includes(wanted) || wanted === undefined ? facets[name] : [...facets[name], wanted];
    for (const value of values) if (value !== "" && !known.has(value)) select.append(make("option", { value, text: value }));
    select.parentElement.hidden = select.options.length <= (name === "failed" ? 1 : 2) && wanted === undefined;
    select.value = wanted ?? "";
  }
}

// A range of what no response has is left out.
export function offerRange(name, isRecorded) {
  fields[`min_${name}`].parentElement.hidden = !isRecorded && !filters()[`min_${name}`] && !filters()[`max_${name}`];
}

export function showFilters() {
  const set = filters();
  for (const [name, field] of Object.entries(fields)) if (document.activeElement !== field) field.value = set[name] ?? "";
  const search = byId("search");
  if (document.activeElement !== search) search.value = set.text ?? "";
  const chips = Object.entries(set).filter(([name]) => name !== "sort").map(([name, value]) =>
    button(`${describe(name, value)} ✕`, "remove this filter", (event) => {
      event.preventDefault();
      if (name === "text") search.value = "";
      filterBy({ [name]: null });
    }, "chip"));
  if (chips.length > 1) chips.push(button("clear all", "", (event) => {
    event.preventDefault();
    search.value = "";
    filterBy(Object.fromEntries(FILTERS.map((name) => [name, null])));
  }, "chip"));
  byId("chips").replaceChildren(...chips);
}

function describe(name, value) {
  const [side, of] = name.split("_");
  if (of) return `${RANGES[of]} ${side === "min" ? "≥" : "≤"} ${+Number(value).toPrecision(6)}`;
  return name === "text" ? `“${value}”` : `${CHOICES[name]}: ${value}`;
}
