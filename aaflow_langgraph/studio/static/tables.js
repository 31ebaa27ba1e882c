// The tabs below "Where tokens went".

import { at, h, show } from "./dom.js";
import { bytes, clean, clock, count, percent, seconds, short } from "./format.js";
import { chip, empty, pager, table, tokensBar, whereBar } from "./parts.js";

/** Fewer tokens than this are run at every seam: templates begin alike. */
const NOTABLE = 16;

const name = (text, instead = "–") => (text ? h("bdi", {}, clean(text, 40)) : h("span", { class: "dim" }, instead));
const missed = (number) => (number >= NOTABLE ? h("span", { class: "bad" }, count(number)) : h("span", { class: "dim" }, count(number)));

const sums = [
  { name: "requests", number: true, cell: (one) => count(one.num_requests) },
  { name: "tokens", cell: tokensBar },
  { name: "reused", number: true, hint: "of the prompt tokens", cell: (one) => percent(one.num_reused, one.num_context) },
  { name: "of reusable", number: true, hint: "reused, of what had been computed before", cell: (one) => percent(Math.min(one.num_reused, one.num_reusable), one.num_reusable) },
  { name: "prefilled", number: true, cell: (one) => count(one.num_prefilled) },
  { name: "could have been reused", number: true, hint: "prefilled, though another known prompt begins with the same tokens", cell: (one) => missed(one.num_missed) },
  { name: "decoded", number: true, cell: (one) => count(one.num_decoded) },
  { name: "TTFT p50", number: true, cell: (one) => seconds(one.ttft_p50_s) },
  { name: "p95", number: true, cell: (one) => seconds(one.ttft_p95_s) },
];

function profile(told) {
  if (!told.nodes.length) return empty("No request is known here.");
  return [
    table([{ name: "node", cell: (one) => name(one.node, `${one.operator} (no node)`) }, ...sums], told.nodes, "Sums by node"),
    told.edges.length ? h("h3", {}, "Edges that handles were passed along") : null,
    told.edges.length ? table([{ name: "edge", cell: (one) => h("span", {}, name(one.source, "unknown"), " → ", name(one.target)) }, ...sums], told.edges, "Sums by edge") : null,
  ];
}

const requestColumns = (act) => [
  { name: "#", number: true, cell: (one) => count(one.number) },
  { name: "time", cell: (one) => clock(one.at_s) },
  { name: "node", cell: (one) => name(one.node, one.operator) },
  { name: "handle", cell: (one) => chip(one, act.pick, `r${one.number}`) },
  { name: "tokens", cell: tokensBar },
  { name: "reused", number: true, cell: (one) => `${count(one.num_reused)} / ${count(one.num_context)}` },
  { name: "could have been reused", number: true, cell: (one) => missed(one.num_missed) },
  { name: "TTFT", number: true, cell: (one) => seconds(one.ttft_s) },
  { name: "total", number: true, cell: (one) => seconds(one.total_s) },
  { name: "", cell: (one) => (one.num_prefilled > 0 ? h("button", { type: "button", class: "plain", "data-key": `why-${one.number}`, "aria-label": `Why request ${one.number} prefilled`, onclick: () => act.why(one) }, "why?") : null) },
];

const handleColumns = (act) => [
  { name: "handle", cell: (one) => chip(one, act.pick, "h") },
  { name: "node", cell: (one) => name(one.node, one.operator) },
  { name: "thread", cell: (one) => name(one.thread) },
  { name: "tokens", number: true, cell: (one) => count(one.num_tokens) },
  { name: "added", number: true, cell: (one) => count(one.num_added) },
  { name: "KV", cell: (one) => whereBar(one.where) },
  { name: "private", number: true, cell: (one) => bytes(one.private_bytes) },
  { name: "shared", number: true, cell: (one) => bytes(one.shared_bytes) },
  { name: "forks", number: true, cell: (one) => count(one.num_children) },
];

const rejectedColumns = [
  { name: "state key", cell: (one) => name(one.key) },
  { name: "what is wrong with the value", cell: (one) => clean(one.reason, 200) },
  { name: "kept", cell: (one) => (one.kept ? h("code", {}, one.kept) : h("span", { class: "dim" }, "nothing was there")) },
  { name: "times", number: true, cell: (one) => count(one.count) },
];

const MOVES = { evict: "evicted", spill: "spilled to disk", fetch: "fetched from disk", adopt: "adopted from a process that is gone" };

const movementColumns = (act) => [
  { name: "time", cell: (one) => clock(one.at_s) },
  { name: "what", cell: (one) => h("span", { class: one.move === "evict" ? "bad" : "" }, MOVES[one.move]) },
  { name: "tokens", cell: (one) => `${count(one.start)}–${count(one.stop)}` },
  { name: "of", cell: (one) => (one.kv_id ? chip({ kv_id: one.kv_id, label: one.label, operator: "" }, act.pick, `m${one.number}`) : h("code", { class: "dim" }, short(one.end_id))) },
  { name: "made by", cell: (one) => name(one.made_by) },
  { name: "for", cell: (one) => name(one.node, one.thread ? "a request" : "nobody named") },
  { name: "bytes", number: true, cell: (one) => bytes(one.num_bytes) },
];

export const TABS = {
  nodes: { title: "Nodes and edges", asks: "profile", draw: (told) => profile(told) },
  requests: { title: "Requests", asks: "requests", paged: true, draw: (told, act) => listed(told, told.requests, requestColumns(act), act, "No request yet.") },
  misses: { title: "Misses", asks: "requests", paged: true, options: { missed: 1 }, draw: (told, act) => listed(told, told.requests, requestColumns(act), act, "All that could have been reused was.") },
  handles: { title: "Handles", asks: "handles", paged: true, searches: true, draw: (told, act) => listed(told, told.handles, handleColumns(act), act, "No handle is found.") },
  movements: { title: "Evictions and transfers", asks: "movements", paged: true, draw: (told, act) => listed(told, told.movements, movementColumns(act), act, "Nothing left the pool and nothing was fetched.") },
  rejected: { title: "Rejected edits", asks: "rejected", draw: (told) => (told.rejected.length ? table(rejectedColumns, told.rejected, "Newest first") : empty("Every value that was written to a key for handles was taken.")) },
};

function listed(told, rows, columns, act, nothing) {
  if (!rows.length && told.offset === 0) return empty(nothing);
  return [table(columns, rows, "Newest first"), pager(told, rows.length, act.go)];
}

export function drawTabs(picked, choose) {
  const names = Object.keys(TABS);
  show(at("tabs"), names.map((key) => h("button", {
    type: "button", role: "tab", id: `tab-${key}`, "data-key": key, "aria-selected": String(key === picked), "aria-controls": "panel", tabindex: key === picked ? "0" : "-1",
    onclick: () => choose(key),
    onkeydown: (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const to = names[(names.indexOf(key) + step + names.length) % names.length];
      choose(to);
      document.getElementById(`tab-${to}`).focus();
    },
  }, TABS[key].title)));
  at("panel").setAttribute("aria-labelledby", `tab-${picked}`);
}
