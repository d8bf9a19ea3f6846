// The panel of the selected task: every field, why it is exposed, and what it needs and feeds.

const KIND_TEXT = {
  dependency: "Needed at once", late: "Started late", link: "Link shared", channel: "Channel busy", order: "Fixed order",
  memory: "Memory cap", peer: "Late peer",
};

function spanLink(i, { zoom: isZoomed = false } = {}) {
  const where = text("module", i).split(".").slice(-2).join(".");
  const said = `${opText(i)}${where ? ` ${where}` : ""}`;
  return el("button", { class: "link", "data-span": i, title: said, onclick: () => select(i, { zoom: isZoomed }) }, said);
}

const filterLink = (said) => el(
  "button", { class: "link mono", title: "Show the communications of this place", onclick: () => filterBy(said) }, said);

function field(name, value) {
  return value === "" || value === null || value === undefined ? [] : [el("dt", {}, name), el("dd", {}, value)];
}

function rateText(i) {
  const seconds = col.seconds[i] / 1e9;
  if (!seconds) return [];
  const flops = col.flops[i] ? field("rate", `${(col.flops[i] / seconds / 1e12).toFixed(1)} TFLOP/s`) : [];
  const bytes = col.bytes[i] ? field(isKernel(i) ? "memory" : "bandwidth", `${(col.bytes[i] / seconds / 1e9).toFixed(1)} GB/s`) : [];
  return [...flops, ...bytes];
}

function flopsText(flops) {
  const units = [[1e15, "PFLOP"], [1e12, "TFLOP"], [1e9, "GFLOP"], [1e6, "MFLOP"], [1, "FLOP"]];
  const [unit, name] = units.find(([size]) => flops >= size) ?? units[4];
  return flops ? `${(flops / unit).toFixed(2)} ${name}` : "";
}

function whySection(i) {
  if (isKernel(i)) return [];
  const found = [...(reasonsOf.get(i) ?? [])].sort((a, b) => b.ns - a.ns);
  if (!col.exposed[i]) return [el("h3", {}, "Hidden"), el("div", { class: "soft" }, "Its role computes all the while.")];
  const item = (reason) => el("div", { class: "why" },
    el("b", { title: reason.kind }, `${timeText(reason.ns)} · ${KIND_TEXT[reason.kind] ?? reason.kind}`),
    el("p", {}, `${reason.text}.`),
    reason.blocker >= 0 ? [el("span", { class: "soft" }, "see "), spanLink(reason.blocker)] : []);
  const none = el("div", { class: "soft" }, "No reason was recorded.");
  return [el("h3", {}, `Why ${timeText(col.exposed[i])} of it are exposed`), ...(found.length ? found.map(item) : [none])];
}

function moveSection(i) {
  const move = DATA.moves[col.move[i]];
  if (!move) return [];
  const [source, target, value, steps, why, ns] = move;
  return [el("h3", {}, "The move that it is a step of"), el("dl", {},
    field("value", el("code", {}, value)), field("from", el("code", {}, source)), field("to", el("code", {}, target)),
    field("steps", el("code", {}, steps.join("; "))), field("why", why), field("cost in plan", timeText(ns)))];
}

const MOST_LINKS = 8;

function linkSection(title, list) {
  if (!list.length) return [];
  const shown = [...list].sort((a, b) => col.seconds[b] - col.seconds[a]).slice(0, MOST_LINKS);
  const rest = list.length - shown.length;
  return [el("h3", {}, `${title} (${list.length})`), el("ul", { class: "links" },
    shown.map((i) => el("li", {}, spanLink(i), el("span", { class: "soft" }, timeText(col.seconds[i])))),
    rest ? el("li", { class: "soft" }, `and ${rest} more`) : [])];
}

function twinSection(i) {
  const other = counterpart(i);
  if (other < 0) return [];
  const [model, real] = runOf[i] === 0 ? [i, other] : [other, i];
  const error = col.seconds[real] ? ` (model ${signed(col.seconds[model] / col.seconds[real] - 1, percent)})` : "";
  return [el("h3", {}, "Modelled against measured"), el("dl", {},
    field("modelled", timeText(col.seconds[model])), field("measured", timeText(col.seconds[real]) + error),
    field("", el("button", { class: "link", "data-span": other, onclick: () => select(other) }, `select the ${RUNS[runOf[other]].source} one`)))];
}

function helpPanel() {
  const keys = [["wheel", "zoom around the pointer"], ["w s", "zoom"], ["a d", "move"], ["0", "whole step"],
    ["e", "next most exposed communication"], ["f", "zoom to the task"], ["[ ]", "task before, behind"], ["Esc", "nothing selected"]];
  const exposed = BY_EXPOSURE.slice(0, MOST_LINKS);
  const list = exposed.map((i) => el("li", {}, spanLink(i, { zoom: true }), el("span", { class: "soft" }, timeText(col.exposed[i]))));
  return el("div", { class: "hint" },
    el("h2", {}, "Nothing selected"), el("p", {}, "Click a task, a row of the table, or one of these."),
    list.length ? [el("h3", {}, "Most exposed communications"), el("ul", { class: "links" }, list)] : [],
    el("h3", {}, "Keys"), el("dl", {}, keys.map(([key, said]) => [el("dt", {}, key.split(" ").map((k) => [el("kbd", {}, k), " "])), el("dd", {}, said)])));
}

function drawDetails() {
  const i = state.selected;
  if (i < 0) {
    $("details").replaceChildren(helpPanel());
    return;
  }
  const lane = LANES[col.lane[i]];
  const run = RUNS[runOf[i]];
  const isMany = run.roles.length > 1;
  const names = text("names", i).split(" ").filter(Boolean).join(", ");
  const tag = (said) => el("span", { class: "tag" }, said);
  const swatch = el("i", { class: "swatch", style: `background:var(--${colorName(text("cls", i))})` });
  $("details").replaceChildren(
    el("h2", {}, swatch, opText(i)),
    el("div", { class: "name mono" }, text("name", i)),
    el("div", { class: "tags" }, sourceTag(run), tag(text("kind", i)), tag(text("phase", i) || "no phase"), tag(classText(text("cls", i)))),
    el("dl", {},
      field("duration", el("b", {}, timeText(col.seconds[i]))),
      isKernel(i) ? [] : field("exposed", `${timeText(col.exposed[i])}, hidden ${timeText(col.seconds[i] - col.exposed[i])}`),
      field("from, to", `${(start[i] / 1e6).toFixed(3)} to ${(end[i] / 1e6).toFixed(3)} ms`),
      field("module", text("module", i) && filterLink(text("module", i))),
      field("line", text("line", i) && filterLink(text("line", i))),
      field("over", text("group", i) && el("code", {}, text("group", i))),
      field("layouts", text("layout", i) && el("code", {}, text("layout", i))),
      field("bytes", col.bytes[i] ? `${bytesText(col.bytes[i])}${isKernel(i) ? " read and written" : " received"}` : ""),
      field("work", flopsText(col.flops[i])), rateText(i),
      field("stream", `${lane.name}${isMany ? `, role ${lane.role}` : ""}`),
      field("microbatch", run.first >= 0 && GROUPS.some((g) => g.isMany) ? String(col.microbatch[i]) : ""),
      field("graph nodes", names && el("code", {}, names))),
    ...whySection(i), ...moveSection(i), ...twinSection(i), ...linkSection("Needs", needs[i]), ...linkSection("Feeds", feeds[i]));
  $("details").scrollTop = 0;
}
