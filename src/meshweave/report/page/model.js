// The data of the page as typed columns, and how numbers are written.

const DATA = JSON.parse(document.getElementById("data").textContent);
const S = DATA.strings;
const RUNS = DATA.runs;
const LANES = DATA.lanes.map(([run, role, name, row], index) => ({ index, run, role, name: S[name], row, spans: [] }));
const N = DATA.spans.name.length;
const col = DATA.spans;

// Starts are differences to the span before; needs say how far back a span is.
const start = new Float64Array(N);
const end = new Float64Array(N);
const runOf = new Uint8Array(N);
const needs = new Array(N);
const feeds = Array.from({ length: N }, () => []);

function decode() {
  let last = 0;
  RUNS.forEach((run, number) => runOf.fill(number, run.first, run.first + run.count));
  for (let i = 0; i < N; i++) {
    last += col.start[i];
    start[i] = last;
    end[i] = last + col.seconds[i];
    LANES[col.lane[i]].spans.push(i);
    needs[i] = col.needs[i].map((back) => i - back);
    for (const n of needs[i]) feeds[n].push(i);
  }
  for (const lane of LANES) {
    lane.spans.sort((a, b) => start[a] - start[b] || end[a] - end[b]);
    lane.start = Float64Array.from(lane.spans, (i) => start[i]);
    lane.end = Float64Array.from(lane.spans, (i) => end[i]);
    lane.isCompute = lane.spans.length > 0 && isKernel(lane.spans[0]);
  }
}

const isKernel = (i) => S[col.kind[i]] === "compute";
const text = (column, i) => S[col[column][i]];
decode();

// Time in the intervals before each, so that any stretch of them costs two look-ups.
function sums(starts, ends) {
  const found = new Float64Array(starts.length + 1);
  for (let k = 0; k < starts.length; k++) found[k + 1] = found[k] + ends[k] - starts[k];
  return found;
}

const TOTAL = end.reduce((a, b) => Math.max(a, b), Math.max(1, ...RUNS.map((run) => run.seconds)));

// Per lane the exposed time of its communications, in order: drawn at the end of each.
for (const lane of LANES) {
  const exposed = lane.spans.filter((i) => !isKernel(i) && col.exposed[i] > 0);
  lane.shown = exposed.map((i) => [Math.max(start[i], end[i] - col.exposed[i]), end[i]]);
  lane.shownStart = Float64Array.from(lane.shown, (s) => s[0]);
  lane.shownEnd = Float64Array.from(lane.shown, (s) => s[1]);
  lane.busy = sums(lane.start, lane.end);
  lane.shownBusy = sums(lane.shownStart, lane.shownEnd);
}

const reasonsOf = new Map();
for (const [span, kind, ns, said, blocker] of DATA.reasons) {
  if (!reasonsOf.has(span)) reasonsOf.set(span, []);
  reasonsOf.get(span).push({ kind: S[kind], ns, text: S[said], blocker });
}

// Per run and role: memory over time, and what the role does when.
for (const run of RUNS) {
  for (const role of run.roles) {
    let at = 0;
    let level = 0;
    role.times = Float64Array.from(role.memory[0], (d) => (at += d));
    role.levels = Float64Array.from(role.memory[1], (d) => (level += d));
    role.held = role.held.map(([name, bytes, kind, module, line, count]) => (
      { name: S[name], bytes, kind: S[kind], module: S[module], line: S[line], count }));
  }
}

// Graph nodes by name, per run: where a tensor comes from, and which task of the other run is the same.
const byNode = RUNS.map(() => new Map());
for (let i = 0; i < N; i++) {
  const held = byNode[runOf[i]];
  for (const name of [text("name", i), ...text("names", i).split(" ")]) {
    const key = `${LANES[col.lane[i]].role}/${col.microbatch[i]}/${isKernel(i) ? "" : "c"}/${name}`;
    if (name && !held.has(key)) held.set(key, i);
  }
}

function findNode(run, role, name, microbatch = 0) {
  const held = byNode[run];
  const found = held.get(`${role}/${microbatch}//${name}`) ?? held.get(`${role}/${microbatch}/c/${name}`);
  return found === undefined ? -1 : found;
}

// The same task in the other run, -1 where there is none.
function counterpart(i) {
  if (RUNS.length < 2) return -1;
  const kind = isKernel(i) ? "" : "c";
  const key = `${LANES[col.lane[i]].role}/${col.microbatch[i]}/${kind}/${text("name", i)}`;
  const found = byNode[1 - runOf[i]].get(key);
  return found === undefined ? -1 : found;
}

const CLASSES = ["matmul", "attention", "memory", "host", "all_gather", "reduce_scatter", "all_reduce", "all_to_all"];
const colorName = (cls) => (CLASSES.includes(cls) ? cls : cls === "transfer" || cls === "permute" ? "transfer" : "other");
const CLASS_TEXT = { memory: "memory-bound", host: "host", permute: "permute", transfer: "transfer" };
const classText = (cls) => CLASS_TEXT[cls] ?? cls.replaceAll("_", "-");

// First index at which the sorted array is above x.
function above(sorted, x, from = 0) {
  let low = from;
  let high = sorted.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] > x) high = middle;
    else low = middle + 1;
  }
  return low;
}

function timeText(ns) {
  const size = Math.abs(ns);
  if (size >= 1e9) return `${(ns / 1e9).toFixed(3)} s`;
  if (size >= 1e6) return `${(ns / 1e6).toFixed(size >= 1e8 ? 1 : size >= 1e7 ? 2 : 3)} ms`;
  if (size >= 1e3) return `${(ns / 1e3).toFixed(size >= 1e5 ? 1 : 2)} µs`;
  return `${Math.round(ns)} ns`;
}

function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  let unit = 0;
  while (Math.abs(value) >= 1024 && unit < 4) {
    value /= 1024;
    unit += 1;
  }
  return unit ? `${value.toFixed(1)} ${units[unit]}` : `${Math.round(value)} B`;
}

const percent = (part, digits = 1) => `${(100 * part).toFixed(digits)}%`;
const signed = (value, write) => (value > 0 ? "+" : value < 0 ? "−" : "±") + write(Math.abs(value));
const shortTypes = (said) => said.replace(/\bbfloat(\d+)/g, "bf$1").replace(/\bfloat(\d+)/g, "f$1").replace(/\bint(\d+)/g, "i$1");
const shortLine = (line) => line.split(" in ")[0].split("/").pop();
// An op without its namespace and overload.
const opText = (i) => text("op", i).replace(/^(aten|meshweave|_c10d_functional)\./, "").replace(/(\w)\.\w+(?=[,)\s]|$)/g, "$1");

// An element with attributes and children; strings become text, never markup.
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "style") made.style.cssText = value;
    else if (value !== null && value !== false) made.setAttribute(key, value === true ? "" : value);
  }
  made.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return made;
}

const $ = (id) => document.getElementById(id);
const sourceTag = (run) => el(
  "span", { class: `tag ${run.source}`, title: `${run.source}: ${run.profile} ${run.version}` }, run.source);
