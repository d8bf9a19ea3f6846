// A table that draws only the rows in sight, sorted by clicking a column's head.

const ROW = 24; // pixels
const SPARE = 12; // rows drawn beyond the visible ones

const NARROW = 720; // pixels of the window, as in page.css
const LEAST = 88; // pixels of a column that can shrink, in a narrow window

// columns: {name, width, value(row), show(row), number, mono, tail: cut at the front where there is no room, spare: left out in a narrow window}. pick(row) is called for a click, isSelected(row) marks rows.
function makeTable({ columns: all, rows: given, pick, isSelected = () => false, sort = null, empty = "Nothing here." }) {
  const isNarrow = window.innerWidth <= NARROW;
  const columns = all.filter((c) => !(isNarrow && c.spare));
  const widths = columns.map((c) => (isNarrow ? c.width.replace(/minmax\(\d+px/, `minmax(${LEAST}px`) : c.width));
  const held = { rows: given, shown: [], sort: sort ?? { at: -1, isDown: true } };
  const head = el("div", { class: "head", role: "row" });
  const body = el("div", { role: "rowgroup", style: "position:relative" });
  const root = el("div", { class: "grid", role: "table", tabindex: "0" }, head, body);
  root.style.setProperty("--columns", widths.join(" "));
  const least = widths.reduce((sum, width) => sum + Number.parseInt(width.replace("minmax(", ""), 10) + 10, 24);
  root.style.setProperty("--width", `${least}px`);

  function arrange() {
    const { at, isDown } = held.sort;
    held.shown = [...held.rows];
    if (at < 0) return;
    const { value } = columns[at];
    const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
    held.shown.sort((a, b) => (isDown ? -1 : 1) * order(value(a), value(b)));
  }

  function drawHead() {
    head.replaceChildren(...columns.map((c, at) => {
      const isBy = held.sort.at === at;
      const mark = isBy ? (held.sort.isDown ? " ↓" : " ↑") : "";
      const sorted = isBy ? (held.sort.isDown ? "descending" : "ascending") : null;
      const press = () => {
        held.sort = { at, isDown: isBy ? !held.sort.isDown : Boolean(c.number) };
        refresh();
      };
      return el("div", { role: "columnheader", class: c.number ? "number" : "", "aria-sort": sorted },
        el("button", { onclick: press }, c.name + mark));
    }));
  }

  function drawRows() {
    body.style.height = `${held.shown.length * ROW}px`;
    const first = Math.max(0, Math.floor(root.scrollTop / ROW) - SPARE);
    const last = Math.min(held.shown.length, Math.ceil((root.scrollTop + root.clientHeight) / ROW) + SPARE);
    const made = [];
    for (let at = first; at < last; at++) {
      const row = held.shown[at];
      const name = `row${pick ? " pick" : ""}${isSelected(row) ? " selected" : ""}`;
      const cells = columns.map((c) => {
        const cell = c.show ? c.show(row) : c.value(row);
        const title = typeof cell === "string" ? cell : null;
        const name = ["number", "mono", "tail"].filter((key) => c[key]).join(" ");
        return el("div", { role: "cell", class: name, title }, c.tail ? el("bdi", { dir: "ltr" }, cell) : cell);
      });
      made.push(el("div", { class: name, role: "row", style: `top:${at * ROW}px`, onclick: pick ? () => pick(row) : () => {} }, cells));
    }
    if (!held.shown.length) made.push(el("div", { class: "empty" }, empty));
    body.replaceChildren(...made);
  }

  function refresh(rows = held.rows) {
    held.rows = rows;
    arrange();
    drawHead();
    drawRows();
  }

  // Brings a selected row into view.
  function follow() {
    const at = held.shown.findIndex(isSelected);
    const y = at * ROW;
    if (at >= 0 && (y < root.scrollTop || y > root.scrollTop + root.clientHeight - 3 * ROW)) root.scrollTop = Math.max(0, y - root.clientHeight / 3);
    drawRows();
  }

  root.addEventListener("scroll", drawRows);
  new ResizeObserver(drawRows).observe(root);
  refresh();
  return { root, refresh, follow, drawRows, rows: () => held.shown };
}
