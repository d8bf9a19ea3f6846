"""Simulates a step: rank graphs and a profile in, spans, memory and totals out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.buckets import Buckets
from meshweave.cost.simulate.classify import known_kind, priced_by_bytes
from meshweave.cost.simulate.clock import Slowdown, Times, Work, play
from meshweave.cost.simulate.exposure import Exposure, exposure_of
from meshweave.cost.simulate.kernels import Fusion, Kernel
from meshweave.cost.simulate.matmuls import PLAIN, MatmulStyle
from meshweave.cost.simulate.memory import MemoryUse, least_bytes, memory_of
from meshweave.cost.simulate.result import RoleResult, Simulation, Span
from meshweave.cost.simulate.storage_intervals import LifetimeRules
from meshweave.cost.simulate.tasks import RoleTasks, Tasks, lower_tasks
from meshweave.cost.simulate.verdict import judged
from meshweave.engine.actions import Schedule
from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.rank import RankGraph
from meshweave.ir.work import Attention, Matmul

_FUSION: dict[str, Fusion] = {"pointwise": "compiled", "none": "ops"}  # the default fusion of a profile


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """How a step is simulated.

    fusion: what runs as a single kernel (see `simulate.kernels`); None: as the profile's machine. microbatches: how
    often forward and backward run. pipeline: the schedule of the stages (by pipeline rank), if they work on several
    microbatches at a time. matmuls: what they do beside multiplying.
    tokens: of the whole batch, for tokens/s. title: for reports.
    buckets: which collectives are merged, as in systems that flatten parameters (see `simulate.buckets`).
    blocking_messages: a stage that sends waits until its message is there (see `Framework`).
    keeps_every_second_matmul: the step recomputes with policy "selective", for which eager mode stores results whether
    or not they are read (see `simulate.storage_intervals`).
    """

    fusion: Fusion | None = None
    microbatches: int = 1
    pipeline: Schedule | None = None
    matmuls: MatmulStyle = PLAIN
    tokens: int = 0
    title: str = ""
    buckets: Buckets = "none"
    blocking_messages: bool = False
    keeps_every_second_matmul: bool = False


def simulate_roles(
    roles: Sequence[RankGraph], profile: MachineProfile, options: SimulateOptions | None = None
) -> Simulation:
    """Simulate a step of `roles` on the machine of `profile`. Nothing is allocated, nothing is random: equal inputs
    give equal results to the byte. Raises MeshweaveError for a dtype or link without a cost in the
    profile; an op of no known kind is priced by the bytes that it moves, with a note."""
    options = options or SimulateOptions()
    profile.check_mesh(roles[0].mesh)
    fusion = options.fusion or default_fusion(profile)
    count, blocking = options.microbatches, options.blocking_messages
    tasks = lower_tasks(roles, profile, fusion, count, options.pipeline, options.matmuls, options.buckets, blocking)
    times = times_of(tasks, profile.compute_slowdown)
    exposure = exposure_of(tasks, times)
    holding = LifetimeRules(fusion, options.keeps_every_second_matmul)
    memories = [memory_of(tasks, i, times, holding) for i in range(len(roles))]
    return _result(tasks, times, exposure, memories, profile, options, fusion)


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of a simulated step: `total`, and of what is used most: `compute`, the kernels of a role;
    `communication`, a channel. 0 if unknown."""

    total: float
    compute: float = 0.0
    communication: float = 0.0


def seconds_of_step(roles: Sequence[RankGraph], profile: MachineProfile, microbatches: int = 1) -> StepSeconds:
    """What `simulate_roles` says of seconds alone, for searches."""
    profile.check_mesh(roles[0].mesh)
    return seconds_of_tasks(lower_tasks(roles, profile, default_fusion(profile), microbatches), profile)


def least_bytes_of_step(roles: Sequence[RankGraph], profile: MachineProfile) -> int:
    """A lower bound of the peak that `simulate_roles` finds with the default fusion for these roles, and for what the
    default passes make of them."""
    return max(map(least_bytes, lower_tasks(roles, profile, default_fusion(profile)).roles))


def peak_bytes_of_step(roles: Sequence[RankGraph], profile: MachineProfile, microbatches: int = 1) -> int:
    """What `simulate_roles` says of the peak alone."""
    return max(peak_bytes_of_roles(roles, profile, microbatches))


def peak_bytes_of_roles(
    roles: Sequence[RankGraph], profile: MachineProfile, microbatches: int = 1, pipeline: Schedule | None = None
) -> list[int]:
    """What `simulate_roles` says of the peak of each role."""
    fusion = default_fusion(profile)
    tasks = lower_tasks(roles, profile, fusion, microbatches, pipeline)
    times, holding = times_of(tasks, profile.compute_slowdown), LifetimeRules(fusion)
    return [memory_of(tasks, i, times, holding).peak_bytes for i in range(len(roles))]


def seconds_of_tasks(tasks: Tasks, profile: MachineProfile) -> StepSeconds:
    """The same for tasks that were lowered with the default fusion."""
    streams, kernels = tasks.graph.streams, [task.kernel is not None for task in tasks.tasks]

    def longest(streams: Sequence[Sequence[int]], of_kernels: bool) -> float:
        return max((sum(tasks.tasks[i].seconds for i in s if kernels[i] is of_kernels) for s in streams), default=0.0)

    num_roles = len(tasks.roles)
    total = times_of(tasks, profile.compute_slowdown).seconds
    return StepSeconds(total, longest(streams[:num_roles], True), longest(streams[num_roles:], False))


def default_fusion(profile: MachineProfile) -> Fusion:
    """What runs as a single kernel on the profile's machine."""
    return _FUSION[profile.fusion]


def times_of(tasks: Tasks, slowdown: Slowdown) -> Times:
    """When each task begins and ends. Raises VerifyError for a deadlock."""
    work = Work(names=[task.node.name for task in tasks.tasks])
    for task, needs in zip(tasks.tasks, tasks.graph.needs, strict=True):
        is_kernel = task.kernel is not None
        issued = task.issued if is_kernel else 0.0
        work.add(task.seconds, needs, task.usage, task.roles, is_kernel=is_kernel, issued=issued)
    return play(work, tasks.graph.streams, len(tasks.roles), slowdown)


def _result(
    tasks: Tasks,
    times: Times,
    exposure: Exposure,
    memories: Sequence[MemoryUse],
    profile: MachineProfile,
    options: SimulateOptions,
    fusion: Fusion,
) -> Simulation:
    mesh = tasks.roles[0].role.mesh
    spans = _spans(tasks, times, exposure)
    roles = tuple(
        RoleResult(
            index=i,
            devices=role.role.devices,
            compute_seconds=exposure.compute[i],
            communication_seconds=exposure.communication[i],
            exposed_seconds=exposure.total[i],
            idle_seconds=exposure.idle[i],
            peak_bytes=memory.peak_bytes,
            peak_at=memory.peak_at,
            reserved_bytes=memory.reserved_bytes,
            persistent_bytes=memory.persistent_bytes,
            at_peak=memory.at_peak,
            memory=memory.curve,
        )
        for i, (role, memory) in enumerate(zip(tasks.roles, memories, strict=True))
    )
    flops = sum(_model_flops(role) * len(role.role.devices) for role in tasks.roles) * options.microbatches
    dtype = _matmul_dtype(tasks)
    peak_rate = profile.peak_flops(dtype) if dtype is not None else None
    mfu = flops / (times.seconds * mesh.num_devices * peak_rate) if peak_rate and times.seconds else None
    simulation = Simulation(
        seconds=times.seconds,
        spans=spans,
        roles=roles,
        streams=tasks.streams,
        mesh=str(mesh) or "one device",
        num_devices=mesh.num_devices,
        profile=profile.name,
        profile_version=profile.version,
        source="modelled",
        title=options.title,
        schedule="" if options.pipeline is None else options.pipeline.name,
        tokens=options.tokens,
        flops=flops,
        mfu=mfu,
        mfu_dtype=str(dtype).removeprefix("torch.") if dtype is not None else "",
        memory_bytes=int(profile.usable_bytes),
        notes=(*_notes(options, fusion, len(roles)), *_unknown_ops(tasks)),
    )
    return judged(simulation, options.microbatches)


def _spans(tasks: Tasks, times: Times, exposure: Exposure) -> tuple[Span, ...]:
    """Kernels and communications in order of time; also starts and waits if they take time."""
    shown = [i for i, t in enumerate(tasks.tasks) if t.kind in ("kernel", "copy") or t.seconds]
    shown.sort(key=lambda i: (times.starts[i], times.ends[i], i))
    number = {task: i for i, task in enumerate(shown)}
    producers = _producers(tasks)
    spans = []
    for i, task_index in enumerate(shown):
        task = tasks.tasks[task_index]
        origin = origin_of(task.node)
        needs = tuple(sorted({number[n] for n in producers[task_index] if n in number}))
        names = tuple(n.name for n in task.kernel.nodes) if task.kernel is not None else (task.node.name,)
        kind = "compute" if task.kind != "copy" else "collective"
        kind = "transfer" if task.op in ("transfer", "permute") else kind
        action = task.action or tasks.tasks[tasks.graph.needs[task_index][0]].action
        assert action is not None
        spans.append(
            Span(
                index=i,
                name=task.node.name,
                op=_op_text(tasks, task_index),
                kind=kind,  # type: ignore[arg-type]
                stream=tasks.streams[tasks.graph.stream_of[task_index]],
                role=task.roles[0],
                start=times.starts[task_index],
                seconds=times.ends[task_index] - times.starts[task_index],
                phase=origin.phase,
                module=origin.module,
                line=origin.source,
                flops=task.flops,
                bytes=task.received if task.kernel is None else float(sum(work.bytes for work in task.kernel.works)),
                layout=task.node.meta.get("move", "") if task.kind == "copy" else "",
                group=task.group,
                # of what runs once, as in a measured step: the page pairs the spans of two runs by it
                microbatch=0 if origin.phase == "update" else task.microbatch,
                action=action.name,
                stage=action.stage,
                exposed_seconds=exposure.exposed.get(task_index, 0.0),
                reasons=tuple(
                    type(r)(r.kind, r.seconds, r.text, number.get(r.blocker, -1))
                    for r in exposure.reasons.get(task_index, ())
                ),
                needs=needs,
                names=names,
            )
        )
    return tuple(spans)


def _op_text(tasks: Tasks, index: int) -> str:
    task = tasks.tasks[index]
    if task.kernel is None:
        return task.op or task.kind
    names = list(dict.fromkeys(op_name(n.target) for n in task.kernel.nodes))
    return (
        names[0]
        if len(names) == 1
        else f"fused({', '.join(n.removeprefix('aten.') for n in names[:6])}{', ...' if len(names) > 6 else ''})"
    )


def _producers(tasks: Tasks) -> list[list[int]]:
    """Per task the kernels and copies whose results it uses, looking through starts and waits."""
    producers: list[list[int]] = [[] for _ in tasks.tasks]
    for role in tasks.roles:
        producer_of: dict[int, int] = {}  # storage -> task
        for number in role.tasks:
            task = tasks.tasks[number]
            if task.kernel is not None:
                producers[number] = [producer_of[s] for s in sorted(role.storages_read(task)) if s in producer_of]
                producer_of |= dict.fromkeys(role.storages_written(task), number)
            elif task.kind == "start":
                for copy in tasks.graph.users[number]:
                    producers[copy] += [producer_of[s] for s in sorted(role.storages_read(task)) if s in producer_of]
            else:
                for copy in tasks.graph.needs[number]:
                    producer_of |= dict.fromkeys(role.storages_written(task), copy)
    return producers


def _model_flops(role: RoleTasks) -> float:
    """Flops of the model's mathematics in a microbatch on a device: the matmuls and attentions of forward once, and
    twice again for backward (the convention of PaLM, Chowdhery et al. 2022; a causal mask counts half)."""
    forward = [item for kind, _, item in role.items if kind == "forward" and isinstance(item, Kernel)]
    works = [work for kernel in forward for work in kernel.works]
    return 3.0 * sum(work.flops for work in works if isinstance(work, Matmul | Attention))


def _matmul_dtype(tasks: Tasks) -> torch.dtype | None:
    """The dtype with the most matmul flops."""
    flops: dict[torch.dtype, float] = {}
    for role in tasks.roles:
        for kernel in role.kernels:
            for work in kernel.works:
                if isinstance(work, Matmul):
                    flops[work.dtype] = flops.get(work.dtype, 0.0) + work.flops
    return max(flops, key=lambda d: flops[d], default=None)


def _unknown_ops(tasks: Tasks) -> tuple[str, ...]:
    nodes = (node for role in tasks.roles for kernel in role.kernels for node in kernel.nodes)
    return priced_by_bytes(op_name(node.target) for node in nodes if not known_kind(node))


def _notes(options: SimulateOptions, fusion: Fusion, num_roles: int) -> tuple[str, ...]:
    compiled = "the ops of repeated blocks are fused"
    notes = [
        {
            "ops": "every op is a kernel",
            "eager": "kernels as in eager PyTorch",
            "compiled": "chains of ops are fused",
            "blocks": f"{compiled}, others are as in eager PyTorch",
            "blocks+loss": f"{compiled}, and those of the loss; others are as in eager PyTorch",
        }[fusion]
    ]
    if options.buckets != "none":
        size = f"of {options.buckets} bytes" if isinstance(options.buckets, int) else "per block"
        notes.append(
            f"collectives run in buckets {size}, as in systems that flatten parameters; meshweave's run one by one"
        )
    if options.pipeline is not None and num_roles > 1:
        notes.append(f"stages follow schedule {options.pipeline.name}")
    return tuple(notes)
