// The whole step in one line: what share of each pixel is compute and exposed communication, and what is in view.

const mini = $("minimap");
const miniPen = mini.getContext("2d");
const MINI_HEIGHT = 38;
let picture = null; // the part that stays when the view moves

// Per pixel, the seconds of `picked` tasks of the first run, as a share of all roles' time.
function shares(intervals, pixels) {
  const found = new Float64Array(pixels);
  const per = TOTAL / pixels;
  for (const [begin, finish] of intervals) {
    const last = Math.min(pixels - 1, Math.floor(finish / per));
    for (let p = Math.floor(begin / per); p <= last; p++) {
      found[p] += Math.max(0, Math.min(finish, (p + 1) * per) - Math.max(begin, p * per)) / per / RUNS[0].roles.length;
    }
  }
  return found;
}

function paintMinimap() {
  const ratio = window.devicePixelRatio || 1;
  const pixels = Math.max(1, Math.round(width));
  mini.width = Math.round(mini.clientWidth * ratio);
  mini.height = Math.round(MINI_HEIGHT * ratio);
  picture = document.createElement("canvas");
  picture.width = mini.width;
  picture.height = mini.height;
  const ink = picture.getContext("2d");
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  ink.fillStyle = colors.panel;
  ink.fillRect(0, 0, mini.clientWidth, MINI_HEIGHT);
  const lanes = LANES.filter((lane) => lane.run === 0);
  const kernels = lanes.filter((l) => l.isCompute).flatMap((l) => l.spans.map((i) => [start[i], end[i]]));
  const compute = shares(kernels, pixels);
  const exposed = shares(lanes.flatMap((lane) => lane.shown), pixels);
  const full = MINI_HEIGHT - 9;
  const base = MINI_HEIGHT - 3;
  for (let p = 0; p < pixels; p++) {
    const low = Math.min(1, compute[p]) * full;
    const high = Math.min(1 - Math.min(1, compute[p]), exposed[p]) * full;
    ink.fillStyle = colors.matmul;
    ink.fillRect(GUTTER + p, base - low, 1, low);
    ink.fillStyle = colors.exposed;
    ink.fillRect(GUTTER + p, base - low - high, 1, high);
  }
  ink.fillStyle = colors.soft;
  ink.font = `11px ${FONT}`;
  ink.textBaseline = "middle";
  ink.fillText(RUNS[0].roles.length > 1 ? "all roles" : "whole step", 20, MINI_HEIGHT / 2);
  drawMinimap();
}

const miniX = (t) => GUTTER + (t / TOTAL) * width;

function drawMinimap() {
  if (!picture) return;
  miniPen.setTransform(1, 0, 0, 1, 0, 0);
  miniPen.drawImage(picture, 0, 0);
  const ratio = window.devicePixelRatio || 1;
  miniPen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const x0 = miniX(state.range[0]);
  const x1 = Math.max(miniX(state.range[1]), x0 + 2);
  miniPen.fillStyle = colors.panel;
  miniPen.globalAlpha = 0.66;
  miniPen.fillRect(GUTTER, 0, x0 - GUTTER, MINI_HEIGHT);
  miniPen.fillRect(x1, 0, GUTTER + width - x1, MINI_HEIGHT);
  miniPen.globalAlpha = 1;
  miniPen.strokeStyle = colors.accent;
  miniPen.lineWidth = 1.5;
  miniPen.strokeRect(x0, 1, x1 - x0, MINI_HEIGHT - 2);
  if (state.selected >= 0) {
    miniPen.fillStyle = colors.select;
    miniPen.fillRect(miniX(start[state.selected]) - 1, 0, 2, MINI_HEIGHT);
  }
}

// A drag inside the shown part moves it, elsewhere it chooses another.
mini.addEventListener("pointerdown", (event) => {
  mini.setPointerCapture(event.pointerId);
  const timeAt = (e) => ((e.clientX - mini.getBoundingClientRect().left - GUTTER) / width) * TOTAL;
  const from = timeAt(event);
  const [begin, finish] = state.range;
  const isMove = from > begin && from < finish && finish - begin < 0.98 * TOTAL;
  const move = (e) => {
    const to = timeAt(e);
    if (isMove) setRange(begin + to - from, finish + to - from);
    else if (Math.abs(to - from) > TOTAL / 400) setRange(Math.min(from, to), Math.max(from, to));
  };
  const stop = (e) => {
    const half = (finish - begin) / 2;
    if (Math.abs(timeAt(e) - from) < TOTAL / 400 && !isMove && half < TOTAL / 2) setRange(from - half, from + half);
    mini.removeEventListener("pointermove", move);
  };
  mini.addEventListener("pointermove", move);
  mini.addEventListener("pointerup", stop, { once: true });
});
