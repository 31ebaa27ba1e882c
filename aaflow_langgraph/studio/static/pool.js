// How full the pool is: over the time this page is open (uPlot), and where in it.

import { at, h, show } from "./dom.js";
import { bytes, count } from "./format.js";
import { bar, empty, table } from "./parts.js";

const KEPT = 900;
const samples = { at: [], used: [], capacity: [] };
let plot = null, drawnFor = "";

export function notePool(pool) {
  if (!pool) return;
  samples.at.push(Date.now() / 1000);
  samples.used.push(pool.used_bytes);
  samples.capacity.push(pool.capacity_bytes);
  for (const list of Object.values(samples)) if (list.length > KEPT) list.shift();
  plot?.setData([samples.at, samples.used, samples.capacity]);
}

export function drawPool(overview, map) {
  const pool = overview.pool;
  if (overview.kind === "outside") {
    drawOwners(overview.pools);
    return;
  }
  if (!pool) {
    drawnFor = "";
    plot = null;
    show(at("pool"), empty("The broker is closed: its pool was given back."));
    at("pool-note").textContent = "";
    return;
  }
  at("pool-note").textContent = `${bytes(pool.used_bytes)} of ${bytes(pool.capacity_bytes)} taken, at most ${bytes(pool.peak_bytes)}`;
  if (drawnFor !== "plot") {
    drawnFor = "plot";
    show(at("pool"), h("figure", { class: "plot", id: "plot" }, h("figcaption", { id: "plot-words" })), h("div", { id: "cells" }));
    makePlot();
  }
  at("plot-words").textContent = "Bytes taken since this page was opened";
  const cells = map.taken.map((full, place) => h("i", { class: map.picked[place] > 0.01 ? "picked" : "", vars: { full: String(full) } }));
  show(at("cells"), h("div", { class: "cells", role: "img", "aria-label": `Map of the pool: ${bytes(pool.used_bytes)} of ${bytes(pool.capacity_bytes)} taken` }, cells),
    h("p", { class: "note" }, map.picked.some((full) => full > 0.01) ? "The pool from its first byte to its last; violet is what the chosen handle needs." : "The pool from its first byte to its last."));
}

function makePlot() {
  const place = at("plot"), style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(`--${name}`).trim();
  plot?.destroy();
  plot = new window.uPlot({
    width: place.clientWidth, height: 130, legend: { show: false }, cursor: { y: false, drag: { setScale: false } }, padding: [8, 6, 0, 0],
    scales: { x: { range: (_, low, high) => [Math.min(low, high - 60), high] }, y: { range: (_, low, high) => [0, Math.max(1, high * 1.05)] } },
    axes: [
      { stroke: colour("muted"), grid: { show: false }, ticks: { show: false }, space: 90, values: (_, ticks) => ticks.map((tick) => new Date(1000 * tick).toLocaleTimeString("en-GB")) },
      { stroke: colour("muted"), grid: { stroke: colour("line"), width: 1 }, ticks: { show: false }, size: 66, space: 34, values: (_, ticks) => ticks.map(bytes) },
    ],
    series: [{}, { stroke: colour("pool"), width: 2, fill: `${colour("pool")}26`, points: { show: false } }, { stroke: colour("muted"), width: 1, dash: [4, 4], points: { show: false } }],
  }, [samples.at, samples.used, samples.capacity], place);
}

matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (drawnFor === "plot" && at("plot")) makePlot(); });
new ResizeObserver(() => { if (plot && at("plot")) plot.setSize({ width: at("plot").clientWidth, height: 130 }); }).observe(at("pool"));

function drawOwners(pools) {
  drawnFor = "owners";
  at("pool-note").textContent = pools.length ? `${count(pools.length)} processes` : "";
  if (!pools.length) {
    show(at("pool"), empty("No process has a pool here now."));
    return;
  }
  show(at("pool"), table([
    { name: "process", cell: (one) => h("bdi", {}, `${one.pid ?? "?"} ${one.process ?? ""}`) },
    { name: "is", cell: (one) => h("span", { class: one.condition === "alive" ? "" : "bad" }, one.condition) },
    { name: "pool", cell: (one) => bar([["pool", one.used_bytes, "bytes taken"]], one.capacity_bytes || 1, "pool") },
    { name: "taken", number: true, cell: (one) => `${bytes(one.used_bytes)} of ${bytes(one.capacity_bytes)}` },
    { name: "extents", number: true, cell: (one) => count(one.num_extents) },
    { name: "model", cell: (one) => h("code", {}, one.namespace.slice(0, 12)) },
  ], pools, "Pools"));
}
