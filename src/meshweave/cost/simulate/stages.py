"""What the stages of a pipeline take on a machine: seconds of their passes and messages, bytes that they hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.kernels import Kernel
from meshweave.cost.simulate.step import default_fusion
from meshweave.cost.simulate.tasks import RoleTasks, role_tasks
from meshweave.engine.schedules import ActivationMemory, StageTimes, stage_times
from meshweave.engine.sections import Kind, sections_of_roles
from meshweave.ir.rank import RankGraph, Transfer

_PASSES: tuple[Kind, ...] = ("forward", "input", "weight")


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Per stage the seconds of its passes, and of a message between two stages; the bytes that a microbatch holds there
    from forward to backward."""

    times: StageTimes
    memory: ActivationMemory


def costs_of_stages(roles: Sequence[RankGraph], profile: MachineProfile) -> StageCosts:
    """The costs of the stages of a step, without overlap of their messages. A stage that several roles have takes as
    long as the slowest, and as many bytes as the largest."""
    fusion = default_fusion(profile)
    seconds, stored = dict[tuple[Kind, int], float](), dict[tuple[Kind, int], int]()
    stages = 0
    for its in sections_of_roles(roles, is_pipeline=True, has_parts=True):
        tasks = role_tasks(its, profile, fusion)
        stages = max(stages, *(number + 1 for number in its.stage_numbers))
        for table, own in ((seconds, _seconds(tasks, profile)), (stored, _bytes(tasks))):
            for key, value in own.items():
                table[key] = max(table.get(key, 0), value)  # type: ignore[assignment,call-overload]
    forward, backward, weight = ([seconds.get((kind, s), 0.0) for s in range(stages)] for kind in _PASSES)
    messages = [
        _message_seconds(entry, profile) for role in roles for entry in role.transfers.values() if not entry.axes
    ]
    comm = max(messages, default=0.0)
    after_input = [float(stored.get(("weight", s), 0)) for s in range(stages)]
    activation = [max(float(stored.get(("forward", s), 0)), left) for s, left in enumerate(after_input)]
    memory = ActivationMemory(activation, after_input)
    return StageCosts(stage_times(stages, forward, backward, weight, comm), memory)


def _seconds(tasks: RoleTasks, profile: MachineProfile) -> Mapping[tuple[Kind, int], float]:
    seconds: dict[tuple[Kind, int], float] = {}
    for kind, stage, item in tasks.items:
        if isinstance(item, Kernel):
            own = sum(profile.compute_seconds(work) for work in item.works)
            seconds[kind, stage] = seconds.get((kind, stage), 0.0) + own
    return seconds


def _bytes(tasks: RoleTasks) -> Mapping[tuple[Kind, int], int]:
    """Bytes that forward of a stage stores for backward; under "weight" what its weight part reads of forward and of
    the input part, which holds gradients for it."""
    sizes = {x.storage: x.storage_bytes for results in tasks.local.values.values() for x in results}
    stage_of: dict[int, int] = {}
    of_input: set[int] = set()
    read: dict[Kind, set[int]] = {"input": set(), "weight": set()}
    for kind, stage, item in tasks.items:
        nodes = item.writes if isinstance(item, Kernel) else (item,)
        if kind in ("forward", "input"):
            stage_of.update({x.storage: stage for n in nodes for x in tasks.local.values.get(n, ())})
            of_input.update(x.storage for n in nodes for x in tasks.local.values.get(n, ()) if kind == "input")
        if kind in read and isinstance(item, Kernel):
            read[kind].update(x.storage for n in item.reads for x in tasks.local.values.get(n, ()))
    stored: dict[tuple[Kind, int], int] = {}
    for storage, stage in stage_of.items():
        is_read: dict[Kind, bool] = {
            "forward": storage not in of_input and storage in read["input"] | read["weight"],
            "weight": storage in read["weight"],
        }
        for kind, counts in is_read.items():
            stored[kind, stage] = stored.get((kind, stage), 0) + (sizes[storage] if counts else 0)
    return stored


def _message_seconds(entry: Transfer, profile: MachineProfile) -> float:
    """Seconds of the messages to the first device of a transfer's target."""
    item = entry.spec.dtype.itemsize
    received = entry.routes.received_by(entry.target.mesh.devices[0])
    return sum(
        profile.transfer_seconds(m.sender, m.receiver, m.box.num_elements * item)
        for m in received
        if m.sender != m.receiver
    )
