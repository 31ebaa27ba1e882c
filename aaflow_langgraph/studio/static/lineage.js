// The graph of handles. Wide windows: a tidy tree from left to right; narrow ones: an indented list of the same nodes.

import { hierarchy, tree } from "./vendor/d3-hierarchy.min.mjs";
import { at, h, show, svg } from "./dom.js";
import { clean, count, labelOf, named, seconds } from "./format.js";
import { empty, sign } from "./parts.js";

const WIDTH = 178, HEIGHT = 44, GAP_X = 56, GAP_Y = 12, INDENT = 18;
const ROOT = "";

/** Draw what the server chose. `act`: pick(kv_id), more(parent), picked, second. */
export function drawLineage(told, act) {
  let { zoom } = act;
  const place = at("graph");
  at("lineage-note").textContent = told.num_handles
    ? `${count(told.nodes.length)} of ${count(told.num_handles)} handles; choose one to see its recipe, a second one to compare`
    : "";
  if (!told.nodes.length) {
    show(place, empty(" No handle yet. Run a node that reads or generates, and it appears here."));
    place.firstElementChild.classList.add("pad");
    return;
  }
  const narrow = place.clientWidth < 620;
  const root = hierarchy(asTree(told));
  const width = narrow ? Math.max(150, Math.min(WIDTH, place.clientWidth - 40)) : WIDTH;
  if (narrow) {
    let row = 0;
    root.eachBefore((node) => { node.left = Math.max(0, node.depth - 1) * INDENT; node.top = node.data.id === ROOT ? 0 : row++ * (HEIGHT + GAP_Y); });
  } else {
    tree().nodeSize([HEIGHT + GAP_Y, width + GAP_X]).separation((a, b) => (a.parent === b.parent ? 1 : 1.2))(root);
    root.each((node) => { node.left = (node.depth - 1) * (width + GAP_X); node.top = node.x; });
  }
  const nodes = root.descendants().filter((node) => node.data.id !== ROOT);
  const top = Math.min(...nodes.map((node) => node.top));
  for (const node of nodes) { node.left += 12; node.top += 12 - top; }
  const size = { width: Math.max(...nodes.map((node) => node.left)) + width + 40, height: Math.max(...nodes.map((node) => node.top)) + HEIGHT + 14 };
  const byId = new Map(nodes.map((node) => [node.data.id, node]));
  if (zoom === null) zoom = Math.min(1, Math.max(0.72, (place.clientWidth - 4) / size.width));
  const scale = narrow ? 1 : zoom;
  const picture = svg("svg", {
    width: Math.ceil(size.width * scale), height: Math.ceil(size.height * scale), viewBox: `0 0 ${size.width} ${size.height}`,
    role: "group", "aria-label": `Lineage of ${told.nodes.length} handles. Arrow keys go along the edges, Enter shows one.`,
  });
  for (const node of nodes) if (node.parent.data.id !== ROOT) picture.append(edge(node.parent, node, node.data.bond ?? "extends", node.data, width, narrow));
  for (const link of told.links) {
    if (!link.is_drawn && byId.has(link.parent) && byId.has(link.child)) picture.append(edge(byId.get(link.parent), byId.get(link.child), link.bond, {}, width, narrow));
  }
  const focusable = nodes.find((node) => node.data.id === act.picked) ?? nodes[0];
  for (const node of nodes) picture.append(box(node, width, act, node === focusable));
  picture.addEventListener("keydown", (event) => walk(event, byId, picture));
  const { scrollLeft, scrollTop } = place;
  show(place, picture);
  place.scrollTo(scrollLeft, scrollTop);
  act.zoomed(zoom);
}

/** Bring a handle into view, if it is drawn. */
export function reveal(kv_id) {
  const found = [...at("graph").querySelectorAll(".node")].find((one) => one.dataset.key === kv_id);
  found?.scrollIntoView({ block: "nearest", inline: "nearest" });
}

function asTree(told) {
  const items = new Map([[ROOT, { id: ROOT, children: [] }]]);
  for (const node of told.nodes) items.set(node.kv_id, { id: node.kv_id, node, children: [] });
  const bonds = new Map(told.links.filter((link) => link.is_drawn).map((link) => [link.child, link.bond]));
  for (const node of told.nodes) {
    const item = items.get(node.kv_id);
    item.bond = bonds.get(node.kv_id);
    (node.kv_id === told.top ? items.get(ROOT) : (items.get(node.above) ?? items.get(ROOT))).children.push(item);
  }
  for (const { parent, num_hidden } of told.hidden) {
    (items.get(parent ?? ROOT) ?? items.get(ROOT)).children.push({ id: `more-${parent ?? ""}`, parent, num_hidden, children: [] });
  }
  return items.get(ROOT);
}

function edge(from, to, bond, item, width, narrow) {
  const loose = item.num_hidden !== undefined ? "loose" : "";
  const path = narrow
    ? `M${from.left + 9} ${from.top + HEIGHT}V${to.top + HEIGHT / 2}H${to.left}`
    : curve(from.left + width, from.top + HEIGHT / 2, to.left, to.top + HEIGHT / 2);
  return svg("path", { class: `link ${bond} ${loose}`, d: path });
}

function curve(x0, y0, x1, y1) {
  const middle = (x0 + x1) / 2;
  return `M${x0} ${y0}C${middle} ${y0} ${middle} ${y1} ${x1} ${y1}`;
}

function box(node, width, act, focusable) {
  const { id, node: one, num_hidden, parent } = node.data;
  const common = { "data-key": id, tabindex: focusable ? "0" : "-1", role: "button", transform: `translate(${node.left} ${node.top})` };
  if (num_hidden !== undefined) {
    const words = `${count(num_hidden)} more`;
    return svg("g", { ...common, class: "node hidden", "aria-label": `${words} handles below; Enter shows them`, onclick: () => act.more(parent), onkeydown: (event) => press(event, () => act.more(parent)) },
      svg("rect", { class: "box", width: 104, height: 28, y: 8, rx: 8 }),
      svg("text", { x: 14, y: 26 }, `+ ${words}`));
  }
  const where = ["pool", "peer", "disk"].find((name) => one.where[name] > 0) ?? "gone";
  const cold = where === "gone" ? "cold" : "";
  const state = id === act.picked ? "picked" : id === act.second ? "second" : "";
  const tokens = `${count(one.num_tokens)} tokens`;
  const letters = Math.floor((width - 56) / 7.1);
  const label = `${named(one)}, ${one.operator}${one.is_exact === false ? ", approximate" : ""}, ${tokens}${one.num_children > 1 ? `, forked ${one.num_children} times` : ""}${one.num_missed ? `, ${count(one.num_missed)} could have been reused` : ""}`;
  return svg("g", { ...common, class: `node ${state} ${cold} ${one.is_exact === false ? "loose" : ""}`, "aria-label": label, "aria-pressed": id === act.picked, onclick: () => act.pick(id), onkeydown: (event) => press(event, () => act.pick(id)) },
    svg("title", {}, `${label}\n${id}`),
    svg("rect", { class: "box", width, height: HEIGHT, rx: 8 }),
    svg("text", { class: "more", x: 10, y: 17, "aria-hidden": "true" }, sign(one.operator)),
    svg("text", { class: "name", x: 24, y: 17 }, clean(labelOf(one) || one.operator, letters)),
    svg("text", { class: "more", x: 10, y: 32 }, `${count(one.num_tokens)} tok${one.num_added < one.num_tokens ? `  +${count(one.num_added)}` : ""}${one.ttft_s === null ? "" : `  ${seconds(one.ttft_s)}`}`),
    svg("circle", { class: where, cx: width - 13, cy: 14, r: 4.5 }),
    one.is_exact === false ? svg("text", { class: "more", x: width - 32, y: 18 }, "≈") : null,
    shares(one, width),
    one.num_children > 1 ? svg("g", { class: "fork", transform: `translate(${width - 50} ${HEIGHT - 22})` },
      svg("rect", { width: 44, height: 15, rx: 7.5 }), svg("text", { x: 22, y: 11, "text-anchor": "middle" }, `fork ${one.num_children > 99 ? "99+" : one.num_children}`)) : null);
}

/** Reused, could have been reused, prefilled, decoded: a thin line along the bottom. */
function shares(one, width) {
  if (one.num_reused === null) return null;
  const missed = Math.min(one.num_missed, one.num_prefilled);
  const parts = [["reused", one.num_reused], ["missed", missed], ["prefilled", one.num_prefilled - missed], ["decoded", one.num_decoded]];
  const all = parts.reduce((sum, [, number]) => sum + number, 0) || 1;
  let left = 10;
  return parts.filter(([, number]) => number > 0).map(([kind, number]) => {
    const long = Math.max(1.5, ((width - 34) * number) / all);
    const line = svg("rect", { class: kind, x: left, y: HEIGHT - 6, width: long, height: 3, rx: 1 });
    left += long;
    return line;
  });
}

function press(event, action) {
  if (event.key === "Enter" || event.key === " ") { event.preventDefault(); action(); }
}

function walk(event, byId, picture) {
  const node = byId.get(event.target.dataset?.key);
  if (!node) return;
  const siblings = node.parent.children, place = siblings.indexOf(node);
  const level = [...byId.values()].filter((one) => one.depth === node.depth);
  const beside = (step) => siblings[place + step] ?? level[level.indexOf(node) + step];
  const to = { ArrowLeft: node.parent, ArrowRight: node.children?.[0], ArrowUp: beside(-1), ArrowDown: beside(1) }[event.key];
  if (!to || !byId.has(to.data.id)) return;
  event.preventDefault();
  const found = [...picture.querySelectorAll(".node")].find((one) => one.dataset.key === to.data.id);
  for (const one of picture.querySelectorAll('.node[tabindex="0"]')) one.setAttribute("tabindex", "-1");
  found.setAttribute("tabindex", "0");
  found.focus();
}

export function legend() {
  const key = (kind, words) => h("li", {}, h("span", { class: `key ${kind}`, "aria-hidden": "true" }), words);
  show(at("legend"), key("reused", "reused"), key("prefilled", "prefilled"), key("missed", "could have been reused"), key("decoded", "decoded"),
    h("li", {}, "■ materialize"), h("li", {}, "+ append"), h("li", {}, "✎ generate"), h("li", {}, "⊕ compose"), h("li", {}, "fork n: so many go on from it"), h("li", {}, "≈ dashed: approximate"),
    key("pool", "KV in this pool"), key("peer", "another process"), key("disk", "disk"), key("gone", "to be computed again"));
}
