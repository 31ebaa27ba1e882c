// The checkpoints of a thread from left to right; where no saver is known, its requests.

import { at, h, show } from "./dom.js";
import { bytes, clean, clock, count, remember, seconds } from "./format.js";
import { chip, empty, tokensBar } from "./parts.js";

const TENSORS = { disk: "on disk", part: "partly on disk", recipe: "recipe only", none: "no recipe" };

export function drawCheckpoints(told, pick) {
  at("timeline-note").textContent = `${count(told.num_found)} checkpoints with KV${told.num_found > told.checkpoints.length ? `, the last ${told.checkpoints.length}` : ""}`;
  const steps = [...told.checkpoints].reverse();
  const before = new Map(steps.map((one, place) => [one.checkpoint_id, place]));
  draw(steps.map((one, place) => {
    const forked = one.parent_id && before.has(one.parent_id) && steps.slice(before.get(one.parent_id) + 1, place).some((other) => other.parent_id === one.parent_id);
    const quiet = !one.handles.length && !one.pending.length;
    const inside = one.checkpoint_ns.split("|").filter(Boolean).map((part) => part.split(":")[0]).join("/");
    const from = forked ? steps[before.get(one.parent_id)] : null;
    const who = one.nodes.join(", ") || one.source || "checkpoint";
    return h("li", { class: forked || one.source === "fork" ? "fork" : quiet ? "quiet" : "" }, h("div", { class: "step", title: one.checkpoint_id },
      h("b", {}, h("bdi", {}, clean(inside ? `${inside}/${who}` : who, 40))),
      h("span", {}, `step ${one.step ?? "?"}`, from ? `, from step ${from.step}` : ""),
      one.handles.map((handle) => entry(handle, pick, "")),
      one.pending.map((handle) => entry(handle, pick, "pending ")),
      quiet ? null : h("span", {}, `${bytes(one.private_bytes)} own, ${bytes(one.shared_bytes)} shared`)));
  }));
}

function entry(handle, pick, before) {
  remember(handle.kv_id, handle.label || handle.place);
  return [
    chip({ kv_id: handle.kv_id, label: handle.label || handle.place, operator: "" }, pick),
    h("span", {}, `${before}${count(handle.num_tokens)} tok, ${TENSORS[handle.tier]}`),
  ];
}

export function drawRequests(told, pick) {
  at("timeline-note").textContent = told.num_found ? `the last ${told.requests.length} of ${count(told.num_found)} requests` : "";
  draw([...told.requests].reverse().map((one) => h("li", { class: one.num_missed >= 16 ? "miss" : "" }, h("div", { class: "step" },
    h("b", {}, h("bdi", {}, clean(one.node || one.operator, 40))),
    h("span", {}, `${clock(one.at_s)}  ${seconds(one.ttft_s)}`),
    chip(one, pick),
    tokensBar(one),
    h("span", {}, `${count(one.num_reused)} of ${count(one.num_context)} reused`)))));
}

export function noTimeline(...words) {
  at("timeline-note").textContent = "";
  show(at("timeline"), h("li", { class: "quiet" }, empty(words)));
}

function draw(steps) {
  const place = at("timeline");
  if (!steps.length) {
    noTimeline("Nothing yet.");
    return;
  }
  const atEnd = place.scrollLeft + place.clientWidth > place.scrollWidth - 30;
  show(place, steps);
  if (atEnd) place.scrollLeft = place.scrollWidth;
}
