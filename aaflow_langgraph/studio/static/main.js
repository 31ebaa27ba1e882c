// Ties the sections together: asks every second and a half how far things are, and draws anew what has changed.

import { ask, Gone, Refused } from "./api.js";
import { at, h, show } from "./dom.js";
import { bytes, clean, count, percent, plain, seconds } from "./format.js";
import { drawLineage, legend, reveal } from "./lineage.js";
import { drawCheckpoints, drawRequests, noTimeline } from "./timeline.js";
import { drawTabs, TABS } from "./tables.js";
import { drawPool, notePool } from "./pool.js";
import { drawDiff, drawHandle, drawMiss, idle, problem } from "./detail.js";
import { bar } from "./parts.js";

const EVERY_MS = 1500;
const view = { tab: "nodes", offset: 0, thread: "", find: "", focus: "", limit: 120, zoom: null, picked: "", second: "", comparing: false };
let chosen = false, drawnZoom = 1, overview = null, lineage = null, known = "", paused = false, busy = false, threads = [];

// ---------------------------------------------------------------- what is asked for

async function beat() {
  if (paused || document.hidden || busy) return;
  busy = true;
  try {
    await look();
  } finally {
    busy = false;
  }
}

async function look() {
  try {
    overview = await ask("overview");
    alarm("");
  } catch (error) {
    gone(error);
    return;
  }
  notePool(overview.pool);
  if (overview.kind === "outside" && !known && view.tab === "nodes") choose("handles");
  head();
  const now = [overview.state, overview.num_handles, overview.num_requests, overview.num_movements, overview.num_rejected, overview.stats?.num_extents, JSON.stringify(overview.pools ?? "")].join();
  if (now === known) {
    if (overview.pool) at("pool-note").textContent = `${bytes(overview.pool.used_bytes)} of ${bytes(overview.pool.capacity_bytes)} taken, at most ${bytes(overview.pool.peak_bytes)}`;
    return;
  }
  if (await redraw()) known = now;
}

/** Everything that depends on what happened; true when all of it could be drawn. */
async function redraw() {
  const done = await Promise.all([sums(), graph(), panel(), timeline(), pool()].map((part) => part.then(() => true, gone)));
  document.body.dataset.drawn = String(Number(document.body.dataset.drawn ?? 0) + 1);
  return done.every(Boolean);
}

const sum = (what, number, more, extra) => h("div", { class: "sum" }, h("span", { class: "what" }, what), h("b", {}, number), extra, h("span", { class: "more" }, more));

function outsideSums() {
  const { pools, files, num_handles } = overview;
  const used = pools.reduce((all, one) => all + one.used_bytes, 0), capacity = pools.reduce((all, one) => all + one.capacity_bytes, 0);
  show(at("sums"),
    sum("handles whose recipes are here", count(num_handles), "who asked for them, and what was reused, is counted in the processes that ask"),
    sum("processes", count(pools.length), `${count(pools.filter((one) => one.condition === "alive").length)} answer`),
    sum("in their pools", bytes(used), capacity ? `of ${bytes(capacity)}` : "", capacity ? bar([["pool", used, "bytes taken"]], capacity, "pools") : null),
    sum("on disk", bytes(files.num_bytes), `${count(files.num_extents)} extents`),
    sum("recipes on disk", count(files.num_recipes), ""));
}

/** An answer, or null when the same part was asked for again meanwhile: answers may come in another order. */
const turns = {};
async function newest(part, asking) {
  const mine = turns[part] = (turns[part] ?? 0) + 1;
  const told = await asking;
  return turns[part] === mine ? told : null;
}

async function sums() {
  if (overview.kind === "outside") {
    outsideSums();
    return;
  }
  const told = await newest("sums", ask("profile", { thread: view.thread }));
  if (!told) return;
  const all = told.total, stats = overview.stats, its = overview.pool;
  const used = (stats?.pool_used_bytes ?? 0), capacity = its?.capacity_bytes ?? 0;
  show(at("sums"),
    sum("prompt tokens served from KV", all ? percent(all.num_reused, all.num_context) : "–",
      all ? `${count(all.num_reused)} of ${count(all.num_context)}; ${percent(Math.min(all.num_reused, all.num_reusable), all.num_reusable)} of what was reusable` : "no request yet",
      all ? bar([["reused", all.num_reused, "reused"], ["missed", all.num_missed, "could have been reused"], ["prefilled", Math.max(0, all.num_prefilled - all.num_missed), "prefilled"], ["decoded", all.num_decoded, "decoded"]], all.num_context + all.num_decoded, "tokens") : null),
    sum("time to first token", all ? seconds(all.ttft_p50_s) : "–", all ? `median; 95 % within ${seconds(all.ttft_p95_s)}` : "no request yet"),
    sum("handles", count(overview.num_handles), `${count(overview.num_requests)} requests`),
    sum("pool", its ? percent(used, capacity) : "–", its ? `${bytes(used)} of ${bytes(capacity)}${its.disk_used_bytes ? `; disk ${bytes(its.disk_used_bytes)}` : ""}` : "", its ? bar([["pool", used, "bytes taken"]], capacity, "pool") : null),
    sum("evicted", stats ? count(stats.num_evictions) : "–", stats ? `${count(stats.num_fetches)} fetched, ${count(stats.num_spills)} spilled, ${count(stats.num_recomputed_tokens)} tokens recomputed` : ""));
}

async function graph() {
  const told = await newest("graph", ask("graph", { focus: view.focus, thread: view.thread, limit: view.limit }));
  if (!told) return;
  lineage = told;
  drawGraph();
}

function drawGraph() {
  if (lineage) drawLineage(lineage, { ...view, pick, more, zoomed: (zoom) => { drawnZoom = zoom; } });
  const tool = (key, words, label, action, disabled = false) => h("button", { type: "button", "data-key": key, "aria-label": label, title: label, disabled, onclick: action }, words);
  const zoom = (by) => () => { view.zoom = Math.min(1.6, Math.max(0.4, drawnZoom * by)); drawGraph(); };
  show(at("lineage-tools"),
    view.focus ? tool("up", "↑ up", "Draw from the handle above", () => focus(lineage?.above ?? "")) : null,
    view.focus || view.limit > 120 ? tool("all", "all", "Draw the newest of all handles", () => { view.limit = 120; focus(""); }) : null,
    tool("out", "−", "Smaller", zoom(1 / 1.2)), tool("in", "+", "Larger", zoom(1.2)),
    tool("fit", "fit", "As wide as the window", () => { const drawn = at("graph").querySelector("svg"); if (drawn) { view.zoom = Math.min(1, Math.max(0.4, (at("graph").clientWidth - 4) / drawn.viewBox.baseVal.width)); drawGraph(); } }));
}

async function panel() {
  const tab = TABS[view.tab];
  const told = await newest("panel", ask(tab.asks, { thread: view.thread, ...tab.options, ...(tab.paged ? { offset: view.offset, limit: 50 } : {}), ...(tab.searches ? { q: view.find } : {}) }));
  if (told) show(at("panel"), tab.draw(told, { pick, why, go: (offset) => { view.offset = offset; panel().catch(gone); } }));
}

async function timeline() {
  await listThreads();
  if (overview.kind === "outside" && !view.thread && !chosen && threads.length) {
    at("thread").value = view.thread = threads[0].thread_id;
    graph().catch(gone);
  }
  if (overview.has_checkpoints && view.thread && threads.some((one) => one.thread_id === view.thread)) {
    const told = await newest("timeline", ask("thread", { id: view.thread, limit: 60 }));
    if (told) drawCheckpoints(told, pick);
    drawGraph(); // the checkpoints told labels
  } else if (overview.kind === "outside") {
    noTimeline(threads.length ? "Choose a thread to see its checkpoints." : "No checkpoints are looked at: aaflow studio --checkpoints PATH.");
  } else {
    const told = await newest("timeline", ask("requests", { thread: view.thread, limit: 40 }));
    if (told) drawRequests(told, pick);
  }
}

async function listThreads() {
  try {
    threads = overview.has_checkpoints ? (await ask("threads", { limit: 200 })).threads : [];
  } catch (error) {
    if (!(error instanceof Refused)) throw error;
    threads = []; // no checkpoint was written yet
  }
  const ids = [...new Set([...threads.map((one) => one.thread_id), ...overview.threads])];
  const listed = JSON.stringify([ids, view.thread]);
  if (at("thread").dataset.listed === listed) return;
  at("thread").dataset.listed = listed;
  show(at("thread"), h("option", { value: "" }, "all threads"), ids.map((id) => h("option", { value: id }, clean(id, 40))));
  at("thread").value = ids.includes(view.thread) ? view.thread : "";
}

async function pool() {
  const kv_id = view.picked && lineage?.nodes.some((one) => one.kv_id === view.picked) ? view.picked : "";
  const map = overview.pool ? await newest("pool", ask("pool", { kv_id })) : null;
  if (map || !overview.pool) drawPool(overview, map);
}

// ---------------------------------------------------------------- what the user does

async function pick(kv_id) {
  if (view.comparing && view.picked && kv_id !== view.picked) {
    await compare(view.picked, kv_id);
    return;
  }
  Object.assign(view, { picked: kv_id, second: "", comparing: false });
  drawGraph();
  reveal(kv_id);
  await details(() => ask("handle", { kv_id }), (told) => drawHandle(told, actions));
  pool().catch(gone);
}

async function compare(a, b) {
  Object.assign(view, { picked: a, second: b, comparing: false });
  drawGraph();
  await details(() => ask("diff", { a, b }), (told) => drawDiff(told, actions));
}

const why = (request) => details(() => ask("miss", { number: request.number }), (told) => drawMiss(told, request, actions));

async function details(asking, drawing) {
  try {
    const told = await newest("details", asking());
    if (!told) return;
    drawing(told);
    at("detail").scrollTop = 0;
    if (!matchMedia("(min-width: 1021px)").matches) at("detail").focus({ preventScroll: true });
  } catch (error) {
    if (error instanceof Refused) problem(error.message, actions);
    else gone(error);
  }
}

const actions = {
  pick, why, diff: compare,
  get comparing() { return view.comparing; },
  compare(kv_id) {
    view.comparing = !view.comparing;
    details(() => ask("handle", { kv_id }), (told) => drawHandle(told, actions));
  },
  focus: (kv_id) => focus(kv_id),
  close() {
    const before = view.picked;
    Object.assign(view, { picked: "", second: "", comparing: false });
    idle();
    drawGraph();
    [...at("graph").querySelectorAll(".node")].find((one) => one.dataset.key === before)?.focus({ preventScroll: true });
    pool().catch(gone);
  },
};

function focus(kv_id) {
  view.focus = kv_id;
  graph().catch(gone);
}

function more(parent) {
  if ((parent ?? "") === view.focus) view.limit = Math.min(1000, 2 * view.limit);
  else view.focus = parent ?? "";
  graph().catch(gone);
}

function choose(tab) {
  Object.assign(view, { tab, offset: 0 });
  drawTabs(tab, choose);
  panel().catch(gone);
}

// ---------------------------------------------------------------- how it stands

function head() {
  const { kind, model, dtype, device, namespace, state, metadata_only, looks_at, kv } = overview;
  show(at("who"), kind === "broker"
    ? [h("b", { title: model }, h("bdi", {}, clean(model.startsWith("/") ? model.split("/").pop() : model, 60))), ` ${clean(dtype, 20)} on ${clean(device, 20)}, `, h("code", { title: namespace }, namespace.slice(0, 12))]
    : ["seen from outside: ", Object.entries(looks_at).filter(([, place]) => place).map(([what, place]) => `${what} ${clean(place, 120)}`).join(", ")],
  " ", metadata_only ? h("span", { class: "badge strong" }, "metadata only") : null, kv === false ? h("span", { class: "badge strong" }, "kv=False: text is passed") : null);
  at("state").textContent = paused ? "paused" : { open: "live", closed: "broker closed", unreachable: "out of reach" }[state];
  at("state").dataset.is = state;
  if (state === "closed") alarm("The broker was closed. What it remembers is still shown; KV that was in its pool is gone, unless a disk has it.");
  if (state === "unreachable") alarm(overview.problem);
}

function gone(error) {
  if (error instanceof Refused) {
    alarm(error.message);
  } else if (error instanceof Gone) {
    at("state").textContent = "no answer";
    at("state").dataset.is = "gone";
    alarm(`${error.message}. What was seen last is shown; it is tried again.`);
    known = "";
  } else {
    throw error;
  }
  return false;
}

function alarm(words) {
  at("alert").hidden = !words;
  if (at("alert").textContent !== plain(words)) at("alert").textContent = plain(words);
}

at("pause").addEventListener("click", () => {
  paused = !paused;
  at("pause").setAttribute("aria-pressed", String(paused));
  at("pause").textContent = paused ? "Go on" : "Pause";
  if (overview) head();
  if (!paused) beat();
});
at("thread").addEventListener("change", (event) => {
  chosen = true;
  Object.assign(view, { thread: event.target.value, offset: 0, focus: "" });
  redraw();
});
at("filter").addEventListener("submit", (event) => event.preventDefault());
let waiting = 0;
at("find").addEventListener("input", (event) => {
  clearTimeout(waiting);
  waiting = setTimeout(() => { view.find = event.target.value.trim(); choose("handles"); }, 200);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "/" && !event.target.closest("input, select, textarea")) { event.preventDefault(); at("find").focus(); }
  if (event.key === "Escape" && (view.picked || !at("detail").classList.contains("idle"))) actions.close();
});
document.addEventListener("visibilitychange", () => beat());
let settled = 0;
addEventListener("resize", () => { clearTimeout(settled); settled = setTimeout(() => drawGraph(), 150); });

legend();
idle();
drawTabs(view.tab, choose);
drawGraph();
await beat();
setInterval(beat, EVERY_MS);
