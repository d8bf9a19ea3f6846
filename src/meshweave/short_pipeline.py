"""A pipeline of equal layers asked for by a short one: which is built, and how the whole follows from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

import torch
from torch import nn

from meshweave.capture.depth import EqualLayers
from meshweave.capture.step import CaptureOptions
from meshweave.cost.hardware import MachineProfile
from meshweave.cost.simulate.composed import (
    SHORT_MICROBATCHES,
    SHORT_SIZES,
    PipelineHabits,
    compose,
    layer_flops,
    short_schedule,
)
from meshweave.cost.simulate.frameworks import Framework
from meshweave.cost.simulate.result import Simulation
from meshweave.engine.actions import Schedule
from meshweave.engine.schedules import SCHEDULES, StageTimes, make_schedule
from meshweave.engine.schedules.form import ranks_of_stages
from meshweave.ir.graph import StepGraph
from meshweave.ir.mesh import Mesh
from meshweave.pipeline import PipelineChoice
from meshweave.place.plans import Resolved
from meshweave.place.stage_layout import StageLayout
from meshweave.place.stage_split import chain_of_layers
from meshweave.place.stages import lay_out_stages

SHORT_DEPTH = sum(SHORT_SIZES)


@dataclass(frozen=True, slots=True)
class StageLayers:
    """The number of layers of each stage, and the pipeline rank that has it."""

    sizes: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ShortForm:
    """The short form of a pipeline over `axis`: stages of `SHORT_SIZES` layers on a mesh that is otherwise as the whole
    one. `choice` is the schedule that was asked for."""

    axis: str
    whole: Mesh
    mesh: Mesh
    choice: PipelineChoice

    @staticmethod
    def of(
        resolved: Resolved, mesh: Mesh, choice: PipelineChoice, layers: EqualLayers, microbatches: int
    ) -> ShortForm | str:
        """The short form of a step whose plan is `resolved`, or why there is none."""
        if len(resolved.staged) != 1 or resolved.homes:
            return "its stages are not those of an axis"
        axis = resolved.staged[0][0]
        if layers.period > 1:
            return "equal layers are not all in a row"
        if choice.schedule is None and choice.name not in SCHEDULES:
            return "its schedule is searched for"
        if choice.schedule is not None and choice.schedule.num_microbatches != microbatches:
            return "its schedule has another number of microbatches"
        return ShortForm(axis, mesh, _short_mesh(mesh, axis), choice)

    def schedule(self, ranks: int, microbatches: int, per_rank: int, times: StageTimes | None = None) -> Schedule:
        """The schedule that was asked for."""
        known = times if self.choice.needs_times else None
        return self.choice.schedule or make_schedule(self.choice.name, ranks, microbatches, per_rank, known)

    def options(self, options: CaptureOptions) -> CaptureOptions:
        """The options of the short step."""
        asked = self.choice.schedule or make_schedule(self.choice.name, len(SHORT_SIZES), SHORT_MICROBATCHES)
        return replace(options, accumulate=SHORT_MICROBATCHES, pipeline=PipelineChoice.of(short_schedule(asked)))

    def resolved(self, resolved: Resolved) -> Resolved:
        """The plan of the short step, which is `resolved` for the short model and mesh."""
        return replace(resolved, staged=[(self.axis, StageLayout.of_sizes(SHORT_SIZES), "")])

    def layout(self, step: StepGraph, model: nn.Module, resolved: Resolved, count: int) -> StageLayers | str:
        """The stages of the whole, which has `count` layers, from the captured short step; or why they are not known.
        `resolved`: the plan for the whole model."""
        chain = chain_of_layers(step, model)
        if len(chain.layers) != SHORT_DEPTH:
            return "its list has other layers beside the equal ones"
        times = count - 2
        layers = (chain.layers[0], *[chain.layers[1]] * times, chain.layers[-1])
        work = (chain.work[0], *[chain.work[1]] * times, chain.work[-1])
        chain = replace(chain, layers=layers, work=work)
        _, wanted, order = resolved.staged[0]
        size, name = self.whole.size(self.axis), f"axis {self.axis} of mesh {self.whole}"
        usual = self.choice.ranks_of_stages
        layout, indices = lay_out_stages(chain, wanted, order, usual, (model, size, name))
        ranks = ranks_of_stages(self.schedule(size, size, len(layout.sizes) // size))
        if [ranks.get(stage) for stage in range(len(indices))] != list(indices):
            return "its schedule has the stages on other ranks"
        return StageLayers(layout.sizes, tuple(indices))

    def whole_step(
        self,
        short: Simulation,
        stages: StageLayers,
        microbatches: int,
        profile: MachineProfile,
        framework: Framework,
    ) -> Simulation:
        """The step of the whole pipeline, with these stages, from the simulated short one."""
        size = self.whole.size(self.axis)
        per_rank, count = len(stages.sizes) // size, sum(stages.sizes)
        devices = [self.whole.at(**{self.axis: index}).devices for index in range(size)]

        def message_seconds(hop: int, num_bytes: float) -> float:
            here, there = (devices[stages.ranks[stage]][0] for stage in (hop, hop + 1))
            return profile.transfer_seconds(here, there, num_bytes)

        composed = compose(
            short,
            stages.sizes,
            lambda times: self.schedule(size, microbatches, per_rank, times),
            message_seconds,
            devices,
            PipelineHabits(framework.blocking_messages and per_rank == 1, framework.gathers_ahead),
        )
        more = count - SHORT_DEPTH
        flops = (short.flops / SHORT_MICROBATCHES + more * layer_flops(short)) * microbatches
        peak = profile.peak_flops(getattr(torch, short.mfu_dtype)) if short.mfu_dtype else None
        mfu = flops / (composed.seconds * composed.num_devices * peak) if peak and not composed.verdict else None
        note = f"{SHORT_DEPTH} of {count} equal layers were built, in {len(SHORT_SIZES)} stages of another "
        note += "schedule: what each of the others takes and holds follows, and the schedule's clock says when"
        tokens = short.tokens // SHORT_MICROBATCHES * microbatches
        return replace(
            composed, mesh=str(self.whole), tokens=tokens, flops=flops, mfu=mfu, notes=(*composed.notes, note)
        )


def _short_mesh(mesh: Mesh, axis: str) -> Mesh:
    """The mesh with an index of an axis for each stage of the short pipeline: the first ones, on their devices, so that
    groups have the links that they have in the whole. Where there are fewer, they repeat on devices behind the others.
    """
    sizes = {name: mesh.size(name) for name in mesh.axis_names}
    inner = prod(list(sizes.values())[mesh.axis_names.index(axis) + 1 :])
    behind = max(mesh.devices) + 1
    columns = []
    for stage in range(len(SHORT_SIZES)):
        repetition, index = divmod(stage, sizes[axis])
        columns.append([device + repetition * behind for device in mesh.at(**{axis: index}).devices])
    devices = [
        device
        for first in range(0, len(columns[0]), inner)
        for column in columns
        for device in column[first : first + inner]
    ]
    return Mesh({**sizes, axis: len(SHORT_SIZES)}, devices=devices)
