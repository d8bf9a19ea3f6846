"""The table of moves: value, reason, steps and bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torch import fx

from meshweave.ir import ops
from meshweave.ir.graph import StepGraph, op_name, origin_of, spec_of
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.place.movement.plan import MovePlan


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveRow:
    """A move, made `times` in a step. Bytes and seconds are of a single time, per device, of the largest piece,
    under the profile of the plan."""

    name: str
    phase: str
    kind: str
    source: str
    target: str
    value: str
    steps: tuple[str, ...]
    bytes_received: int
    seconds: float
    why: str
    line: str
    module: str
    times: int = 1


def move_rows(placed: StepGraph, program: Mesh, roles: Iterable[RankGraph], microbatches: int = 1) -> list[MoveRow]:
    """A row for every move of a step on `program`'s mesh that `roles`, its rank graphs before passes, make: first those
    of phase prepare, which are made once a step, as those of reduce and update, then the others, in graph order."""
    phases = {n.meta["global"]: origin_of(n).phase for role in roles for n in role.graph.nodes if "global" in n.meta}
    rows: list[MoveRow] = []
    for node in placed.graph.find_nodes(op="call_function", target=ops.move):
        row, phase = _row(node, program), phases.get(node.name)
        if phase is None and row.bytes_received:
            continue  # its value is there since an earlier phase
        phase = "prepare" if phase == "prepare" else row.phase
        times = microbatches if phase in ("forward", "loss", "backward") else 1
        rows.append(replace(row, phase=phase, times=times))
    return sorted(rows, key=lambda row: row.phase != "prepare")


def rounded_sums(placed: StepGraph) -> tuple[str, int]:
    """The 16-bit dtype of sums over devices, or "", and how many of them there are in a step. Each device rounds its
    part of such a sum (of a matmul, of a bias's gradient); a single device rounds the whole once."""
    moved = [
        (str(spec_of(node).dtype).removeprefix("torch."), node.args[0].meta["layout"])
        for node in placed.graph.find_nodes(op="call_function", target=ops.move)
    ]
    rounded = [name for name, layout in moved if name in ("bfloat16", "float16") and "partial(sum" in str(layout)]
    return (rounded[0], len(rounded)) if rounded else ("", 0)


def _row(node: fx.Node, program: Mesh) -> MoveRow:
    plan: MovePlan = node.meta["plan"]
    origin = origin_of(node)
    source = node.args[0]
    assert isinstance(source, fx.Node)
    return MoveRow(
        name=source.name,
        phase=origin.phase,
        # A transfer in which every device keeps its elements does no work.
        kind="+".join(s.kind for s in plan.steps if s.kind != "transfer" or s.bytes_received) or "none",
        source=_where(source.meta["layout"], program),
        target=_where(node.meta["layout"], program),
        value=str(spec_of(node)),
        steps=tuple(str(step) for step in plan.steps),
        bytes_received=round(sum(step.bytes_received for step in plan.steps)),
        seconds=plan.seconds,
        why=_why(node, source),
        line=origin.source,
        module=origin.module,
    )


def _where(layout: Layout, program: Mesh) -> str:
    """The layout; with its devices if those are not all of the program."""
    return str(layout) if layout.mesh == program else f"{layout} on {_few(layout.mesh.devices)}"


def _few(devices: tuple[int, ...]) -> str:
    return ",".join(map(str, devices)) if len(devices) <= 4 else f"{devices[0]},{devices[1]}..{devices[-1]}"


def _why(node: fx.Node, source: fx.Node) -> str:
    """The user of the value in its new layout."""
    users = [u for u in node.users if u.op == "call_function"]
    producer = op_name(source.target) if source.op == "call_function" else "input"
    if not users:
        return f"{producer} is returned in it"
    needs = ", ".join(dict.fromkeys(op_name(u.target) for u in users[:3]))
    return f"{producer} -> {needs}"
