// What stands below the timeline: communications, graph, memory at the peak, model against measurement, difference.

const timeColumn = (name, of, width = "84px") => ({ name, width, number: true, value: of, show: (row) => timeText(of(row)) });
const textColumn = (name, of, width, mono = false) => ({ name, width, value: of, show: of, mono });
const tailColumn = (name, of, width) => ({ ...textColumn(name, of, width), tail: true });
const countColumn = (name, of, width = "60px") => ({ name, width, number: true, value: of, show: (row) => of(row).toLocaleString("en") });
const bytesColumn = (name, of, width = "84px") => ({ name, width, number: true, value: of, show: (row) => bytesText(of(row)) });

const spare = (column) => ({ ...column, spare: true });

// communications

const foldKey = (i) => [col.phase[i], col.op[i], col.group[i], col.layout[i], col.fold[i], col.line[i]].join("/");

function communications(isFolded) {
  const found = new Map();
  for (let i = 0; i < RUNS[0].count; i++) {
    if (isKernel(i)) continue;
    const key = isFolded ? foldKey(i) : i;
    const row = found.get(key) ?? { key, ids: [], worst: i, seconds: 0, exposed: 0, bytes: 0 };
    row.ids.push(i);
    row.seconds += col.seconds[i];
    row.exposed += col.exposed[i];
    row.bytes += col.bytes[i];
    if (col.exposed[i] > col.exposed[row.worst]) row.worst = i;
    row.module = isFolded ? text("fold", i) : text("module", i);
    found.set(key, row);
  }
  return [...found.values()];
}

const table = { isFolded: true, made: null, count: el("span", {}) };

function words(row) {
  const i = row.worst;
  row.words ??= ["phase", "op", "group", "layout", "line", "name"].map((c) => text(c, i)).join(" ").toLowerCase() + ` ${row.module.toLowerCase()}`
    + (table.isFolded ? ` ${row.ids.map((k) => text("module", k)).join(" ").toLowerCase()}` : "");
  return row.words;
}

function filteredRows() {
  table.all ??= communications(table.isFolded);
  const wanted = state.filter.toLowerCase().split(/\s+/).filter(Boolean);
  const found = table.all.filter((row) => wanted.every((word) => words(row).includes(word)));
  const sum = (name) => found.reduce((total, row) => total + row[name], 0);
  const number = found.reduce((total, row) => total + row.ids.length, 0);
  table.count.textContent = `${number.toLocaleString("en")} communications, ${timeText(sum("seconds"))}, ${timeText(sum("exposed"))} exposed, ${bytesText(sum("bytes"))}`;
  return found;
}

// A row is selected with its task, or with the measured task that is the same.
function isRowSelected(row) {
  const i = state.selected < 0 || runOf[state.selected] === 0 ? state.selected : counterpart(state.selected);
  return i >= 0 && !isKernel(i) && row.key === (table.isFolded ? foldKey(i) : i);
}

function exposedCell(row) {
  const share = row.seconds ? row.exposed / row.seconds : 0;
  return el("span", { class: share > 0.5 ? "bad" : "" }, timeText(row.exposed));
}

function communicationTab() {
  const at = (column) => (row) => text(column, row.worst);
  const columns = [
    countColumn("times", (row) => row.ids.length, "42px"),
    timeColumn("time", (row) => row.seconds, "74px"),
    { name: "exposed", width: "76px", number: true, value: (row) => row.exposed, show: exposedCell },
    spare(bytesColumn("bytes", (row) => row.bytes, "76px")),
    spare(textColumn("phase", at("phase"), "64px")), textColumn("op", at("op"), "100px"), spare(textColumn("over", at("group"), "50px", true)),
    tailColumn("module", (row) => row.module, "minmax(130px, 1.1fr)"),
    spare(textColumn("value", (row) => shortTypes(text("layout", row.worst).split(": ")[0]), "minmax(104px, .5fr)", true)),
    spare(textColumn("layouts", (row) => text("layout", row.worst).split(": ").slice(1).join(": "), "minmax(130px, 1.5fr)", true)),
    spare(tailColumn("line", (row) => shortLine(text("line", row.worst)), "minmax(100px, .7fr)")),
  ];
  const pick = (row) => select(row.worst, { zoom: true });
  table.made = makeTable({ columns, rows: filteredRows(), pick, isSelected: isRowSelected, sort: { at: 2, isDown: true }, empty: "No communication has these words." });
  const search = el("input", { type: "search", id: "filter", placeholder: "Filter: op, module, layout, phase, line", "aria-label": "Filter" });
  search.value = state.filter;
  search.addEventListener("input", () => {
    state.filter = search.value;
    table.made.refresh(filteredRows());
  });
  const fold = el("input", { type: "checkbox", id: "fold", checked: table.isFolded });
  fold.addEventListener("change", () => {
    table.isFolded = fold.checked;
    table.all = null;
    table.made.refresh(filteredRows());
    table.made.follow();
  });
  return [el("div", { class: "tools" }, search, el("label", {}, fold, "repeated layers as one"), el("span", { class: "grow" }), table.count), table.made.root];
}

function filterBy(said) {
  state.filter = said;
  openTab("communications");
}

// memory at the peak

let memoryGroup = GROUPS[0];

function memoryTab() {
  const { role, number } = memoryGroup;
  const kinds = new Map();
  for (const held of role.held) kinds.set(held.kind, (kinds.get(held.kind) ?? 0) + held.bytes);
  const chosen = el("select", { class: "tool", "aria-label": "Role" }, GROUPS.map((g) => el("option", { value: g.key, selected: g === memoryGroup }, groupText(g))));
  chosen.addEventListener("change", () => openTab("memory", GROUPS.find((g) => g.key === chosen.value)));
  const share = (row) => row[1] / (role.peak || 1);
  const byKind = makeTable({ rows: [...kinds], sort: { at: 1, isDown: true }, columns: [
    textColumn("kind", (row) => row[0], "minmax(110px, 1fr)"), bytesColumn("bytes", (row) => row[1]),
    { name: "of the peak", width: "80px", number: true, value: share, show: (row) => percent(share(row)) }] });
  const pick = (held) => {
    const i = findNode(number, role.index, held.name);
    if (i >= 0) select(i, { zoom: true });
  };
  const tensors = makeTable({ rows: role.held, pick, sort: { at: 0, isDown: true }, columns: [
    bytesColumn("bytes", (h) => h.bytes), countColumn("tensors", (h) => h.count, "56px"), textColumn("kind", (h) => h.kind, "72px"), spare(textColumn("first", (h) => h.name, "minmax(110px, 1fr)", true)),
    tailColumn("module", (h) => h.module, "minmax(120px, 1.2fr)"), spare(tailColumn("line", (h) => shortLine(h.line), "minmax(110px, .8fr)"))] });
  const said = `${bytesText(role.peak)} at ${timeText(role.peak_at)}; equal ones of repeated layers in a row; a click goes to the task that makes the first`;
  return [el("div", { class: "tools" }, chosen, said, el("button", { class: "tool", onclick: () => setRange(role.peak_at - TOTAL / 40, role.peak_at + TOTAL / 40) }, "Zoom to the peak")),
    el("div", { class: "pair" }, el("div", {}, byKind.root), el("div", {}, tensors.root))];
}

// model against measurement

function errorTab() {
  const columns = [
    textColumn("class of tasks", (row) => classText(row[0]), "minmax(150px, 1fr)"), spare(countColumn("modelled tasks", (row) => row[1] || "", "110px")),
    spare(countColumn("measured tasks", (row) => row[2] || "", "110px")), timeColumn("modelled", (row) => row[3], "100px"), timeColumn("measured", (row) => row[4], "100px"),
    { name: "difference", spare: true, width: "100px", number: true, value: (row) => row[3] - row[4], show: (row) => signed(row[3] - row[4], timeText) },
    { name: "error", width: "80px", number: true, value: (row) => (row[4] ? Math.abs(row[3] / row[4] - 1) : -1), show: errorCell }];
  const said = "Sums over all roles; error is modelled / measured − 1. The host's part of a measured step has no model.";
  return [el("div", { class: "tools" }, sourceTag(RUNS[0]), `${RUNS[0].profile} ${RUNS[0].version}`, sourceTag(RUNS[1]), `${RUNS[1].profile} ${RUNS[1].version}`, el("span", { class: "grow" }), said),
    makeTable({ columns, rows: DATA.errors }).root];
}

function errorCell(row) {
  if (!row[4]) return "not measured";
  const error = row[3] / row[4] - 1;
  return el("span", { class: Math.abs(error) > 0.2 ? "bad" : "" }, signed(error, percent));
}

// difference to another plan

const SMALL_CHANGE = 5e4; // nanoseconds: what changes by less has no color

function changeText(ns) {
  return el("span", { class: ns > SMALL_CHANGE ? "bad" : ns < -SMALL_CHANGE ? "good" : "" }, signed(ns, timeText));
}

function diffTab() {
  const { a, split, rows: all } = DATA.diff;
  const changed = all.filter((row) => row[0] !== "same");
  const delta = (row) => row[3] - row[2];
  const share = el("span", {}, `A: ${a.title || a.mesh}, ${timeText(a.seconds)}. B, this page: ${RUNS[0].title || RUNS[0].mesh}, ${timeText(RUNS[0].seconds)} `,
    el("b", { class: RUNS[0].seconds > a.seconds ? "bad" : "good" }, `(${signed(RUNS[0].seconds - a.seconds, timeText)})`));
  const show = (row) => changeText(delta(row));
  const changeColumn = (name, at) => {
    const change = (row) => row[8][at] - row[7][at];
    return { name, width: "74px", number: true, value: change, show: (row) => changeText(change(row)) };
  };
  const where = makeTable({ rows: split, columns: [
    textColumn("phase", (row) => row[0], "60px"), textColumn("what", (row) => row[1], "minmax(130px, 1fr)"), timeColumn("A", (row) => row[2], "66px"),
    timeColumn("B", (row) => row[3], "66px"), { name: "change", width: "72px", number: true, value: delta, show }] });
  const pick = (row) => filterBy([row[1], row[2], row[5]].join(" "));
  const what = makeTable({ rows: changed, pick, empty: "No communication differs.", columns: [
    textColumn("", (row) => row[0], "52px"), changeColumn("exposed", 2), spare(textColumn("phase", (row) => row[1], "60px")),
    textColumn("op", (row) => row[2], "88px"), spare(textColumn("over", (row) => row[3], "36px", true)), tailColumn("module", (row) => row[5], "minmax(92px, 1fr)"),
    textColumn("what changes", (row) => row[6], "minmax(100px, 2.4fr)")] });
  return [el("div", { class: "tools" }, share, el("span", { class: "grow" }), `${changed.length} of ${all.length} kinds of communication differ`),
    el("div", { class: "pair wide" }, el("div", {}, where.root), el("div", {}, what.root))];
}

// all of them

const TABS = {
  ...(RUNS.some((run) => run.pipeline) ? { pipeline: { name: "Pipeline", make: pipelineTab } } : {}),
  communications: { name: "Communications", make: communicationTab, count: () => BY_KIND },
  graph: { name: "Graph", make: () => graphTab() },
  memory: { name: "Memory at the peak", make: memoryTab },
  ...(DATA.errors ? { errors: { name: "Model against measurement", make: errorTab } } : {}),
  ...(DATA.diff ? { diff: { name: "Difference to another plan", make: diffTab } } : {}),
};
const BY_KIND = Array.from({ length: RUNS[0].count }, (_, i) => i).filter((i) => !isKernel(i)).length;

function openTab(name, group = null) {
  if (group) memoryGroup = group;
  state.tab = name;
  $("tabs").replaceChildren(...Object.entries(TABS).map(([key, tab]) => el(
    "button", { role: "tab", "data-tab": key, "aria-selected": String(key === name), onclick: () => openTab(key) },
    tab.name, tab.count ? el("b", {}, tab.count().toLocaleString("en")) : [])));
  table.made = null;
  $("sheet").replaceChildren(...TABS[name].make());
  table.made?.follow();
}
