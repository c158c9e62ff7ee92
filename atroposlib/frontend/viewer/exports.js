// What is filtered, to take along: a policy for datasets, or the lines themselves.

import { button, byId, make } from "./dom.js";
import { filters } from "./address.js";
import { ask } from "./server.js";

export async function showExport() {
  const dialog = byId("dialog");
  const query = new URLSearchParams(filters());
  let policy;
  try {
    policy = make("div", {}, make("pre", { className: "text", text: await ask("/api/policy.yaml", filters()) }),
      make("a", { href: `/api/policy.yaml?${query}`, download: "policy.yaml", text: "policy.yaml" }));
  } catch (error) {
    policy = make("p", { className: "error", text: error.message });
  }
  dialog.replaceChildren(
    make("h2", { text: "Export what is filtered" }),
    make("h3", { text: "as a policy" }),
    make("p", {}, "for ", make("code", { text: "atropos sft ROLLOUTS --policy policy.yaml --output OUTPUT" }), " and every other dataset command:"), policy,
    make("h3", { text: "as rollout lines" }),
    make("p", { text: "Groups with the responses that the filters leave." }),
    make("a", { href: `/api/rollouts.jsonl?${query}`, download: "rollouts.jsonl", text: "rollouts.jsonl" }),
    make("p", {}, button("close", "Esc", () => dialog.close())));
  if (!dialog.open) dialog.showModal();
}
