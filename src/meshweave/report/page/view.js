// What is shown and what is selected; everything that draws listens here.

const MIN_WIDTH = 200; // nanoseconds across the timeline when it is zoomed in as far as it goes

const state = { selected: -1, hovered: -1, range: [0, TOTAL], filter: "", tab: "" };
const listeners = { range: [], selected: [], hovered: [], resize: [], tab: [] };
const on = (event, call) => listeners[event].push(call);
const emit = (event) => listeners[event].forEach((call) => call());

function setRange(begin, finish) {
  const width = Math.min(Math.max(finish - begin, MIN_WIDTH), TOTAL);
  const middle = (begin + finish) / 2;
  const low = Math.min(Math.max(middle - width / 2, 0), TOTAL - width);
  state.range = [low, low + width];
  emit("range");
}

// Zoom by a factor, with the point at `at` staying where it is.
function zoom(factor, at) {
  const [begin, finish] = state.range;
  const width = Math.min(Math.max((finish - begin) * factor, MIN_WIDTH), TOTAL);
  const share = (at - begin) / (finish - begin);
  const low = Math.min(Math.max(at - share * width, 0), TOTAL - width);
  state.range = [low, low + width];
  emit("range");
}

function pan(share) {
  const [begin, finish] = state.range;
  const by = (finish - begin) * share;
  setRange(begin + by, finish + by);
}

const fit = () => setRange(0, TOTAL);

function zoomTo(i) {
  const around = Math.max(col.seconds[i] * 1.5, MIN_WIDTH, 4000);
  setRange(start[i] - around, end[i] + around);
}

// Keeps the selected task in sight without a change of scale, unless it is to be zoomed to.
function reveal(i) {
  const [begin, finish] = state.range;
  if (start[i] >= begin && end[i] <= finish) return;
  const width = finish - begin;
  const middle = (start[i] + end[i]) / 2;
  if (col.seconds[i] > width) zoomTo(i);
  else setRange(middle - width / 2, middle + width / 2);
}

function select(i, { zoom: isZoomed = false } = {}) {
  state.selected = i;
  if (i >= 0) {
    if (isZoomed) zoomTo(i);
    else reveal(i);
  }
  emit("selected");
}

const BY_EXPOSURE = Array.from({ length: RUNS[0].count }, (_, i) => i)
  .filter((i) => col.exposed[i] > 0)
  .sort((a, b) => col.exposed[b] - col.exposed[a] || a - b);

function nextExposed() {
  if (!BY_EXPOSURE.length) return;
  const at = BY_EXPOSURE.indexOf(state.selected);
  select(BY_EXPOSURE[(at + 1) % BY_EXPOSURE.length], { zoom: true });
}

// The colors of the page's style sheet, read again when the scheme changes.
const SCHEME = matchMedia("(prefers-color-scheme: dark)");
let colors = {};
function readColors() {
  const style = getComputedStyle(document.documentElement);
  const names = ["bg", "panel", "raised", "line", "text", "soft", "faint", "accent", "select", "exposed", "idle", "forward",
    "backward", "loss", "update", "transfer", "other", "bad", ...CLASSES];
  colors = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}
readColors();
SCHEME.addEventListener("change", () => {
  readColors();
  emit("resize");
});
