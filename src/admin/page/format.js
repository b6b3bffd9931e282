// Number formats. Every value on the page is formatted by one of these.

const NARROW = "\u202f";
const NONE = "–";

function whole(value) {
  return Math.round(value).toString().replace(/\B(?=(\d{3})+(?!\d))/g, NARROW);
}

function percent(share, digits) {
  return (share * 100).toFixed(digits) + NARROW + "%";
}

function share(value) {
  return percent(value, 0);
}

function bytes(value) {
  const units = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
  const [name, size] = units.find(([, size]) => value >= size) || ["B", 1];
  const number = value / size;
  return (size === 1 ? whole(value) : number.toFixed(number < 10 ? 2 : number < 100 ? 1 : 0)) + " " + name;
}

function duration(seconds) {
  const s = Math.max(0, Math.round(seconds));
  if (s < 60) return s + " s";
  if (s < 3600) return Math.floor(s / 60) + " min " + (s % 60) + " s";
  if (s < 86400) return Math.floor(s / 3600) + " h " + (Math.floor(s / 60) % 60) + " min";
  return Math.floor(s / 86400) + " d " + (Math.floor(s / 3600) % 24) + " h";
}

function scientific(value) {
  return value === 0 ? "0" : value.toExponential(2);
}

function rate(value) {
  return value === 0 ? "0" : value >= 100 ? whole(value) : value.toPrecision(3);
}

// Format of each value of the status; the others are shown unchanged.
const FORMATS = {
  "progress.step": whole,
  "progress.planned_steps": whole,
  "progress.eta": duration,
  "progress.epoch": (epoch) => whole(epoch + 1),
  "progress.epochs": whole,
  "progress.steps_per_second": rate,
  "jobs.trained": whole,
  "jobs.skipped": whole,
  "jobs.returned": whole,
  "queue.jobs": whole,
  "queue.padded": whole,
  "queue.stragglers": whole,
  "pool.batches": whole,
  "pool.max_batches": whole,
  "pool.bytes": bytes,
  "pool.reserved_bytes": bytes,
  "pool.checked_out_bytes": bytes,
  "pool.max_bytes": bytes,
  "training.loss": (value) => value.toFixed(3),
  "training.accuracy": (value) => percent(value, 1),
  "training.leading_run": (value) => value.toFixed(2),
  "training.acceptance": (value) => value.toFixed(2),
  "training.learning_rate": scientific,
  "training.grad_norm": rate,
  "training.tokens_per_second": whole,
  "training.extracted_tokens_per_second": whole,
};

const STATES = {
  starting: ["○", "Starting"],
  filling: ["◔", "Filling"],
  training: ["●", "Training"],
  paused: ["❚❚", "Paused"],
  draining: ["◕", "Draining"],
  no_target: ["▲", "No target"],
  stopping: ["■", "Stopping"],
};

// State of an actor, by name in the status.
const DOES = {
  busy: "busy",
  idle: "idle",
  job: "waits for a job",
  pool_full: "waits: pool full",
  down: "down",
  batch: "waits for a batch",
  step: "waits for the step",
  micro_batches: "waits for micro-batches",
  queue: "waits: queue full",
  draw: "waits for a draw",
  barrier: "waits for the end of the epoch",
  outcome: "waits for outcomes",
  padding: "waits for padding",
  target: "waits for targets",
  drafter: "waits for drafters",
};

// Wait causes, by name in the status.
// Wait causes, by name in the status.
const CAUSES = {
  idle: "no work",
  job: "job",
  pool_full: "pool full",
  down: "down",
  batch: "batch",
  step: "step",
  micro_batches: "micro-batches",
  queue: "queue full",
  draw: "draw",
  barrier: "epoch barrier",
  outcome: "outcomes",
  padding: "padding",
  target: "targets",
  drafter: "drafters",
};

function at(status, key) {
  return key.split(".").reduce((value, name) => (value === null || value === undefined ? value : value[name]), status);
}

function shown(status, key) {
  const value = at(status, key);
  if (value === null || value === undefined || value === "") return NONE;
  return FORMATS[key] ? FORMATS[key](value) : String(value);
}
