// Draws the timeline: at most about one rectangle per pixel column and lane, however many tasks there are.

const canvas = $("timeline");
const pen = canvas.getContext("2d");
const scroller = $("scroller");
let width = 0; // of the part that has time on it, in CSS pixels
let height = 0;
let hatch = null;

const toX = (t) => GUTTER + ((t - state.range[0]) / (state.range[1] - state.range[0])) * width;
const toTime = (x) => state.range[0] + ((x - GUTTER) / width) * (state.range[1] - state.range[0]);

function fitCanvas() {
  const ratio = window.devicePixelRatio || 1;
  $("spacer").style.height = "0px";
  height = scroller.clientHeight;
  GUTTER = scroller.clientWidth < 560 ? 96 : 152;
  width = Math.max(50, scroller.clientWidth - GUTTER - 6);
  canvas.width = Math.round(scroller.clientWidth * ratio);
  canvas.height = Math.round(height * ratio);
  canvas.style.height = `${height}px`;
  $("spacer").style.height = `${Math.max(0, contentHeight - height)}px`;
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  hatch = stripes();
}

// Light diagonal stripes, laid over what is exposed.
function stripes() {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const ink = tile.getContext("2d");
  ink.strokeStyle = "rgba(255,255,255,0.42)";
  ink.lineWidth = 1.6;
  for (const x of [-6, 0, 6]) {
    ink.beginPath();
    ink.moveTo(x - 1, 7);
    ink.lineTo(x + 7, -1);
    ink.stroke();
  }
  return pen.createPattern(tile, "repeat");
}

const LOOKED_AT = 8; // of the intervals that share a pixel, those among which the longest gives the color

// Calls `wide(k, x, w)` for each interval that is wide enough to see. Those that share a pixel become one call
// `thin(k, x, share)`: the longest, and how much of the pixel's time they take.
function visit(starts, ends, busy, wide, thin) {
  const [begin, finish] = state.range;
  const scale = width / (finish - begin);
  let k = above(ends, begin);
  while (k < starts.length && starts[k] < finish) {
    const x = GUTTER + (starts[k] - begin) * scale;
    const x1 = GUTTER + (ends[k] - begin) * scale;
    if (x1 - x >= 1.5) {
      const left = Math.max(x, GUTTER - 4);
      wide(k, left, Math.min(x1, GUTTER + width + 4) - left);
      k += 1;
      continue;
    }
    const pixel = Math.floor(x);
    const next = Math.max(k + 1, above(ends, begin + (pixel + 1 - GUTTER) / scale, k + 1));
    let longest = k;
    for (let j = k + 1; j < Math.min(next, k + LOOKED_AT); j++) if (ends[j] - starts[j] > ends[longest] - starts[longest]) longest = j;
    thin(longest, pixel, Math.min(1, (busy[next] - busy[k]) * scale));
    k = next;
  }
}

// What takes a small part of a pixel is pale, yet to be seen.
const faded = (share) => 0.3 + 0.7 * share;

function drawLane(row, y) {
  const { lane, height: h } = row;
  const thin = (k, x, share) => {
    pen.fillStyle = colors[colorName(text("cls", lane.spans[k]))];
    pen.globalAlpha = (lane.isCompute ? 1 : 0.5) * faded(share);
    pen.fillRect(x, y, 1, h);
  };
  const wide = (k, x, w) => {
    pen.fillStyle = colors[colorName(text("cls", lane.spans[k]))];
    pen.globalAlpha = lane.isCompute ? 1 : 0.42;
    pen.fillRect(x, y, w > 4 ? w - 0.75 : w, h);
    if (!lane.isCompute && w > 3) {
      pen.globalAlpha = 1;
      pen.fillRect(x, y, w - 0.75, 3);
    }
  };
  visit(lane.start, lane.end, lane.busy, wide, thin);
  pen.globalAlpha = 1;
  drawExposed(lane, y, h);
  const label = (k, x, w) => w > 26 && drawLabel(lane.spans[k], lane.isCompute, x, y, w, h);
  visit(lane.start, lane.end, lane.busy, label, () => {});
}

function drawExposed(lane, y, h) {
  if (!lane.shown.length) return;
  const box = (k, x, w) => {
    pen.fillStyle = colors.exposed;
    pen.fillRect(x, y + 3, w > 4 ? w - 0.75 : w, h - 3);
    if (w > 5) {
      pen.fillStyle = hatch;
      pen.fillRect(x, y + 3, w - 0.75, h - 3);
    }
  };
  const thin = (k, x, share) => {
    pen.globalAlpha = faded(share);
    box(k, x, 1);
    pen.globalAlpha = 1;
  };
  visit(lane.shownStart, lane.shownEnd, lane.shownBusy, box, thin);
}

function drawLabel(i, isCompute, x, y, w, h) {
  const room = Math.floor((w - 8) / 6);
  const what = isCompute ? opText(i) : `${text("op", i)} ${text("module", i).split(".").slice(-2).join(".")}`;
  if (room < 3) return;
  const said = what.length > room ? `${what.slice(0, room - 1)}…` : what;
  const isLight = !isCompute && col.exposed[i] < col.seconds[i] / 2;
  pen.font = `500 11px ${FONT}`;
  if (!isCompute && !isLight) {
    pen.fillStyle = colors.exposed;
    pen.fillRect(x + 2, y + 4, Math.min(said.length * 6.1 + 5, w - 4), h - 5);
  }
  pen.fillStyle = isLight ? colors.text : "#fff";
  pen.fillText(said, x + 4, y + h / 2 + (isCompute ? 0.5 : 2));
}

const FONT = getComputedStyle(document.body).fontFamily;
const PHASE_COLORS = { forward: "forward", loss: "loss", backward: "backward", update: "update" };

function drawHeader(row, y) {
  const { group, height: h } = row;
  pen.fillStyle = colors.raised;
  pen.fillRect(0, y, GUTTER + width + 6, h);
  const color = (k) => colors[PHASE_COLORS[group.phases[k].phase] ?? "idle"];
  const thin = (k, x) => {
    pen.fillStyle = color(k);
    pen.fillRect(x, y, 1, h);
  };
  const wide = (k, x, w) => {
    const { phase, microbatch } = group.phases[k];
    pen.fillStyle = color(k);
    pen.fillRect(x, y, w - 0.5, h);
    if (w < 24) return;
    const said = group.isMany ? (w > 84 ? `${phase} ${microbatch}` : `${phase[0].toUpperCase()}${microbatch}`) : phase;
    if (said.length * 6 + 6 > w) return;
    pen.fillStyle = colors.text;
    pen.font = `500 11px ${FONT}`;
    pen.fillText(said, x + 5, y + h / 2 + 0.5);
  };
  visit(group.starts, group.ends, group.busy, wide, thin);
}

function drawMemory(row, y) {
  const { role, run } = row.group;
  const h = row.height;
  const room = run.memory && role.peak > 0.35 * run.memory ? run.memory : 0;
  const top = Math.max(role.peak, room) * 1.12 || 1;
  const toY = (bytes) => y + h - (bytes / top) * h;
  const path = new Path2D();
  path.moveTo(GUTTER, y + h);
  let k = Math.max(0, above(role.times, state.range[0]) - 1);
  let level = role.levels[k] ?? 0;
  for (let x = 0; x <= width; x++) {
    const until = state.range[0] + ((x + 1) / width) * (state.range[1] - state.range[0]);
    let most = level;
    for (; k < role.times.length && role.times[k] <= until; k++) {
      level = role.levels[k];
      most = Math.max(most, level);
    }
    path.lineTo(GUTTER + x, toY(most));
  }
  path.lineTo(GUTTER + width, y + h);
  pen.fillStyle = colors.accent;
  pen.globalAlpha = 0.22;
  pen.fill(path);
  pen.fillRect(GUTTER, toY(role.persistent), width, y + h - toY(role.persistent));
  pen.globalAlpha = 0.9;
  pen.strokeStyle = colors.accent;
  pen.lineWidth = 1;
  pen.stroke(path);
  pen.globalAlpha = 1;
  pen.font = `11px ${FONT}`;
  if (room) drawRoom(toY(room), run.memory);
  drawPeak(role, toY(role.peak));
}

function drawRoom(y, bytes) {
  pen.strokeStyle = colors.bad;
  pen.setLineDash([4, 3]);
  pen.beginPath();
  pen.moveTo(GUTTER, y);
  pen.lineTo(GUTTER + width, y);
  pen.stroke();
  pen.setLineDash([]);
  pen.fillStyle = colors.bad;
  haloed(`device: ${bytesText(bytes)}`, GUTTER + 5, y + 9);
}

function drawPeak(role, y) {
  const x = toX(role.peak_at);
  if (x < GUTTER || x > GUTTER + width) return;
  pen.fillStyle = colors.text;
  pen.beginPath();
  pen.arc(x, y, 3, 0, 7);
  pen.fill();
  const said = `peak ${bytesText(role.peak)}`;
  const w = pen.measureText(said).width;
  haloed(said, x + 7 + w > GUTTER + width ? x - 7 - w : x + 7, y + 10);
}

// Text that stays legible over lines.
function haloed(said, x, y) {
  const color = pen.fillStyle;
  pen.strokeStyle = colors.panel;
  pen.lineWidth = 3;
  pen.lineJoin = "round";
  pen.strokeText(said, x, y);
  pen.fillStyle = color;
  pen.fillText(said, x, y);
}

// Nanoseconds between two marks: 1, 2 or 5 times a power of ten, at least 110 pixels apart.
function tickStep() {
  const least = (state.range[1] - state.range[0]) / Math.max(2, width / 110);
  const power = 10 ** Math.floor(Math.log10(least));
  return power * [1, 2, 5, 10].find((m) => m * power >= least);
}

function drawAxis() {
  const [begin, finish] = state.range;
  const step = tickStep();
  pen.fillStyle = colors.panel;
  pen.fillRect(0, 0, GUTTER + width + 6, AXIS);
  pen.font = `11px ${FONT}`;
  for (let t = Math.ceil(begin / step) * step; t <= finish; t += step) {
    const x = Math.round(toX(t)) + 0.5;
    pen.fillStyle = colors.line;
    pen.fillRect(x, AXIS - 5, 1, 5);
    pen.fillStyle = colors.soft;
    const digits = Math.max(0, Math.min(6, 6 - Math.floor(Math.log10(step))));
    const said = `${(t / 1e6).toFixed(digits)} ms`;
    if (x + 4 + pen.measureText(said).width < GUTTER + width) pen.fillText(said, x + 4, AXIS / 2 + 1);
  }
}

function drawGrid() {
  const [begin, finish] = state.range;
  const step = tickStep();
  pen.fillStyle = colors.line;
  pen.globalAlpha = 0.6;
  for (let t = Math.ceil(begin / step) * step; t <= finish; t += step) pen.fillRect(Math.round(toX(t)), AXIS, 1, height);
  pen.globalAlpha = 1;
}

function drawName(row, y) {
  pen.fillStyle = row.kind === "header" ? colors.raised : colors.panel;
  pen.fillRect(0, y - 1, GUTTER - 1, row.height + 2);
  pen.fillStyle = row.kind === "header" ? colors.text : colors.soft;
  pen.font = `${row.kind === "header" ? "600 " : ""}11px ${FONT}`;
  const middle = y + row.height / 2 + 0.5;
  if (row.kind === "header") {
    const { role, run } = row.group;
    const said = `${collapsed.has(row.group.key) ? "▸" : "▾"} role ${role.index}`;
    pen.fillText(said, 8, middle);
    const x = 14 + pen.measureText(said).width;
    pen.font = `11px ${FONT}`;
    pen.fillStyle = colors.soft;
    const rest = RUNS.length > 1 ? run.source : `${role.num_devices} device${role.num_devices === 1 ? "" : "s"}`;
    pen.fillText(rest, x, middle, GUTTER - 6 - x);
  } else if (row.kind === "lane") {
    pen.fillText(row.lane.name, 20, middle, GUTTER - 26);
  } else {
    pen.fillText("memory", 20, y + 9);
    pen.fillStyle = colors.faint;
    pen.fillText(`${bytesText(row.group.role.persistent)} lasting`, 20, y + 23, GUTTER - 26);
  }
}

function outline(i, color, thick) {
  const row = rows.find((r) => r.kind === "lane" && r.lane.index === col.lane[i]);
  if (!row) return null;
  const y = row.y - scroller.scrollTop;
  const x = Math.max(GUTTER - 3, toX(start[i]));
  const w = Math.max(3, Math.min(toX(end[i]), GUTTER + width + 3) - x);
  if (x > GUTTER + width || x + w < GUTTER || y < AXIS - row.height) return null;
  pen.strokeStyle = color;
  pen.lineWidth = thick;
  pen.strokeRect(x - 0.5, y - 0.5, w + 0.5, row.height + 1);
  return { x, y, w, h: row.height };
}

const MOST_ARROWS = 16;

// Lines from what the selected task needs to it, and from it to what needs it.
function drawArrows(i) {
  const pairs = [...needs[i].map((n) => [n, i]), ...feeds[i].map((n) => [i, n])].slice(0, MOST_ARROWS);
  pen.strokeStyle = colors.select;
  pen.globalAlpha = 0.55;
  pen.lineWidth = 1.2;
  for (const [a, b] of pairs) {
    const from = rows.find((r) => r.kind === "lane" && r.lane.index === col.lane[a]);
    const to = rows.find((r) => r.kind === "lane" && r.lane.index === col.lane[b]);
    if (!from || !to) continue;
    const [x0, x1] = [toX(end[a]), toX(start[b])];
    const y0 = from.y + from.height / 2 - scroller.scrollTop;
    const y1 = to.y + to.height / 2 - scroller.scrollTop;
    const bow = Math.max(14, Math.min(60, Math.abs(x1 - x0) / 2));
    pen.beginPath();
    pen.moveTo(x0, y0);
    pen.bezierCurveTo(x0 + bow, y0, x1 - bow, y1, x1, y1);
    pen.stroke();
  }
  pen.globalAlpha = 1;
}

function draw() {
  pen.textBaseline = "middle";
  pen.fillStyle = colors.panel;
  pen.fillRect(0, 0, GUTTER + width + 6, height);
  drawGrid();
  const top = scroller.scrollTop;
  const visible = rows.filter((row) => row.y + row.height > top + AXIS && row.y < top + height);
  pen.save();
  pen.beginPath();
  pen.rect(GUTTER, AXIS, width, height - AXIS);
  pen.clip();
  const painters = { lane: drawLane, header: drawHeader, memory: drawMemory };
  for (const row of visible) painters[row.kind](row, row.y - top);
  if (state.hovered >= 0 && state.hovered !== state.selected) outline(state.hovered, colors.soft, 1);
  if (state.selected >= 0) {
    drawArrows(state.selected);
    outline(state.selected, colors.select, 2);
  }
  pen.restore();
  for (const row of visible) drawName(row, row.y - top);
  drawAxis();
  pen.fillStyle = colors.line;
  pen.fillRect(GUTTER - 1, 0, 1, height);
}

let isDue = false;
function redraw() {
  if (isDue) return;
  isDue = true;
  requestAnimationFrame(() => {
    isDue = false;
    draw();
  });
}
