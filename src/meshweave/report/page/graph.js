// The selected task with what it needs and feeds, two steps away on both sides, as a picture to walk in.

const NODE = { width: 176, height: 36, gap: 9, apart: 54 };
const MOST_NODES = 7; // in a column; the longest are shown

const svg = (tag, attributes = {}, ...children) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
};

// Columns -2 to 2 around `center`; a task stands where it is met first, and what does not fit is counted.
function neighbourhood(center) {
  const seen = new Set([center]);
  const grow = (from, next) => {
    const found = [...new Set(from.flatMap((i) => next[i]))].filter((i) => !seen.has(i));
    found.sort((a, b) => Math.max(col.exposed[b], col.seconds[b]) - Math.max(col.exposed[a], col.seconds[a]) || a - b);
    const shown = found.slice(0, MOST_NODES).sort((a, b) => start[a] - start[b] || a - b);
    shown.forEach((i) => seen.add(i));
    return { shown, more: found.length - shown.length };
  };
  const [before, after] = [grow([center], needs), grow([center], feeds)];
  const columns = [grow(before.shown, needs), before, { shown: [center], more: 0 }, after, grow(after.shown, feeds)];
  return { columns, seen };
}

function graphNode(i, x, y, isCenter) {
  const cut = (said, most) => (said.length > most ? `${said.slice(0, most - 1)}…` : said);
  const where = text("module", i).split(".").slice(-2).join(".");
  const shown = col.exposed[i] ? `, ${timeText(col.exposed[i])} exposed` : "";
  return svg("g", { class: `node${isCenter ? " center" : ""}`, "data-span": i, transform: `translate(${x},${y})`, onclick: () => select(i) },
    svg("title", {}, `${text("op", i)} ${text("name", i)} ${text("module", i)}`),
    svg("rect", { width: NODE.width, height: NODE.height, rx: 5 }),
    svg("rect", { width: 4, height: NODE.height, rx: 2, style: `fill:var(--${colorName(text("cls", i))});stroke:none` }),
    svg("text", { x: 11, y: 15 }, cut(`${opText(i)} ${where}`, 25)),
    svg("text", { x: 11, y: 29, class: "small" }, cut(`${timeText(col.seconds[i])}${shown}`, 34)));
}

function graphTab() {
  const center = state.selected;
  if (center < 0) return [el("div", { class: "scroll soft" }, "Select a task to see what it needs and what needs it.")];
  const { columns, seen } = neighbourhood(center);
  const most = Math.max(...columns.map((c) => c.shown.length + (c.more ? 0.6 : 0)));
  const tall = Math.max(1, most) * (NODE.height + NODE.gap) + 34;
  const wide = 5 * NODE.width + 4 * NODE.apart + 20;
  const places = new Map();
  const picture = svg("svg", { width: wide, height: tall, viewBox: `0 0 ${wide} ${tall}`, role: "img", "aria-label": "The task and its neighbours" });
  const boxes = [];
  const captions = ["needed by what it needs", "it needs", "selected", "need it", "need these"];
  columns.forEach(({ shown, more }, c) => {
    const x = 10 + c * (NODE.width + NODE.apart);
    const top = 24 + (tall - 34 - shown.length * (NODE.height + NODE.gap)) / 2;
    if (shown.length) boxes.push(svg("text", { x, y: 14, class: "caption" }, captions[c]));
    shown.forEach((i, k) => {
      const y = top + k * (NODE.height + NODE.gap);
      places.set(i, [x, y + NODE.height / 2]);
      boxes.push(graphNode(i, x, y, i === center));
    });
    if (more) boxes.push(svg("text", { x: x + 4, y: top + shown.length * (NODE.height + NODE.gap) + 10, class: "more" }, `and ${more} more`));
  });
  const edges = [...seen].flatMap((i) => needs[i].filter((n) => seen.has(n)).map((n) => [n, i]));
  for (const [a, b] of edges) {
    const [[x0, y0], [x1, y1]] = [places.get(a), places.get(b)];
    const bow = NODE.apart / 2;
    const isHot = (a === center || b === center) && col.exposed[a] > 0;
    const path = x0 < x1 ? `M${x0 + NODE.width},${y0} C${x0 + NODE.width + bow},${y0} ${x1 - bow},${y1} ${x1},${y1}`
      : `M${x0 + NODE.width},${y0} c${bow},0 ${bow},${y1 - y0} 0,${y1 - y0}`;
    picture.append(svg("path", { d: path, class: isHot ? "hot" : "" }));
  }
  picture.append(...boxes);
  return [el("div", { class: "graph" }, picture)];
}
