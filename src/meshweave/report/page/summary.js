// The numbers at the top: each says whether it is modelled or measured, and by what.

const NAMES = { matmul: "matmul", attention: "attention", memory: "memory-bound" };

function card(label, run, value, second, more = []) {
  const head = el("div", { class: "label" }, label, sourceTag(run));
  return el("div", { class: "card" }, head, el("div", { class: "value" }, value), more, el("div", { class: "second" }, second));
}

// "measured 152.0 ms (−3.1%)" below a modelled number, where there is a measured step too.
function against(write, value, real) {
  if (RUNS.length < 2 || real === null || real === undefined || !real) return "";
  const error = value === null ? "" : ` (${signed(value / real - 1, percent)})`;
  const title = "modelled / measured − 1";
  return [sourceTag(RUNS[1]), ` ${write(real)}`, error && el("span", { title }, error)];
}

function memoryCard(run) {
  const room = run.memory;
  const share = room ? run.peak / room : 0;
  const color = run.verdict ? "bad" : share > 0.9 ? "all_gather" : "accent";
  const bar = room ? el("div", { class: "track" }, el("i", { style: `width:${Math.min(100, share * 100)}%;background:var(--${color})` })) : [];
  const value = [bytesText(run.peak), room ? el("small", {}, ` of ${bytesText(room)}, ${percent(share, 0)}`) : ""];
  const [color_of_fit, text_of_fit] = { yes: ["good", "fits"], may: ["", "may fit"], no: ["bad", "does not fit"] }[run.fit];
  const fits = room ? el("span", { class: color_of_fit }, text_of_fit) : "";
  const real = RUNS.length > 1 ? against(bytesText, run.peak, RUNS[1].peak) : [];
  return card("Peak memory", run, value, [fits, fits && ", ", el("span", { title: "by the caching allocator, fragments included" }, `${bytesText(run.reserved)} reserved`), real.length ? el("div", { class: "second" }, real) : ""], bar);
}

function splitBar(run, role, isMany) {
  const parts = [["compute", "matmul"], ["exposed", "exposed"], ["idle", "idle"]];
  const total = role.compute + role.exposed + role.idle || 1;
  const said = (name) => `${name} ${percent(role[name] / total)}`;
  const title = `role ${role.index}, ${run.source}: ${parts.map(([n]) => `${n} ${timeText(role[n])}`).join(", ")}`;
  return el("div", { class: "track", title }, parts.map(([name, color]) => {
    const share = role[name] / total;
    const label = !isMany ? el("span", { style: name === "idle" ? "color:var(--text)" : "" }, said(name)) : "";
    return el("i", { style: `width:${share * 100}%;background:var(--${color})` }, label);
  }));
}

function splitCard() {
  const bars = RUNS.flatMap((run) => run.roles.map((role) => [run, role]));
  const isMany = bars.length > 2;
  const run = RUNS[0];
  const worst = run.roles.reduce((a, b) => (b.exposed > a.exposed ? b : a));
  const which = run.roles.length > 1 ? ` (role ${worst.index}, the most exposed)` : "";
  const key = (color, name) => el("span", {}, el("i", { class: "swatch", style: `background:var(--${color})` }), `${name} ${timeText(worst[name])}`);
  const label = el("div", { class: "label" }, `Where the step goes${which}`, sourceTag(run));
  return el("div", { class: "card half" }, label,
    el("div", { class: `splits${isMany ? " many" : ""}` }, bars.map(([r, role]) => splitBar(r, role, isMany))),
    el("div", { class: "keys" }, key("matmul", "compute"), key("exposed", "exposed"), key("idle", "idle"),
      RUNS.length > 1 ? [] : el("span", {}, `communication ${timeText(worst.communication)}`)));
}

function drawSummary() {
  const run = RUNS[0];
  const real = RUNS[1];
  const devices = `${run.num_devices} device${run.num_devices === 1 ? "" : "s"}`;
  $("title").textContent = run.title || "One training step";
  const roles = run.roles.length > 1 ? `${run.roles.length} roles, ` : "";
  $("subtitle").textContent = `mesh ${run.mesh}, ${devices}, ${roles}${run.count.toLocaleString("en")} tasks`;
  $("provenance").replaceChildren(...RUNS.flatMap((r) => [sourceTag(r), ` ${r.profile} ${r.version} `]), run.notes.length ? `· ${run.notes.join(" · ")}` : "");
  $("verdict").textContent = run.verdict;
  $("verdict").hidden = !run.verdict;
  const count = (value) => Math.round(value).toLocaleString("en");
  const share = run.seconds ? run.exposed / run.seconds : 0;
  const mfu = run.mfu === null ? "not known" : percent(run.mfu);
  const cards = [
    card("Step time", run, timeText(run.seconds), against(timeText, run.seconds, real?.seconds)),
    card("Tokens/s/GPU", run, run.rate ? count(run.rate) : "not known", real ? against(count, run.rate, real.rate) : `${count(run.tokens)} tokens a step`),
    card("MFU", run, mfu, real?.mfu ? against(percent, run.mfu, real.mfu) : run.mfu_dtype ? `of ${run.mfu_dtype} peak` : ""),
    card("Exposed", run, [timeText(run.exposed), el("small", {}, ` ${percent(share)}`)], real ? against(timeText, run.exposed, real.exposed) : "of the step is waiting"),
    memoryCard(run),
    splitCard(),
  ];
  $("cards").replaceChildren(...cards);
  drawLegend();
}

function drawLegend() {
  const used = [...new Set(col.cls)].map((s) => S[s]);
  const order = (cls) => (CLASSES.indexOf(cls) + 1 || 99);
  used.sort((a, b) => order(a) - order(b) || (a < b ? -1 : 1));
  const item = (color, said) => el("span", {}, el("i", { class: "swatch", style: `background:${color}` }), said);
  const striped = "repeating-linear-gradient(135deg, var(--exposed) 0 3px, #fff8 3px 4px), var(--exposed)";
  $("legend").replaceChildren(
    ...used.map((cls) => item(`var(--${colorName(cls)})`, NAMES[cls] ?? classText(cls))), item(striped, "exposed"));
}
