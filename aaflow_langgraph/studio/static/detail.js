// The panel beside: one handle, two handles compared, or why a request missed.

import { at, h, show } from "./dom.js";
import { bytes, clean, clock, count, named, percent, seconds, short, tokens } from "./format.js";
import { bar, chip, empty, facts, sign, tokensBar, whereBar } from "./parts.js";

/** The panel; in a narrow window it makes room while the other handle is being chosen. */
function place(comparing = false) {
  at("detail").classList.toggle("comparing", comparing);
  return at("detail");
}

const title = (words, act, ...under) => h("header", {},
  h("div", {}, h("h2", {}, words), under),
  h("button", { type: "button", class: "close", "aria-label": "Close details", "data-key": "close", onclick: act.close }, "×"));

export function idle() {
  place().classList.add("idle");
  show(place());
}

export function problem(words, act) {
  place().classList.remove("idle");
  show(place(), title("Not known here", act), h("p", {}, words));
}

export function drawHandle(one, act) {
  place().classList.remove("idle");
  const all = one.num_tokens || 1;
  show(place(act.comparing), title(h("bdi", {}, named(one)), act, badges(one)),
    h("p", { class: "id" }, h("code", {}, one.kv_id)),
    h("div", { class: "buttons" },
      h("button", { type: "button", "data-key": "compare", "aria-pressed": String(act.comparing), onclick: () => act.compare(one.kv_id) }, act.comparing ? "now choose the other one" : "Compare with…"),
      h("button", { type: "button", "data-key": "below", onclick: () => act.focus(one.kv_id) }, "Draw from here")),
    one.report ? report(one.report) : null,
    h("h3", {}, "Where its KV is"),
    bar([["pool", one.where.pool, "in this pool"], ["peer", one.where.peer, "in another process"], ["disk", one.where.disk, "on disk"], ["gone", one.where.gone, "to be computed again"]], all, "KV"),
    facts([
      ["tokens", `${count(one.num_tokens)}${one.num_added < one.num_tokens ? `, ${count(one.num_added)} added` : ""}`],
      ["not computed yet", count(one.num_pending)],
      one.where.pool ? ["in this pool", count(one.where.pool)] : null,
      one.where.peer ? ["in another process", count(one.where.peer)] : null,
      one.where.disk ? ["on disk only", count(one.where.disk)] : null,
      one.where.gone ? ["to be computed again", h("span", { class: "bad" }, count(one.where.gone))] : null,
      ["only for itself", bytes(one.private_bytes)],
      ["shared with others", bytes(one.shared_bytes)],
      ["handles from it", count(one.num_children)],
      ["requests on it", count(one.num_uses)],
    ]),
    h("h3", {}, "Made from"),
    one.path.length < 2 ? empty("Nothing: it begins with its own first token.") : h("ol", { class: "path" }, one.path.map((part) => h("li", {}, part.kv_id === one.kv_id ? h("b", {}, h("bdi", {}, named(part))) : chip(part, act.pick, "p")))),
    requests("Made by", one.made_by, act, "Nobody in this process: it was read from elsewhere, or its request is forgotten."),
    one.used_by.length ? requests("Used by", one.used_by, act) : null,
    recipe(one));
}

function badges(one) {
  return h("div", {},
    h("span", { class: "badge" }, sign(one.operator), " ", one.operator),
    one.is_exact === false ? h("span", { class: "badge strong" }, "≈ approximate") : h("span", { class: "badge" }, "exact"),
    one.node ? h("span", { class: "badge" }, "node ", h("bdi", {}, clean(one.node, 30))) : null,
    one.thread ? h("span", { class: "badge" }, "thread ", h("bdi", {}, clean(one.thread, 24))) : null);
}

function requests(heading, list, act, nothing = "") {
  return [h("h3", {}, heading), list.length ? [...list].reverse().map((one) => h("div", { class: "request" },
    h("span", {}, h("b", {}, h("bdi", {}, clean(one.node || one.operator, 32))), h("span", { class: "dim" }, ` ${clock(one.at_s)}, first token ${seconds(one.ttft_s)}, ${count(one.num_reused)} of ${count(one.num_context)} reused`)),
    one.num_prefilled > 0 ? h("button", { type: "button", class: "plain", "data-key": `w-${one.number}`, onclick: () => act.why(one) }, "why?") : h("span"),
    tokensBar(one))) : empty(nothing)];
}

function recipe(one) {
  return [h("h3", {}, "Recipe"), one.turns.map((turn) => h("div", { class: `turn ${turn.is_own ? "own" : ""}` },
    h("span", { class: "badge" }, turn.role ? clean(turn.role, 20) : "text"),
    h("span", { class: "dim" }, `tokens ${count(turn.start)}–${count(turn.stop)}${turn.is_open ? ", open" : ""}`),
    turn.text === undefined ? null : h("pre", { dir: "auto", tabindex: "0" }, turn.text, turn.is_cut ? `\n\n[… cut …]\n\n${turn.text_end}` : ""))),
  one.turns.length && one.turns[0].text === undefined ? h("p", { class: "note" }, "Text is not shown here.") : null];
}

function report(told) {
  const predicted = Object.entries(told.predicted_s ?? {});
  const most = Math.max(told.seconds, ...predicted.map(([, time]) => time), 1e-9);
  return [h("h3", {}, "Compose report"), facts([
    ["asked for", told.requested], ["done by", told.rung],
    ["tokens", count(told.num_tokens)], ["reused", count(told.num_reused)],
    ["recomputed", count(told.num_recomputed)], ["checked", count(told.num_checked)],
    ["deviation, most", told.deviation_max === null ? "–" : told.deviation_max.toPrecision(3)], ["deviation, mean", told.deviation_mean === null ? "–" : told.deviation_mean.toPrecision(3)],
    ["gate", told.gate], ["exact", told.exact ? "yes" : "no"],
  ]),
  h("p", { class: "note" }, "Predicted against actual"),
  predicted.map(([rung, time]) => h("div", { class: "request" }, h("span", {}, rung, " predicted"), h("span", {}, seconds(time)), bar([["disk", Math.round(1e6 * time), "µs"]], 1e6 * most))),
  h("div", { class: "request" }, h("b", {}, told.rung, " took"), h("span", {}, seconds(told.seconds)), bar([["reused", Math.round(1e6 * told.seconds), "µs"]], 1e6 * most))];
}

export function drawDiff(told, act) {
  place().classList.remove("idle");
  const [a, b] = told.sides;
  const side = (kind, letter, one) => h("div", { class: `said ${kind}` },
    h("b", {}, `${letter}  `, h("bdi", {}, named(one))), h("span", { class: "dim" }, `  ${tokens(one.num_tokens)}${one.turn ? `, in a turn of ${clean(one.turn, 20)}` : ""}`),
    one.after.text === undefined ? null : h("pre", { dir: "auto" }, one.num_tokens > told.num_shared ? h("ins", {}, one.after.text) : "ends here"),
    one.after.token_ids?.length ? h("p", { class: "note" }, "ids ", h("code", {}, one.after.token_ids.slice(0, 8).join(" "))) : null);
  show(place(), title("Two handles compared", act),
    h("p", {}, told.is_equal ? "They are equal, token by token." : [h("b", {}, tokens(told.num_shared)), " in common: ", percent(told.num_shared, a.num_tokens), " of A, ", percent(told.num_shared, b.num_tokens), " of B."]),
    h("h3", {}, "A"), chip(a, act.pick, "a"), bar([["reused", told.num_shared, "in common"], ["prefilled", a.num_tokens - told.num_shared, "of its own"]], Math.max(a.num_tokens, b.num_tokens), "A"),
    h("h3", {}, "B"), chip(b, act.pick, "b"), bar([["reused", told.num_shared, "in common"], ["decoded", b.num_tokens - told.num_shared, "of its own"]], Math.max(a.num_tokens, b.num_tokens), "B"),
    told.is_equal ? null : [h("h3", {}, `At token ${count(told.num_shared)}`),
      told.before.text === undefined ? h("p", { class: "note" }, "Text is not shown here.") : h("div", { class: "said" }, h("span", { class: "dim" }, told.before.is_special ? "both have special tokens only" : "both say"), h("pre", { dir: "auto" }, told.before.text || (told.num_shared ? "tokens that have no text" : "nothing: they differ from the first token on"))),
      side("a", "A", a), side("b", "B", b)]);
}

export function drawMiss(told, request, act) {
  place().classList.remove("idle");
  const where = told.difference;
  show(place(), title(`Why request ${count(request.number)} prefilled`, act),
    h("div", {}, h("span", { class: told.cause === "none" ? "badge" : "badge strong" }, told.cause_words ?? told.cause), told.node ? h("span", { class: "badge" }, told.source ? [h("bdi", {}, clean(told.source, 24)), " → "] : "", h("bdi", {}, clean(told.node, 24))) : null),
    h("p", {}, told.why), told.mend ? h("p", {}, h("b", {}, "What to do: "), told.mend) : null,
    h("h3", {}, "Tokens"), tokensBar(request),
    facts([["prompt", count(told.num_context)], ["reused", count(told.num_reused)], ["reusable", count(told.num_reusable)], ["lost", h("span", { class: told.num_lost ? "bad" : "" }, count(told.num_lost))]]),
    where ? [h("h3", {}, `It differs at token ${count(where.position)}${where.role ? `, in the ${clean(where.role, 20)} turn` : ""}`),
      where.before === undefined ? h("p", { class: "note" }, "Text is not shown here.") : [
        h("div", { class: "said" }, h("span", { class: "dim" }, "both say"), h("pre", { dir: "auto" }, where.before)),
        h("div", { class: "said a" }, h("span", { class: "dim" }, "this prompt goes on"), h("pre", { dir: "auto" }, h("ins", {}, where.asked || "not at all"))),
        h("div", { class: "said b" }, h("span", { class: "dim" }, "what was known", where.known_node ? `, from ${clean(where.known_node, 24)}` : ""), h("pre", { dir: "auto" }, h("ins", {}, where.known || "not at all")))]] : null,
    h("div", { class: "buttons" }, h("button", { type: "button", "data-key": "made", onclick: () => act.pick(request.kv_id) }, "The handle it made"),
      where?.known_kv_id ? h("button", { type: "button", "data-key": "pair", onclick: () => act.diff(request.kv_id, where.known_kv_id) }, "Compare them") : null));
}
