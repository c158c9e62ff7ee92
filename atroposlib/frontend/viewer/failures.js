// Failed tries with their tracebacks, newest first.

import { button, byId, make, modelText, short } from "./dom.js";
import { go, shown } from "./address.js";
import { ask } from "./server.js";

export async function loadFailures() {
  const found = await ask("/api/failures", { kind: shown().kind });
  const kinds = Object.entries(found.counts);
  const all = kinds.reduce((sum, [, count]) => sum + count, 0);
  byId("list-head").replaceChildren(make("span", { text: all ? `${short(all)} failed tries` : "no failure is recorded" }));
  byId("pages").replaceChildren();
  byId("list").replaceChildren(...(all ? [["", all], ...kinds] : []).map(([kind, count]) =>
    make("li", {}, button(`${kind || "all"}  ${short(count)}`, "", () => go({ kind }), (shown().kind ?? "") === kind ? "chosen" : ""))));
  byId("detail-pane").replaceChildren(...found.failures.map(failure));
  if (!all) byId("detail-pane").replaceChildren(make("p", { className: "quiet", text: "Failures lie in failures.jsonl next to the rollouts; there is none." }));
}

function failure(each) {
  const at = typeof each.at === "number" ? new Date(each.at * 1000).toISOString().slice(0, 19).replace("T", " ") : "";
  return make("details", { className: "failure" },
    make("summary", {}, make("span", { className: "tag warn", text: String(each.class ?? "environment") }),
      make("span", { text: ` item ${each.item_key ?? "–"}${each.task ? `, ${each.task}` : ""}, try ${each.try ?? "–"} ${at} ` }), make("b", { text: String(each.error ?? "").slice(0, 300) })),
    modelText(String(each.traceback ?? each.error ?? "")));
}
