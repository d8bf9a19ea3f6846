// Mouse, wheel and keys on the timeline.

const tooltip = $("tooltip");

function rowAt(y) {
  const at = y + scroller.scrollTop;
  return y < AXIS ? undefined : rows.find((row) => at >= row.y && at <= row.y + row.height);
}

// The task under a point, with two pixels to spare on both sides of short ones; -1 where there is none.
function spanAt(x, y) {
  const row = rowAt(y);
  if (!row || row.kind !== "lane" || x < GUTTER) return -1;
  const { lane } = row;
  const t = toTime(x);
  const spare = toTime(x + 2) - t;
  const k = above(lane.start, t) - 1;
  if (k >= 0 && lane.end[k] >= t) return lane.spans[k];
  if (k >= 0 && lane.end[k] >= t - spare) return lane.spans[k];
  return k + 1 < lane.spans.length && lane.start[k + 1] <= t + spare ? lane.spans[k + 1] : -1;
}

function point(event) {
  const box = canvas.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
}

function memoryAt(group, t) {
  const k = above(group.role.times, t) - 1;
  return k < 0 ? 0 : group.role.levels[k];
}

function showTooltip(event, lines) {
  tooltip.replaceChildren(...lines);
  tooltip.hidden = false;
  const { width: w, height: h } = tooltip.getBoundingClientRect();
  const x = event.clientX + 14 + w > innerWidth ? event.clientX - w - 10 : event.clientX + 14;
  const y = event.clientY + 16 + h > innerHeight ? event.clientY - h - 10 : event.clientY + 16;
  tooltip.style.left = `${Math.max(4, x)}px`;
  tooltip.style.top = `${Math.max(4, y)}px`;
}

function spanLines(i) {
  const shown = col.exposed[i] ? `, ${timeText(col.exposed[i])} exposed` : isKernel(i) ? "" : ", hidden";
  const first = (reasonsOf.get(i) ?? []).reduce((a, b) => (a && a.ns >= b.ns ? a : b), null);
  return [
    el("b", {}, opText(i)), ` ${timeText(col.seconds[i])}${shown}`,
    el("div", { class: "soft" }, [text("module", i), shortLine(text("line", i))].filter(Boolean).join(", ")),
    text("layout", i) && el("div", { class: "soft mono" }, text("layout", i)),
    first && el("div", {}, `${first.kind}: ${first.text}`),
  ].filter(Boolean);
}

function hover(event) {
  const [x, y] = point(event);
  const i = spanAt(x, y);
  const row = rowAt(y);
  if (i !== state.hovered) {
    state.hovered = i;
    redraw();
  }
  canvas.classList.toggle("over", i >= 0 || row?.kind === "header");
  if (i >= 0) showTooltip(event, spanLines(i));
  else if (row?.kind === "memory" && x >= GUTTER) {
    const bytes = memoryAt(row.group, toTime(x));
    showTooltip(event, [el("b", {}, bytesText(bytes)), ` at ${timeText(toTime(x))}`]);
  } else tooltip.hidden = true;
}

function leave() {
  tooltip.hidden = true;
  state.hovered = -1;
  redraw();
}

const CLICK = 4; // pixels: what moves less is a click

function press(event) {
  if (event.button !== 0) return;
  scroller.focus({ preventScroll: true });
  canvas.setPointerCapture(event.pointerId);
  const [x0, y0] = [event.clientX, event.clientY];
  const [begin, finish] = state.range;
  let isDrag = false;
  const move = (e) => {
    const dx = e.clientX - x0;
    isDrag = isDrag || Math.abs(dx) > CLICK;
    if (!isDrag) return;
    canvas.classList.add("dragging");
    tooltip.hidden = true;
    const by = (dx / width) * (finish - begin);
    setRange(begin - by, finish - by);
  };
  const stop = (e) => {
    canvas.removeEventListener("pointermove", move);
    canvas.classList.remove("dragging");
    if (!isDrag && Math.abs(e.clientY - y0) <= CLICK) click(e);
  };
  canvas.addEventListener("pointermove", move);
  canvas.addEventListener("pointerup", stop, { once: true });
}

function click(event) {
  const [x, y] = point(event);
  const row = rowAt(y);
  if (row?.kind === "header") toggle(row.group);
  else if (row?.kind === "memory") openTab("memory", row.group);
  else select(spanAt(x, y));
}

function wheel(event) {
  event.preventDefault();
  const unit = event.deltaMode === 1 ? 16 : 1; // lines or pixels
  if (event.shiftKey && scroller.scrollHeight > scroller.clientHeight) {
    scroller.scrollTop += (event.deltaY || event.deltaX) * unit;
  } else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
    pan((event.deltaX * unit) / width);
  } else {
    const [x] = point(event);
    zoom(Math.exp(event.deltaY * unit * 0.0016), toTime(Math.max(GUTTER, x)));
  }
}

// Selects the task before or behind the selected one in its lane.
function along(by) {
  if (state.selected < 0) return;
  const { spans } = LANES[col.lane[state.selected]];
  const next = spans[spans.indexOf(state.selected) + by];
  if (next !== undefined) select(next);
}

const middle = () => (state.range[0] + state.range[1]) / 2;
const KEYS = {
  w: () => zoom(0.72, middle()), s: () => zoom(1 / 0.72, middle()), a: () => pan(-0.16), d: () => pan(0.16),
  ArrowUp: () => zoom(0.72, middle()), ArrowDown: () => zoom(1 / 0.72, middle()),
  ArrowLeft: () => pan(-0.16), ArrowRight: () => pan(0.16), 0: fit, e: nextExposed, "[": () => along(-1),
  "]": () => along(1), f: () => state.selected >= 0 && zoomTo(state.selected), Escape: () => select(-1),
};

function key(event) {
  const isTyping = event.target.closest("input, textarea, select");
  const isInTable = event.target.closest(".grid, .scroll, #details") && event.key.startsWith("Arrow");
  if (event.ctrlKey || event.metaKey || event.altKey || isTyping || isInTable || !KEYS[event.key]) return;
  event.preventDefault();
  KEYS[event.key]();
}

canvas.addEventListener("pointermove", (event) => event.buttons || hover(event));
canvas.addEventListener("pointerleave", leave);
canvas.addEventListener("pointerdown", press);
canvas.addEventListener("dblclick", () => state.selected >= 0 && zoomTo(state.selected));
scroller.addEventListener("wheel", wheel, { passive: false });
scroller.addEventListener("scroll", redraw);
document.addEventListener("keydown", key);
