// What the filters leave, as bars; a click on one filters by it.

import { byId, make, short, svg } from "./dom.js";
import { filterBy, filters } from "./address.js";
import { offerRange } from "./filters.js";
import { ask } from "./server.js";

const WIDTH = 260, HEIGHT = 96, BASE = 78, LEFT = 4, NAMED = 5; // so few bars have a label each
const TASKS = 40; // shown
const AGAIN_MS = 600, RAREST_MS = 5000; // while a search or the gaps are still read
let asked = 0;

export async function loadNumbers(again = AGAIN_MS) {
  if (!byId("filter-panel").open) return;
  const mine = ++asked;
  const found = await ask("/api/numbers", filters());
  if (mine !== asked) return;
  offerRange("gap", found.gap);
  byId("numbers").replaceChildren(
    histogram("score", found.score, "score"),
    histogram("completion tokens", found.tokens, "tokens"),
    found.gap ? histogram("engine-trainer gap", found.gap, "gap", found.unread) : "",
    tasks(found.tasks),
  );
  if (found.unread) setTimeout(() => mine === asked && loadNumbers(Math.min(2 * again, RAREST_MS)).catch(() => {}), again);
}

function histogram(title, { places, bars }, name, unread = 0) {
  const most = Math.max(1, ...bars.map((bar) => bar.count));
  const width = (WIDTH - 2 * LEFT) / Math.max(places, 1);
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": title });
  for (const bar of bars) {
    const left = LEFT + bar.place * width, thick = Math.min(width * 0.9, 60);
    const height = Math.max(1.5, (bar.count / most) * (BASE - 14));
    const range = bar.from === bar.to ? short(bar.from) : `${short(bar.from)} to ${short(bar.to)}`;
    const area = svg("g", { class: "bar", tabindex: "0", role: "button", "aria-label": `${title} ${range}: ${bar.count} responses` },
      svg("rect", { x: left, y: 12, width, height: BASE - 12, class: "hit" }),
      svg("rect", { x: left + (width - thick) / 2, y: BASE - height, width: thick, height, rx: 1 }),
      svg("title"));
    area.lastChild.textContent = `${range}: ${short(bar.count)} responses`;
    const choose = () => filterBy({ [`min_${name}`]: String(bar.from), [`max_${name}`]: String(bar.to) });
    area.addEventListener("click", choose);
    area.addEventListener("keydown", (event) => event.key === "Enter" && choose());
    picture.append(area);
    if (places <= NAMED) picture.append(label(left + width / 2, HEIGHT - 4, short(bar.from), "middle"));
  }
  if (bars.length) {
    if (places > NAMED) picture.append(label(LEFT, HEIGHT - 4, short(bars[0].from), "start"));
    if (places > NAMED) picture.append(label(WIDTH - LEFT, HEIGHT - 4, short(bars.at(-1).to), "end"));
    picture.append(label(WIDTH - LEFT, 9, `most ${short(most)}`, "end"));
  } else picture.append(label(WIDTH / 2, HEIGHT / 2, "no values", "middle"));
  return make("figure", {}, make("figcaption", { text: unread ? `${title}, ${short(unread)} groups to go` : title }), picture);
}

function label(x, y, text, anchor) {
  const made = svg("text", { x, y, "text-anchor": anchor });
  made.textContent = text;
  return made;
}

function tasks(rows) {
  const list = make("div", { className: "task-rates" });
  for (const { task, scored, accepted, unscored } of rows.slice(0, TASKS)) {
    const share = scored ? `${(100 * accepted) / scored}%` : "0";
    const said = `${short(accepted)} of ${short(scored)} above 0${unscored ? `, ${short(unscored)} without a score left out` : ""}`;
    const line = make("button", { type: "button", title: said, on: { click: () => filterBy({ task }) } },
      make("span", { className: "name", text: task || "(no task)" }), make("span", { className: "rate" }, make("span")),
      make("span", { className: "share", text: scored ? `${Math.round((100 * accepted) / scored)}%` : "–" }),
      make("span", { className: "counts", text: `${short(accepted)}/${short(scored)}${unscored ? ` +${short(unscored)} unscored` : ""}` }));
    line.querySelector(".rate span").style.width = share; // of the script's own, which the policy allows
    list.append(line);
  }
  if (rows.length > TASKS) list.append(make("p", { className: "quiet", text: `and ${short(rows.length - TASKS)} more tasks` }));
  return make("figure", {}, make("figcaption", { text: "pass rate by task (scores above 0 of all scored)" }), list);
}
