// Draws a status. Rows are updated in place, so that the page does not jump.

const SVG = "http://www.w3.org/2000/svg";
// Limit of points in a sparkline.
const MAX_POINTS = 300;
// Lines of a collapsed list.
const COLLAPSED = 5;
const $ = (id) => document.getElementById(id);

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

// Adds or removes children of a list until there is one for each item after the first `stay`, then fills each.
function each(list, items, create, fill, stay = 0) {
  while (list.children.length > stay + items.length) list.lastElementChild.remove();
  while (list.children.length < stay + items.length) list.append(create());
  items.forEach((item, index) => fill(list.children[stay + index], item));
}

function parts(bar, widths) {
  each(bar, widths, () => make("span"), (part, [kind, width]) => {
    part.className = kind;
    part.style.width = (Math.max(0, Math.min(1, width)) * 100).toFixed(2) + "%";
  });
}

// === actors ===

// Two rows: numbers, then state and waits.
function actorRows() {
  const time = make("td", { class: "time" }, make("span", { class: "bar", "aria-hidden": "true" }));
  return make("tbody", {},
    make("tr", {}, make("th", { scope: "rowgroup", rowspan: "2" }), time, make("td", { class: "number" }), make("td", { class: "number" })),
    make("tr", {}, make("td", { colspan: "3", class: "does" })));
}

// "pool full 4 %, job 1 %", longest first
function waits(actor) {
  const listed = Object.entries(actor.waits).filter(([, share]) => share >= 0.01).sort((a, b) => b[1] - a[1]);
  return listed.map(([cause, wait]) => CAUSES[cause] + " " + share(wait)).join(", ");
}

function does(actor) {
  const waited = waits(actor);
  return (DOES[actor.state] || actor.state) + (waited ? " · waited for: " + waited : "") + (actor.restarts ? "; restarts: " + whole(actor.restarts) : "");
}

function fillActor(rows, actor) {
  const [name, time, busy, tokens] = rows.firstElementChild.children;
  put(name, String(actor.index));
  name.setAttribute("aria-label", actor.actor + " " + actor.index);
  const all = Object.entries(actor.waits).filter(([, share]) => share > 0);
  parts(time.firstElementChild, [["busy", actor.busy], ...all.map(([cause, share]) => [cause === "down" ? "down" : "wait", share])]);
  put(rows.querySelector(".does"), does(actor));
  rows.classList.toggle("gone", actor.up === false);
  put(busy, share(actor.busy));
  put(tokens, actor.tokens_per_second === null ? NONE : whole(actor.tokens_per_second));
}

function drawActors(status) {
  for (const [id, kind] of [["targets", "target"], ["drafters", "drafter"]]) {
    // Keeps caption and head.
    each($(id), status.actors.filter((actor) => actor.actor === kind), actorRows, fillActor, 2);
  }
  for (const line of document.querySelectorAll("[data-does]")) {
    const actor = status.actors.find((actor) => actor.actor === line.dataset.does);
    put(line, actor ? "Busy " + share(actor.busy) + "; waits: " + (waits(actor) || "none") : "");
  }
  for (const flow of document.querySelectorAll("[data-waits]")) {
    const [kind, cause] = flow.dataset.waits.split(" ");
    const actors = status.actors.filter((actor) => actor.actor === kind);
    const mean = actors.reduce((sum, actor) => sum + (actor.waits[cause] || 0), 0) / Math.max(1, actors.length);
    put(flow.lastElementChild, mean >= 0.005 ? kind + "s wait " + share(mean) : "");
    // Drafters always wait for the optimizer step; the other waits mark a bottleneck.
    flow.classList.toggle("bottleneck", mean >= Number(flow.dataset.usual || 0.05));
  }
}

// === pool ===

function drawPool(pool) {
  const most = Math.max(1, pool.max_batches);
  parts($("batches").firstElementChild, pool.buckets.filter((b) => b.batches > 0).map((b) => ["batch", b.batches / most]));
  $("batches").lastElementChild.style.left = (Math.min(1, pool.min_ready / most) * 100).toFixed(2) + "%";
  const draws = pool.draining ? "Draining: a draw has no minimum."
    : "A draw needs " + whole(pool.min_ready) + (pool.batches >= pool.min_ready ? ": enough are ready." : ": drafters wait.");
  put($("draws"), draws);
  put($("pool-bytes"), bytes(pool.bytes + pool.reserved_bytes + pool.checked_out_bytes));
  const all = Math.max(1, pool.max_bytes);
  parts($("bytes").firstElementChild, [["waiting", pool.bytes / all], ["reserved", pool.reserved_bytes / all], ["checked-out", pool.checked_out_bytes / all]]);
  const create = () => make("tr", {}, make("th", { scope: "row" }), make("td", { class: "time" }, make("span", { class: "bar", "aria-hidden": "true" })),
    make("td", { class: "number" }), make("td", { class: "number" }));
  each($("lengths").tBodies[0], pool.buckets, create, (row, bucket) => {
    const [name, bar, waiting, drawn] = row.children;
    put(name, whole(bucket.longest));
    parts(bar.firstElementChild, [["batch", bucket.batches / most]]);
    put(waiting, whole(bucket.batches));
    put(drawn, whole(bucket.drawn));
  });
}

// === GPUs ===

function drawGpus(gpus) {
  $("gpus").hidden = gpus.length === 0;
  const create = () => make("tr", {}, make("th", { scope: "row" }), make("td", { class: "time" }, make("span", { class: "bar", "aria-hidden": "true" })),
    ...[1, 2, 3].map(() => make("td", { class: "number" })));
  each($("gpus").querySelector("tbody"), gpus, create, (row, gpu) => {
    const [name, bar, tensors, most, free] = row.children;
    put(name, gpu.device);
    // The allocator's cache and other processes are drawn as one part.
    parts(bar.firstElementChild, [["busy", gpu.allocated / gpu.total], ["wait", 1 - (gpu.allocated + gpu.free) / gpu.total]]);
    put(tensors, bytes(gpu.allocated));
    put(most, bytes(gpu.peak));
    put(free, bytes(gpu.free) + " of " + bytes(gpu.total));
  });
}

// === lines of text ===

function when(element, time, now) {
  element.dataset.at = time;
  element.setAttribute("datetime", new Date(time * 1000).toISOString());
  element.title = new Date(time * 1000).toLocaleString();
  put(element, duration(now - time) + " ago");
}

function drawLines(list, none, all, now) {
  none.hidden = all.length > 0;
  const more = list.nextElementSibling;
  const lines = more.getAttribute("aria-expanded") === "true" ? all : all.slice(0, COLLAPSED);
  more.hidden = all.length <= COLLAPSED;
  put(more, lines.length < all.length ? "Show all " + all.length : "Show fewer");
  const create = () => make("li", {}, make("span", { class: "badge" }), make("span", { class: "text" }), make("time"));
  each(list, lines, create, (row, line) => {
    const [badge, text, time] = row.children;
    row.className = line.kind;
    put(badge, line.badge);
    put(text, line.text);
    when(time, line.at, now);
  });
}

function drawService(status, now) {
  const faults = status.faults.slice().reverse().map((fault) => ({
    at: fault.at,
    kind: fault.level,
    badge: (fault.level === "error" ? "error" : "warning") + (fault.count > 1 ? " ×" + whole(fault.count) : ""),
    text: fault.text,
  }));
  drawLines($("faults"), $("no-faults"), faults, now);
  const reloads = status.config.reloads.slice().reverse().map((reload) => ({
    at: reload.at,
    kind: reload.applied ? "fine" : "error",
    badge: reload.applied ? "applied" : "refused",
    text: reload.text,
  }));
  drawLines($("reloads"), $("no-reloads"), reloads, now);
  if (status.config.since > 0) when($("config-since"), status.config.since, now);
  put($("config-hash"), status.config.hash.slice(0, 12) || NONE);
  $("config-hash").title = status.config.hash;
  const checkpoint = status.checkpoint;
  const failed = checkpoint.failed ? ", " + whole(checkpoint.failed) + " failed" : "";
  const age = checkpoint.at ? ", " + duration(now - checkpoint.at) + " ago" : "";
  put($("checkpoint"), checkpoint.step ? "step " + whole(checkpoint.step) + age + failed : "none yet" + failed);
}

// === history ===

const history = {};

// Leaves a gap in the sparklines.
function gap() {
  for (const values of Object.values(history)) values.push(null);
}

function drawSeries(status) {
  for (const tile of document.querySelectorAll("[data-series]")) {
    const key = tile.dataset.series;
    const value = at(status, key);
    const known = value !== null && value !== undefined;
    let values = (history[key] ||= []);
    if (key === "training.acceptance") {
      // The run stores this curve, so it is complete even if the page was just opened.
      tile.hidden = !known;
      values = status.training.acceptance_curve.map(([, acceptance]) => acceptance);
    } else {
      values.push(known ? value : null);
      if (values.length > MAX_POINTS) values.shift();
    }
    sparkline(tile.querySelector("svg"), tile.querySelector(".range"), values, FORMATS[key]);
  }
}

function sparkline(svg, range, values, format) {
  const numbers = values.filter((value) => value !== null);
  if (numbers.length < 2) return;
  const low = Math.min(...numbers), high = Math.max(...numbers);
  const x = (index) => (index / (values.length - 1)) * 100;
  const y = (value) => (high > low ? 28 - ((value - low) / (high - low)) * 24 : 16);
  let path = "", pen = false;
  values.forEach((value, index) => {
    if (value !== null) path += (pen ? "L" : "M") + x(index).toFixed(2) + " " + y(value).toFixed(2);
    pen = value !== null;
  });
  if (!svg.firstChild) {
    svg.setAttribute("viewBox", "0 0 100 32");
    svg.setAttribute("preserveAspectRatio", "none");
    svg.append(document.createElementNS(SVG, "path"));
  }
  svg.firstChild.setAttribute("d", path);
  put(range, format(low) + " to " + format(high));
}

// === everything ===

function draw(status, now) {
  for (const element of document.querySelectorAll("[data-key]")) put(element, shown(status, element.dataset.key));
  const [sign, word] = STATES[status.state] || ["?", status.state];
  put($("state"), sign + " " + word);
  $("state").className = "pill " + status.state;
  const { step, planned_steps: planned } = status.progress;
  $("progress").firstElementChild.style.width = (planned ? Math.min(1, step / planned) * 100 : 0).toFixed(2) + "%";
  $("progress").setAttribute("aria-valuemax", planned);
  $("progress").setAttribute("aria-valuenow", step);
  put($("start"), "start " + whole(status.run.number) + " · " + status.run.engine + " · up " + duration(now - status.run.started));
  put($("pause"), status.run.paused ? "Resume" : "Pause");
  $("pause").dataset.command = status.run.paused ? "resume" : "pause";
  document.title = word + ", step " + whole(step) + " · Draftmill";
  drawActors(status);
  drawPool(status.pool);
  drawGpus(status.gpus);
  drawService(status, now);
  drawSeries(status);
}
