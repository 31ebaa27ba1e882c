// Small pieces that several sections use: bars, chips, tables, pages.

import { h } from "./dom.js";
import { bytes, clean, count, named, percent, seconds, short } from "./format.js";

/** A row of shares. Each part: [class, number, words]. */
export function bar(parts, all, label) {
  const shown = parts.filter(([, number]) => number > 0);
  const words = shown.map(([, number, name]) => `${count(number)} ${name}`).join(", ") || "nothing";
  return h("span", { class: "meter", role: "img", "aria-label": label ? `${label}: ${words}` : words, title: words },
    shown.map(([kind, number]) => h("span", { class: `fill ${kind}`, vars: { share: `${(100 * number) / Math.max(1, all)}%` } })));
}

export const tokensBar = (one) => bar([
  ["reused", one.num_reused, "reused"],
  ["missed", Math.min(one.num_missed ?? 0, one.num_prefilled), "could have been reused"],
  ["prefilled", Math.max(0, one.num_prefilled - (one.num_missed ?? 0)), "prefilled"],
  ["decoded", one.num_decoded, "decoded"],
], one.num_reused + one.num_prefilled + one.num_decoded, "tokens");

export const whereBar = (where) => bar([
  ["pool", where.pool, "in this pool"],
  ["peer", where.peer, "in another process"],
  ["disk", where.disk, "on disk"],
  ["gone", where.gone, "to be computed again"],
], where.pool + where.peer + where.disk + where.gone, "KV");

export const chip = (one, pick, extra = "") => h("button", {
  type: "button", class: `chip ${extra}`, "data-key": `chip-${extra}-${one.kv_id}`, title: one.kv_id, onclick: () => pick(one.kv_id),
}, h("span", { class: "kind", "aria-hidden": "true" }, sign(one.operator)), h("bdi", {}, named(one)), h("code", {}, short(one.kv_id)));

export const sign = (operator) => ({ materialize: "■", append: "+", generate: "✎", compose: "⊕" })[operator] ?? "·";

export function table(columns, rows, caption) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {},
      h("caption", { class: "unseen" }, caption),
      h("thead", {}, h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.number ? "number" : null, title: column.hint }, column.name)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, columns.map((column) => h("td", { class: column.number ? "number" : null, "data-name": column.name }, column.cell(row))))))));
}

export function pager(told, num_shown, go) {
  const last = told.offset + num_shown;
  if (told.num_found <= num_shown && told.offset === 0) return null;
  const limit = Math.max(num_shown, 1);
  return h("div", { class: "pager" },
    h("button", { type: "button", "data-key": "earlier", disabled: told.offset === 0, onclick: () => go(Math.max(0, told.offset - 50)) }, "‹ newer"),
    h("span", {}, `${count(told.offset + 1)}–${count(last)} of ${count(told.num_found)}`),
    h("button", { type: "button", "data-key": "later", disabled: last >= told.num_found, onclick: () => go(told.offset + limit) }, "older ›"));
}

export const facts = (pairs) => h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
export const empty = (...words) => h("p", { class: "empty" }, words);
export { bytes, clean, count, named, percent, seconds, short };
