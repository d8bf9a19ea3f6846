// Puts the parts together, and lets tests see and drive the page.

function resize() {
  fitCanvas();
  redraw();
  paintMinimap();
  drawPipeline();
}

on("resize", resize);
on("range", () => {
  redraw();
  drawMinimap();
  drawPipeline();
  const [begin, finish] = state.range;
  $("range").textContent = `${timeText(finish - begin)} of ${timeText(TOTAL)}`;
});
on("selected", () => {
  if (state.selected >= 0) showRow(rowOf(state.selected));
  redraw();
  drawMinimap();
  drawDetails();
  if (state.tab === "graph") openTab("graph");
  table.made?.follow();
});

function showRow(row) {
  const top = row.y - AXIS;
  const bottom = row.y + row.height;
  if (top >= scroller.scrollTop && bottom <= scroller.scrollTop + height) return;
  const header = rows.find((other) => other.kind === "header" && other.group === row.group).y - AXIS;
  scroller.scrollTop = bottom - header <= height ? header : top;
}

$("fit").addEventListener("click", fit);
$("next-exposed").addEventListener("click", nextExposed);
$("zoom-selected").addEventListener("click", () => state.selected >= 0 && zoomTo(state.selected));
$("splitter").addEventListener("pointerdown", (event) => {
  $("splitter").setPointerCapture(event.pointerId);
  const [from, high] = [event.clientY, scroller.clientHeight];
  const move = (e) => {
    const most = $("left").clientHeight - 240;
    scroller.style.flexBasis = `${Math.min(Math.max(high + e.clientY - from, 90), most)}px`;
  };
  $("splitter").addEventListener("pointermove", move);
  $("splitter").addEventListener("pointerup", () => $("splitter").removeEventListener("pointermove", move), { once: true });
});

// Zooms in and out and moves for n frames; returns how long each took to draw, in milliseconds. One pixel is read back
// from a copy each time, so that what the browser puts off is counted.
function measureFrames(n) {
  const before = state.range;
  const probe = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const found = [];
  for (let k = 0; k < n; k++) {
    const share = 0.5 - 0.5 * Math.cos((2 * Math.PI * k) / n);
    const wide = TOTAL * Math.exp(-6 * share);
    const low = (TOTAL - wide) * (k / n);
    state.range = [low, low + wide];
    const began = performance.now();
    draw();
    drawMinimap();
    probe.drawImage(canvas, 0, 0, 1, 1, 0, 0, 1, 1);
    probe.getImageData(0, 0, 1, 1);
    found.push(performance.now() - began);
  }
  state.range = before;
  emit("range");
  return found;
}

// A little more than the rows need, never more than half of the column; less above a picture of the pipeline.
function startHeight() {
  const most = $("left").clientHeight * (TABS.pipeline ? 0.38 : 0.52);
  scroller.style.flexBasis = `${Math.min(contentHeight + 2, most)}px`;
}

drawSummary();
startHeight();
drawDetails();
resize();
openTab(TABS.pipeline ? "pipeline" : DATA.errors ? "errors" : DATA.diff ? "diff" : "communications");
emit("range");
new ResizeObserver(() => emit("resize")).observe(scroller);

window.meshweave = {
  state, measureFrames, select, fit, zoomTo, setRange, openTab, numSpans: N, pipelines: PIPELINES,
  // Where a task is drawn, in the page's coordinates, for tests.
  boxOf(i) {
    const box = canvas.getBoundingClientRect();
    const row = rowOf(i);
    const y = box.top + row.y - scroller.scrollTop;
    return { x: box.left + toX(start[i]), y, width: toX(end[i]) - toX(start[i]), height: row.height };
  },
  // Where a block or gap of the first pipeline is drawn, and how long a picture of all takes, in milliseconds.
  pipelineBox(kind, at) {
    const item = PIPELINES[0][kind][at];
    const box = pipe.canvas.getBoundingClientRect();
    const row = pipe.rows.find((r) => r.its === item.its && r.role.index === item.role);
    return { x: box.left + pipeX(item.from), y: box.top + row.y, width: pipeX(item.to) - pipeX(item.from), height: PIPELINE.row };
  },
  measurePipeline() {
    const began = performance.now();
    drawPipeline();
    return performance.now() - began;
  },
  tableRows: () => table.made?.rows() ?? [],
};
