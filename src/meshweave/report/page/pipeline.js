// Stages x time: what each role does for which microbatch, and why it waits in between. Shows the same time as the
// timeline.

const PIPELINE = { row: 26, gap: 4, axis: 18 }; // pixels
const PASS_COLORS = { F: "matmul", B: "attention", I: "all_reduce", W: "all_gather" };
const PASS_TEXT = { F: "forward", B: "backward", I: "backward, inputs", W: "backward, weights" };
const pipe = { canvas: null, pen: null, width: 0, gutter: 0, rows: [], hovered: null };

// Rows of all runs; those of a measured step stand below those of the model.
const PIPELINES = RUNS.flatMap((run, number) => (run.pipeline ? [{ run, number, ...run.pipeline }] : []));

for (const its of PIPELINES) {
  its.blocks = its.blocks.map(([role, kind, stage, microbatch, from, to, span]) => ({ role, kind: S[kind], stage, microbatch, from, to, span, its, half: 0 }));
  its.gaps = its.gaps.map(([role, from, to, before, source, span, message, why]) => (
    { role, from, to, span, message, why: S[why], its, before: its.blocks[before], source: its.blocks[source], isGap: true }));
  its.rows = its.run.roles.map((role, place) => {
    const blocks = its.blocks.filter((b) => b.role === role.index).sort((a, b) => a.from - b.from);
    const gaps = its.gaps.filter((g) => g.role === role.index);
    // Actions that run as one overlap: they share the height of the row.
    for (let k = 1; k < blocks.length; k++) if (blocks[k].from < blocks[k - 1].to && blocks[k - 1].half !== 2) [blocks[k - 1].half, blocks[k].half] = [1, 2];
    return { role, stages: its.stages[place], blocks, gaps, ends: Float64Array.from(blocks, (b) => b.to), gapEnds: Float64Array.from(gaps, (g) => g.to) };
  });
}

const blockText = (b) => (PASS_TEXT[b.kind] ? `${b.kind}${b.microbatch}, stage ${b.stage}` : b.kind);

function layOutPipeline() {
  pipe.rows = [];
  let y = PIPELINE.axis;
  for (const its of PIPELINES) {
    if (PIPELINES.length > 1) y += 15;
    for (const row of its.rows) {
      pipe.rows.push({ ...row, its, y });
      y += PIPELINE.row + PIPELINE.gap;
    }
  }
  return y + 2;
}

const pipeX = (t) => pipe.gutter + ((t - state.range[0]) / (state.range[1] - state.range[0])) * pipe.width;
const pipeTime = (x) => state.range[0] + ((x - pipe.gutter) / pipe.width) * (state.range[1] - state.range[0]);

function drawPipeline() {
  const { canvas: made } = pipe;
  if (!made?.isConnected) return;
  const ratio = window.devicePixelRatio || 1;
  const tall = layOutPipeline();
  const wide = made.clientWidth;
  made.width = Math.round(wide * ratio);
  made.height = Math.round(tall * ratio);
  made.style.height = `${tall}px`;
  const ink = pipe.pen;
  ink.setTransform(ratio, 0, 0, ratio, 0, 0);
  pipe.gutter = wide < 560 ? 62 : 122;
  pipe.width = Math.max(50, wide - pipe.gutter - 8);
  ink.textBaseline = "middle";
  ink.fillStyle = colors.panel;
  ink.fillRect(0, 0, wide, tall);
  ink.save();
  ink.beginPath();
  ink.rect(pipe.gutter, 0, pipe.width, tall);
  ink.clip();
  drawPipelineAxis(ink, tall);
  for (const row of pipe.rows) drawPipelineRow(ink, row);
  if (pipe.hovered) outlinePipeline(ink, pipe.hovered);
  ink.restore();
  for (const row of pipe.rows) drawPipelineName(ink, row);
}

function drawPipelineAxis(ink, tall) {
  const [begin, finish] = state.range;
  const step = tickStep();
  ink.font = `11px ${FONT}`;
  for (let t = Math.ceil(begin / step) * step; t <= finish; t += step) {
    const x = Math.round(pipeX(t));
    ink.fillStyle = colors.line;
    ink.fillRect(x, PIPELINE.axis - 4, 1, tall);
    ink.fillStyle = colors.soft;
    const said = `${(t / 1e6).toFixed(Math.max(0, Math.min(6, 6 - Math.floor(Math.log10(step)))))} ms`;
    if (x + 4 + ink.measureText(said).width < pipe.gutter + pipe.width) ink.fillText(said, x + 4, PIPELINE.axis / 2);
  }
}

function drawPipelineRow(ink, row) {
  const [begin, finish] = state.range;
  const h = PIPELINE.row;
  for (let k = above(row.gapEnds, begin); k < row.gaps.length && row.gaps[k].from < finish; k++) {
    const [x0, x1] = [pipeX(row.gaps[k].from), pipeX(row.gaps[k].to)];
    ink.fillStyle = colors.idle;
    ink.globalAlpha = 0.55;
    ink.fillRect(x0, row.y, Math.max(x1 - x0, 0.5), h);
    ink.globalAlpha = 0.8;
    ink.fillStyle = colors.exposed; // the message is under way
    const wide = Math.max(0, ((x1 - x0) * row.gaps[k].message) / (row.gaps[k].to - row.gaps[k].from));
    if (row.gaps[k].source) ink.fillRect(x1 - wide, row.y + h - 3, wide, 3);
    ink.globalAlpha = 1;
  }
  let k = 0;
  while (k < row.blocks.length && row.ends[k] <= begin) k++;
  for (; k < row.blocks.length && row.blocks[k].from < finish; k++) drawBlock(ink, row, row.blocks[k]);
}

// Later stages of a role are lighter, as in the figures of the papers.
function shadeOf(row, block) {
  const turn = row.stages.indexOf(block.stage);
  return PASS_COLORS[block.kind] && row.stages.length > 1 ? 1 - 0.55 * (turn / Math.max(1, row.stages.length - 1)) : 1;
}

function drawBlock(ink, row, block) {
  const x = pipeX(block.from);
  const w = Math.max(0.5, pipeX(block.to) - x);
  const h = block.half ? PIPELINE.row / 2 - 0.5 : PIPELINE.row;
  const y = block.half === 2 ? row.y + h + 1 : row.y;
  const shade = shadeOf(row, block);
  ink.fillStyle = colors[PASS_COLORS[block.kind] ?? "other"];
  ink.globalAlpha = shade;
  ink.fillRect(x, y, w > 4 ? w - 0.75 : w, h);
  ink.globalAlpha = 1;
  if (!PASS_COLORS[block.kind]) return;
  ink.fillStyle = shade < 0.7 ? colors.text : "#fff";
  const said = String(block.microbatch);
  const fits = (size) => {
    ink.font = `600 ${size}px ${FONT}`;
    return ink.measureText(said).width + 1.5 <= w;
  };
  if (!(fits(block.half ? 10 : 11) || fits(9) || fits(8))) return;
  const least = ink.measureText(said).width;
  const low = row.stages.length > 1 ? `s${block.stage}` : "";
  const isBoth = low && w > least + 20;
  const left = x + (w - least - (isBoth ? 13 : 0)) / 2;
  ink.fillText(said, left, y + h / 2 + 0.5);
  if (!isBoth) return;
  ink.font = `9px ${FONT}`;
  ink.fillText(low, left + least + 2, y + h / 2 + 3);
}

function drawPipelineName(ink, row) {
  const [y, wide] = [row.y + PIPELINE.row / 2, pipe.gutter - 8];
  if (PIPELINES.length > 1 && row.role === row.its.rows[0].role) {
    ink.font = `10px ${FONT}`;
    ink.fillStyle = colors.soft;
    ink.fillText(row.its.run.source, 6, row.y - 8);
  }
  ink.font = `600 11px ${FONT}`;
  ink.fillStyle = colors.text;
  const said = `role ${row.role.index}`;
  const isNarrow = pipe.gutter < 100;
  ink.fillText(said, 6, isNarrow ? y - 6 : y);
  const after = ink.measureText(said).width + 12;
  ink.font = `${isNarrow ? 9 : 10}px ${FONT}`;
  ink.fillStyle = colors.soft;
  const list = `stage${row.stages.length > 1 ? "s" : ""} ${row.stages.join(", ")}`;
  if (isNarrow) ink.fillText(list, 6, y + 7, wide);
  else ink.fillText(list, after, y, wide - after);
}

function outlinePipeline(ink, item) {
  const row = pipe.rows.find((r) => r.its === item.its && r.role.index === item.role);
  ink.strokeStyle = colors.select;
  ink.lineWidth = 1.5;
  ink.strokeRect(pipeX(item.from), row.y, Math.max(2, pipeX(item.to) - pipeX(item.from)), PIPELINE.row);
  const block = item.isGap ? item.source : null; // what it waits for
  const other = block && pipe.rows.find((r) => r.its === block.its && r.role.index === block.role);
  if (!other) return;
  ink.strokeRect(pipeX(block.from), other.y, Math.max(2, pipeX(block.to) - pipeX(block.from)), PIPELINE.row);
  ink.beginPath();
  ink.moveTo(pipeX(block.to), other.y + PIPELINE.row / 2);
  ink.lineTo(pipeX(item.to), row.y + PIPELINE.row / 2);
  ink.stroke();
}

function pipelineItemAt(event) {
  const box = pipe.canvas.getBoundingClientRect();
  const [x, y] = [event.clientX - box.left, event.clientY - box.top];
  const row = pipe.rows.find((r) => y >= r.y && y < r.y + PIPELINE.row);
  if (!row || x < pipe.gutter) return null;
  const t = pipeTime(x);
  const isLow = y > row.y + PIPELINE.row / 2;
  const hit = (b) => b.from <= t && t < b.to && (!b.half || (b.half === 2) === isLow);
  return row.blocks.find(hit) ?? row.gaps.find((g) => g.from <= t && t < g.to) ?? null;
}

function pipelineLines(item) {
  const times = `${timeText(item.from)} to ${timeText(item.to)}`;
  if (!item.isGap) {
    const said = PASS_TEXT[item.kind] ? `${PASS_TEXT[item.kind]} of microbatch ${item.microbatch}, stage ${item.stage}` : item.kind;
    return [el("b", {}, said), ` ${timeText(item.to - item.from)}`, el("div", { class: "soft" }, `role ${item.role}, ${times}`)];
  }
  const before = item.before ? ` before ${blockText(item.before)}` : " after its last pass";
  const message = item.source && item.message ? el("div", {}, `${timeText(item.message)} of it for the message`) : "";
  return [el("b", {}, `role ${item.role} waits ${timeText(item.to - item.from)}`), before, el("div", {}, `for ${item.why}`), message, el("div", { class: "soft" }, times)].filter(Boolean);
}

function hoverPipeline(event) {
  const item = event.type === "pointerleave" ? null : pipelineItemAt(event);
  if (item !== pipe.hovered) {
    pipe.hovered = item;
    drawPipeline();
  }
  if (item) showTooltip(event, pipelineLines(item));
  else tooltip.hidden = true;
}

// A drag moves the picture; a click selects the first task of a block, or the communication that a gap waits for.
function pressPipeline(event) {
  if (event.button !== 0) return;
  pipe.canvas.setPointerCapture(event.pointerId);
  const [from, [begin, finish]] = [event.clientX, state.range];
  let isDrag = false;
  const move = (e) => {
    const dx = e.clientX - from;
    isDrag = isDrag || Math.abs(dx) > CLICK;
    if (isDrag) setRange(begin - (dx / pipe.width) * (finish - begin), finish - (dx / pipe.width) * (finish - begin));
  };
  pipe.canvas.addEventListener("pointermove", move);
  pipe.canvas.addEventListener("pointerup", (e) => {
    pipe.canvas.removeEventListener("pointermove", move);
    const item = pipelineItemAt(e);
    if (!isDrag && item && item.span >= 0) select(item.span);
  }, { once: true });
}

function wheelPipeline(event) {
  if (event.shiftKey) return;
  event.preventDefault();
  const x = event.clientX - pipe.canvas.getBoundingClientRect().left;
  zoom(Math.exp(event.deltaY * (event.deltaMode === 1 ? 16 : 1) * 0.0016), pipeTime(Math.max(pipe.gutter, x)));
}

function zoomToGap(gap) {
  pipe.hovered = gap;
  const from = Math.min(gap.from, gap.source ? gap.source.from : gap.from);
  const around = (gap.to - from) * 0.4;
  setRange(from - around, gap.to + around);
}

function pipelineTab() {
  pipe.canvas = el("canvas", { class: "pipeline", role: "img", "aria-label": PIPELINES.map((its) => its.text).join("; ") });
  pipe.pen = pipe.canvas.getContext("2d");
  pipe.canvas.style.height = `${layOutPipeline()}px`;
  pipe.canvas.addEventListener("pointermove", (event) => event.buttons || hoverPipeline(event));
  pipe.canvas.addEventListener("pointerleave", hoverPipeline);
  pipe.canvas.addEventListener("pointerdown", pressPipeline);
  pipe.canvas.addEventListener("wheel", wheelPipeline, { passive: false });
  requestAnimationFrame(drawPipeline);
  const used = new Set(PIPELINES.flatMap((its) => its.blocks.map((b) => b.kind)));
  const item = (style, said) => el("span", {}, el("i", { class: "swatch", style }), said);
  const color = (name) => `background:var(--${name})`;
  const legend = [
    ...Object.keys(PASS_COLORS).filter((kind) => used.has(kind)).map((kind) => item(color(PASS_COLORS[kind]), `${kind} ${PASS_TEXT[kind]}`)),
    item(`${color("idle")};opacity:.55`, "waits"), item(`${color("exposed")};height:3px`, "for a message"),
    PIPELINES.some((its) => its.stages.some((list) => list.length > 1)) ? el("span", {}, "lighter: later stages of a role") : "",
    [...used].some((kind) => !PASS_COLORS[kind]) ? item(color("other"), "update") : ""];
  const gaps = PIPELINES.flatMap((its) => its.gaps);
  const length = (g) => g.to - g.from;
  const columns = [
    ...(PIPELINES.length > 1 ? [spare(textColumn("step", (g) => g.its.run.source, "72px"))] : []),
    countColumn("role", (g) => g.role, "36px"), timeColumn("waits", length, "74px"),
    spare(timeColumn("from", (g) => g.from, "74px")), textColumn("before", (g) => (g.before ? blockText(g.before) : "the end"), "minmax(88px, .6fr)"),
    textColumn("waits for", (g) => g.why, "minmax(120px, 1.4fr)"), spare({ ...timeColumn("message", (g) => (g.source ? g.message : 0), "74px"), show: (g) => (g.source && g.message ? timeText(g.message) : "") })];
  const made = makeTable({ columns, rows: gaps, pick: zoomToGap, sort: { at: columns.findIndex((c) => c.name === "waits"), isDown: true }, empty: "No role waits between its actions." });
  return [el("div", { class: "tools pipeline-text" }, PIPELINES.map((its) => el("span", {}, PIPELINES.length > 1 ? [sourceTag(its.run), " "] : "", el("b", {}, its.text)))),
    el("div", { class: "pipeline-view" }, el("div", { class: "keys" }, legend), pipe.canvas, el("h3", {}, "Longest gaps"), made.root)];
}
