"""Steps that nobody ran, for reports: a stack of layers under FSDP and TP, in any number of stages and microbatches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from meshweave.cost.simulate.result import LiveTensor, Reason, RoleResult, Simulation, Span
from meshweave.engine.schedules.clock import PipelineTimes, pipeline_times
from meshweave.engine.schedules.form import ranks_of_stages
from meshweave.engine.schedules.generators import make_schedule
from meshweave.report.moves import MoveRow

# op, seconds, flops, submodule, line of modeling_llama.py: the kernels of a layer in forward.
_LAYER = (
    ("fused(pow, mean, rsqrt, mul)", 55e-6, 0.0, "input_layernorm", 66),
    ("aten.mm", 420e-6, 2.7e11, "self_attn.q_proj", 243),
    ("aten.mm", 110e-6, 6.8e10, "self_attn.k_proj", 244),
    ("aten.mm", 112e-6, 6.8e10, "self_attn.v_proj", 245),
    ("fused(mul, cat, neg, add)", 63e-6, 0.0, "self_attn", 250),
    ("meshweave.attention", 610e-6, 3.1e11, "self_attn", 261),
    ("aten.mm", 415e-6, 2.7e11, "self_attn.o_proj", 271),
    ("fused(add, pow, mean, rsqrt, mul)", 88e-6, 0.0, "post_attention_layernorm", 66),
    ("aten.mm", 1450e-6, 9.6e11, "mlp.gate_proj", 180),
    ("aten.mm", 1448e-6, 9.6e11, "mlp.up_proj", 180),
    ("fused(silu, mul)", 130e-6, 0.0, "mlp", 180),
    ("aten.mm", 1460e-6, 9.6e11, "mlp.down_proj", 180),
)
_WEIGHTS = {
    "self_attn.q_proj": "4096,4096",
    "self_attn.k_proj": "1024,4096",
    "self_attn.v_proj": "1024,4096",
    "self_attn.o_proj": "4096,4096",
    "mlp.gate_proj": "14336,4096",
    "mlp.up_proj": "14336,4096",
    "mlp.down_proj": "4096,14336",
}
_FILE = "transformers/models/llama/modeling_llama.py"


def _numbers(shape: str) -> int:
    rows, columns = shape.split(",")
    return int(rows) * int(columns)


@dataclass
class _Builder:
    """Spans of one step, stage by stage, with compute in order and a channel per group."""

    is_pipeline: bool
    slow: float
    spans: list[Span] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)  # when a stream is free
    numbers: dict[str, int] = field(default_factory=dict)
    last: dict[int, int] = field(default_factory=dict)  # of a role, the kernel that ran last

    def name(self, op: str) -> str:
        stem = op.partition("(")[2].partition(",")[0] if op.startswith("fused") else op.rpartition(".")[2]
        self.numbers[stem] = self.numbers.get(stem, -1) + 1
        return f"{stem}_{self.numbers[stem]}"

    def stream(self, role: int, what: str) -> str:
        return f"{what} {role}" if self.is_pipeline else what

    def add(self, role: int, stream: str, op: str, start: float, seconds: float, phase: str, **more: Any) -> int:
        index, name = len(self.spans), self.name(op)
        kind: Any = more.pop("kind", "compute")
        span = Span(
            index=index,
            name=name,
            op=op,
            kind=kind,
            stream=stream,
            role=role,
            start=start,
            seconds=seconds,
            phase=phase,
            names=(name,),
            **more,
        )
        self.spans.append(span)
        self.free[stream] = start + seconds
        return index

    def kernel(self, role: int, op: str, seconds: float, phase: str, needs: tuple[int, ...] = (), **more: Any) -> int:
        """A kernel behind the one before it, and behind what it needs: the wait is exposed there."""
        stream = self.stream(role, "compute")
        free = self.free.get(stream, 0.0)
        start = max(free, *(self.spans[n].end for n in needs), 0.0)
        for n in needs:
            self.expose(n, free, start, f"{op} ({more.get('line', '')})")
        before = (self.last[role],) if role in self.last else ()
        needs = tuple(sorted({*needs, *before}))
        seconds *= self.slow
        self.last[role] = self.add(role, stream, op, start, seconds, phase, needs=needs, bytes=seconds * 2e12, **more)
        return self.last[role]

    def expose(self, index: int, free: float, start: float, who: str) -> None:
        span = self.spans[index]
        shown = min(start, span.end) - max(free, span.start)
        if span.kind == "compute" or shown <= 1e-9:
            return
        blocker = self.last.get(span.role, -1)
        late = shown * 0.4
        text = f"its input is ready {late * 1e3:.3f} ms before it is started"
        reasons = (
            Reason("late", late, text, blocker),
            Reason("dependency", shown - late, f"{who} needs it, and nothing else is ready to compute"),
        )
        shown += span.exposed_seconds
        self.spans[index] = replace(span, exposed_seconds=shown, reasons=span.reasons + reasons)

    def communicate(
        self, role: int, op: str, group: str, ready: float, num_bytes: float, phase: str, **more: Any
    ) -> int:
        stream = self.stream(role, f"comm {group}")
        start = max(ready, self.free.get(stream, 0.0))
        seconds = 12e-6 + num_bytes / (380e9 if group == "tp" else 45e9)
        kind = "transfer" if op == "transfer" else "collective"
        return self.add(
            role, stream, op, start, seconds, phase, kind=kind, group=group, bytes=round(num_bytes), **more
        )  # fmt: skip

    def layer(self, role: int, layer: int, phase: str, microbatch: int, ops: tuple[Any, ...], prefix: str) -> None:
        factor = 1.0 if phase == "forward" else 2.0
        for i, (op, seconds, flops, sub, line) in enumerate(ops):
            module = f"{prefix}model.layers.{layer}.{sub}"
            more = {"module": module, "line": f"{_FILE}:{line} in forward", "microbatch": microbatch}
            needs: tuple[int, ...] = ()
            shape = _WEIGHTS.get(sub)
            now = self.free.get(self.stream(role, "compute"), 0.0)
            if shape:
                layout = f"bfloat16[{shape}]: [{{fsdp}}, {{}}] -> [{{}}, {{}}]"
                # Issued a kernel ahead of its use.
                ahead = max(0.0, now - 600e-6)
                size = _numbers(shape) * 2 * 0.75
                needs = (self.communicate(role, "all_gather", "fsdp", ahead, size, phase, layout=layout, **more),)
            made = self.kernel(role, op, seconds * factor, phase, needs, flops=flops * factor, **more)
            if phase == "backward" and shape:
                layout = f"float32[{shape}]: [{{}}, {{}}] partial(sum: fsdp) -> [{{fsdp}}, {{}}]"
                size, end = _numbers(shape) * 2 * 0.75, self.spans[made].end
                self.communicate(
                    role, "reduce_scatter", "fsdp", end, size, phase, layout=layout, needs=(made,), **more
                )  # fmt: skip
            if sub in ("self_attn.o_proj", "mlp.down_proj") or (phase == "backward" and i == 1):
                layout = "bfloat16[2,4096,4096]: [{}, {}, {}] partial(sum: tp) -> [{}, {}, {}]"
                end = self.spans[made].end
                reduced = self.communicate(
                    role, "all_reduce", "tp", end, 2 * 4096 * 4096 * 2, phase, layout=layout, needs=(made,), **more
                )
                self.kernel(role, "fused(add)", 40e-6, phase, (reduced,), **more)


def sample(
    *,
    roles: int = 1,
    layers: int = 4,
    microbatches: int = 1,
    source: Literal["modelled", "measured"] = "modelled",
    slow: float = 1.0,
    prefix: str = "",
    verdict: str = "",
) -> Simulation:
    """A step of `layers` layers per role. About 51 spans per layer and microbatch."""
    build = _Builder(roles > 1, slow)
    order = [("forward", m) for m in range(microbatches)] + [("backward", m) for m in range(microbatches)]
    sent: dict[tuple[str, int], int] = {}
    for phase, microbatch in order:
        along = range(roles) if phase == "forward" else reversed(range(roles))
        for role in along:
            _stage(build, role, roles, layers, phase, microbatch, sent, prefix)
    for role in range(roles):
        for i in range(layers):
            module = f"{prefix}model.layers.{role * layers + i}"
            build.kernel(
                role, "fused(lerp, mul, addcdiv)", 700e-6, "update", module=module, line="torch/optim/adamw.py:300"
            )
    return _finish(build, roles, microbatches, source, verdict)


def _stage(
    build: _Builder,
    role: int,
    roles: int,
    layers: int,
    phase: str,
    microbatch: int,
    sent: dict[tuple[str, int], int],
    prefix: str,
) -> None:
    key = (phase, microbatch)
    if key in sent and build.spans[sent[key]].stream.startswith("transfer"):
        build.kernel(role, "fused(copy)", 20e-6, phase, (sent[key],), microbatch=microbatch)
    numbers = range(role * layers, (role + 1) * layers)
    ops = _LAYER if phase == "forward" else tuple(reversed(_LAYER))
    for layer in numbers if phase == "forward" else reversed(numbers):
        build.layer(role, layer, phase, microbatch, ops, prefix)
    following = role + 1 if phase == "forward" else role - 1
    if 0 <= following < roles:
        made = build.last[role]
        stream = f"transfer {role}-{following}"
        start = max(build.spans[made].end, build.free.get(stream, 0.0))
        layout = "bfloat16[2,4096,4096]: [{}, {}, {}] -> [{}, {}, {}]"
        sent[key] = build.add(
            role, stream, "transfer", start, 410e-6, phase, kind="transfer", bytes=2 * 4096 * 4096 * 2,
            layout=layout, microbatch=microbatch, needs=(made,), module=f"{prefix}model.layers.{numbers[-1]}",
            line=f"{_FILE}:301 in forward",
        )  # fmt: skip


def _finish(
    build: _Builder, roles: int, microbatches: int, source: Literal["modelled", "measured"], verdict: str
) -> Simulation:
    spans = sorted(build.spans, key=lambda s: (s.start, s.end, s.index))
    place = {s.index: i for i, s in enumerate(spans)}
    moved = [
        replace(
            s,
            index=i,
            needs=tuple(sorted(place[n] for n in s.needs)),
            reasons=tuple(replace(r, blocker=place.get(r.blocker, -1)) for r in s.reasons),
        )
        for i, s in enumerate(spans)
    ]
    seconds = max(s.end for s in moved)
    results = tuple(_role(moved, role, seconds) for role in range(roles))
    streams = tuple(
        dict.fromkeys(sorted((s.stream for s in moved), key=lambda name: (not name.startswith("compute"), name)))
    )
    mesh = f"pp={roles},fsdp=4,tp=2" if roles > 1 else "fsdp=4,tp=2"
    return Simulation(
        seconds=seconds,
        spans=tuple(moved),
        roles=results,
        streams=streams,
        mesh=mesh,
        num_devices=8 * roles,
        profile="h100",
        profile_version="2026.1",
        source=source,
        title=f"llama, {mesh}",
        tokens=16 * 4096 * microbatches,
        flops=1e15,
        mfu=0.412,
        mfu_dtype="bfloat16",
        memory_bytes=79 * 2**30,
        verdict=verdict,
        notes=("chains of ops are fused",),
    )


def _role(spans: list[Span], role: int, seconds: float) -> RoleResult:
    own = [s for s in spans if s.role == role]
    compute = sum(s.seconds for s in own if s.kind == "compute")
    exposed = sum(s.exposed_seconds for s in own)
    curve = tuple(_curve(own, seconds))
    peak_at, peak = max(curve, key=lambda change: (change[1], -change[0]))
    held = (
        LiveTensor("exp_avg_0", 9 * 2**30, "state", "model.layers.0", ""),
        LiveTensor("primals_1", 5 * 2**30, "param", "model.layers.0.mlp.gate_proj", ""),
        *(LiveTensor(s.name, 200 * 2**20, "activation", s.module, s.line) for s in own if s.op == "fused(silu, mul)"),
    )
    return RoleResult(
        index=role, devices=tuple(range(8 * role, 8 * role + 8)), compute_seconds=compute,
        communication_seconds=min(seconds, sum(s.seconds for s in own if s.kind != "compute")), exposed_seconds=exposed,
        idle_seconds=seconds - compute - exposed, peak_bytes=peak, peak_at=peak_at, reserved_bytes=peak + 2**30,
        persistent_bytes=14 * 2**30, at_peak=held[:40], memory=curve,
    )  # fmt: skip


def _curve(spans: list[Span], seconds: float) -> Iterator[tuple[float, int]]:
    """Grows in forward, shrinks in backward, with a saw's teeth of gathered weights."""
    level = 14 * 2**30
    growth = 46 * 2**30 // max(1, sum(s.phase == "forward" and s.kind == "compute" for s in spans))
    yield 0.0, level
    for span in spans:
        if span.op == "all_gather":
            yield span.start, level + 2**27
        elif span.kind == "compute":
            level += {"forward": 1, "backward": -1}.get(span.phase, 0) * growth
            level = max(level, 14 * 2**30)
            yield span.end, level
    yield seconds, 14 * 2**30


def moves_of(simulation: Simulation) -> tuple[MoveRow, ...]:
    """A move for every collective of the first microbatch."""
    found = []
    for span in simulation.spans:
        if span.kind == "collective" and span.microbatch == 0:
            value, _, change = span.layout.partition(": ")
            source, _, target = change.partition(" -> ")
            row = MoveRow(
                name=span.name,
                phase=span.phase,
                kind=span.op,
                source=source,
                target=target,
                value=value,
                steps=(f"{span.op}({span.group})",),
                bytes_received=int(span.bytes),
                seconds=span.seconds,
                why=f"{span.module.rpartition('.')[2]} -> mm",
                line=span.line,
                module=span.module,
            )
            found.append(row)
    return tuple(found)


def pipeline_sample(name: str, ranks: int, microbatches: int) -> tuple[Simulation, PipelineTimes]:
    """A step as the clock of schedules says: a kernel per action, a transfer per message; and these times."""
    schedule = make_schedule(name, ranks, microbatches)
    rank_of, last = ranks_of_stages(schedule), schedule.num_stages - 1
    times = pipeline_times(schedule, F=1e-3, B=1.1e-3, W=0.9e-3, comm=1e-4)
    timed = [(rank, row) for rank, rows in enumerate(times.of_rank) for row in rows]
    ends = {(row.action.name, row.action.stage, row.action.microbatch): row.end_s for _, row in timed}
    found: list[dict[str, Any]] = []
    sent: dict[tuple[str, int, int], int] = {}
    for rank, row in sorted(timed, key=lambda item: (item[1].begin_s, item[1].end_s)):
        kind, stage, number = row.action.name, row.action.stage, row.action.microbatch
        phase = "forward" if kind == "forward" else "backward"
        common = {"phase": phase, "action": kind, "microbatch": number, "module": f"layers.{stage}", "line": "a.py:1"}
        before = stage - 1 if kind == "forward" else stage + 1
        arrived = sent.get((phase, before, number)) if kind != "weight" else None
        stream = f"compute {rank}"
        found.append(
            common | {
                "kind": "compute", "op": "aten.mm", "stream": stream, "role": rank, "start": row.begin_s,
                "seconds": row.end_s - row.begin_s, "stage": stage, "needs": () if arrived is None else (arrived,),
                "flops": 1e12,
            }
        )  # fmt: skip
        after = stage + 1 if kind == "forward" else stage - 1
        if kind != "weight" and 0 <= after <= last and rank_of[after] != rank:
            sent[phase, stage, number] = len(found)
            stream = f"transfer {rank} -> {rank_of[after]}"
            found.append(
                common | {
                    "kind": "transfer", "op": "transfer", "stream": stream, "role": rank,
                    "start": ends[kind, stage, number], "seconds": 1e-4, "stage": stage, "needs": (len(found) - 1,),
                }
            )  # fmt: skip
    order = sorted(range(len(found)), key=lambda i: (found[i]["start"], i))
    place = {old: new for new, old in enumerate(order)}
    spans = []
    for new, old in enumerate(order):
        needs = tuple(sorted(place[n] for n in found[old].pop("needs")))
        spans.append(Span(index=new, name=f"mm_{old}", names=(f"mm_{old}",), needs=needs, **found[old]))
    base = sample(layers=1)
    roles = tuple(replace(_role(spans, role, times.step_s), at_peak=()) for role in range(ranks))
    step = replace(
        base, seconds=times.step_s, spans=tuple(spans), roles=roles, mesh=f"pp={ranks}", schedule=name,
        streams=tuple(dict.fromkeys(s.stream for s in spans)), title=f"{name}, pp={ranks}",
    )  # fmt: skip
    return step, times
