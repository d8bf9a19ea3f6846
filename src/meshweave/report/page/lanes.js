// The rows of the timeline: per role and run a header with the phases, its lanes, and its memory.

const AXIS = 22; // pixels
let GUTTER = 152; // narrower on a narrow page (fitCanvas)
const HEIGHTS = { header: 19, compute: 25, lane: 18, memory: 52 };
const collapsed = new Set();
const MANY_ROLES = 8; // with more, only the first few are open at the beginning

// The phases that a role goes through: stretches of kernels of one phase and microbatch.
function phasesOf(run, role) {
  const found = [];
  const spans = LANES.filter((l) => l.run === run && l.role === role && l.isCompute).flatMap((l) => l.spans);
  spans.sort((a, b) => start[a] - start[b]);
  for (const i of spans) {
    const last = found[found.length - 1];
    if (last && last.phase === text("phase", i) && last.microbatch === col.microbatch[i]) last.end = end[i];
    else found.push({ phase: text("phase", i), microbatch: col.microbatch[i], start: start[i], end: end[i] });
  }
  return found;
}

const GROUPS = [];
const LARGEST = Math.max(...RUNS.map((run) => run.roles.length));
for (let place = 0; place < LARGEST; place++) {
  RUNS.forEach((run, number) => {
    const role = run.roles[place];
    if (!role) return;
    const key = `${number}/${role.index}`;
    const phases = phasesOf(number, role.index);
    const group = { key, run, number, role, phases, 
      starts: Float64Array.from(phases, (p) => p.start), ends: Float64Array.from(phases, (p) => p.end) };
    group.busy = sums(group.starts, group.ends);
    group.lanes = LANES.filter((lane) => lane.run === number && lane.role === role.index);
    group.isMany = new Set(phases.map((p) => p.microbatch)).size > 1;
    GROUPS.push(group);
    if (GROUPS.length > MANY_ROLES) collapsed.add(key);
  });
}

let rows = [];
let contentHeight = 0;

function layOut() {
  rows = [];
  let y = AXIS;
  const push = (row, height, gap = 1) => {
    rows.push({ ...row, y, height });
    y += height + gap;
  };
  for (const group of GROUPS) {
    push({ kind: "header", group }, HEIGHTS.header, 2);
    for (const lane of group.lanes) {
      if (collapsed.has(group.key) && !lane.isCompute) continue;
      push({ kind: "lane", lane, group }, lane.isCompute ? HEIGHTS.compute : HEIGHTS.lane);
    }
    if (!collapsed.has(group.key) && group.role.times.length) push({ kind: "memory", group }, HEIGHTS.memory, 2);
    y += 4;
  }
  contentHeight = y;
}
layOut();

function toggle(group) {
  if (!collapsed.delete(group.key)) collapsed.add(group.key);
  layOut();
  emit("resize");
}

function rowOf(i) {
  const group = GROUPS.find((g) => g.number === runOf[i] && g.role.index === LANES[col.lane[i]].role);
  if (collapsed.has(group.key)) toggle(group);
  return rows.find((row) => row.kind === "lane" && row.lane.index === col.lane[i]);
}

function groupText(group) {
  const { role, run } = group;
  const [first, last] = [role.devices[0], role.devices[role.devices.length - 1]];
  const devices = role.num_devices === 1 ? `device ${first}` : `${role.num_devices} devices, ${first} to ${last}`;
  return `role ${role.index}${RUNS.length > 1 ? `, ${run.source}` : ""} (${devices})`;
}
