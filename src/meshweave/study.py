"""Questions about a training step of one model: what it takes on which mesh, machine and batch.

What an answer is made of is kept for the next one, by what it depends on: captured steps by model and batch, programs
also by mesh, plan, costs and passes. Of many equal layers few are built (`capture/depth.py`), twice, and the whole step
follows from the two: each layer more adds the same seconds and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

from meshweave.build import CapturedStep, Progress, Target, build_captured, capture_step, check_size
from meshweave.capture.batch import Batch, call_model
from meshweave.capture.contract import Contract
from meshweave.capture.depth import EqualLayers, Omitted, find_equal_layers, shortened
from meshweave.capture.optimizer_groups import optimizer_of
from meshweave.capture.optimizers import OptimizerSpec, read_optimizer
from meshweave.capture.step import CaptureOptions, Precision, StepSource
from meshweave.cost.hardware import MachineProfile, load_profile
from meshweave.cost.simulate.composed import SHORT_SIZES
from meshweave.cost.simulate.frameworks import MESHWEAVE, Framework, framework_named
from meshweave.cost.simulate.growth import PlaceOf, SpanPlace, deepened, grown_figure, has_steady_pattern, is_steady
from meshweave.cost.simulate.result import Simulation, Span
from meshweave.errors import MeshweaveError, PlanError
from meshweave.ir.graph import PARTS, StepGraph, copied_graph, origin_of
from meshweave.ir.liveness import peak_bytes
from meshweave.ir.mesh import Mesh
from meshweave.passes import PassList, Prefetch, Recompute, pass_list_of
from meshweave.passes.options import PassesArgument
from meshweave.pipeline import PipelineArgument, PipelineChoice
from meshweave.place.plan_text import plan_of
from meshweave.place.plans import Plan, Resolved
from meshweave.place.resolve import resolve
from meshweave.program import Program
from meshweave.short_pipeline import SHORT_DEPTH, ShortForm
from meshweave.whatif import precision_in, simulate

_MOST_KEPT = 32  # captured steps, and programs, each of a few layers: some MB
_LEAST_PERIODS = 2  # of equal layers that are built: the first and the last
_LEAST_STEPS = 3  # of different depths, from which on it shows whether they grow by the same
_CLEAR = 0.95  # of the memory: parameters gathered once need more for a moment than the step at its peak
_WORTH = 1.5  # times as many layers as are built, from which on it is worth it
# The same of a pipeline, where what follows from the few is not exact: 0.3% of a step, 6% of the first stage's memory.
_WORTH_OF_PIPELINE = 4
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQuestion:
    """A step whose program is asked for: batch, mesh, plan and costs (`target`), how it is captured, its passes."""

    example: Any
    target: Target
    options: CaptureOptions
    pass_list: PassList

    @property
    def batch(self) -> tuple[Any, ...]:
        """What of the batch enters a captured step: shapes, dtypes, and what is no tensor."""
        batch = Batch.of(self.example)
        return batch.shapes, tuple(tensor.dtype for tensor in batch.tensors), tuple(batch.rest.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a step takes. `program` is that of the step, or of one with fewer equal layers; the model has
    `num_parameters`. `before`: what the step takes without the passes over its rank graphs; None if there are none."""

    simulation: Simulation
    program: Program
    num_parameters: int
    before: Simulation | None = None


@dataclass(frozen=True, slots=True)
class _Depth:
    """The model, or one with fewer equal layers (`omitted`: those that it lacks): as source, what its optimizer does,
    and the names of the whole model's parts in it."""

    source: StepSource
    optimizer: OptimizerSpec | None
    omitted: Omitted | None = None
    twins: Mapping[str, str] = field(default_factory=dict)

    def place_of(self, span: Span) -> SpanPlace:
        """What a span belongs to and is, the same for models of any depth."""
        module = span.module if self.omitted is None else self.omitted.place_of(span.module)
        what = (span.action, span.microbatch, span.phase, span.op, span.group, span.layout, span.bytes, span.flops)
        return SpanPlace(module, what)


@dataclass(slots=True)
class _Kept:
    """Values by what they depend on, compared with ==: the latest few."""

    values: list[tuple[Any, Any]] = field(default_factory=list)

    def get(self, key: Any, make: Callable[[], T]) -> T:
        for known, value in self.values:
            if known == key:
                return value  # type: ignore[no-any-return]
        value = make()
        self.values = [*self.values[1 - _MOST_KEPT :], (key, value)]
        return value


class Study:
    """A model, its loss and its optimizer, about whose training step questions are asked. A model or an optimizer that
    is changed in between needs a study of its own.

        study = mw.Study(model, loss=loss, optimizer=optimizer)
        study.simulate(batch, mesh="fsdp=64", profile="h100", framework="torchtitan")

    model, loss, optimizer, forward: as for `mw.compile`; the model may be on the meta device, and is not changed.
    progress: called with each stage of the compilation as it begins. Raises the errors of `mw.compile`, and
    CaptureError for an optimizer that `mw.register_update` does not know.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss: Callable[[Any, Any], Any],
        optimizer: Optimizer | Sequence[Optimizer] | None = None,
        forward: Callable[[nn.Module, Any], Any] = call_model,
        progress: Progress = lambda stage: None,
    ) -> None:
        single = optimizer_of(optimizer)
        spec = None if single is None else read_optimizer(single, model)
        self.progress = progress
        self._whole = _Depth(StepSource(model, loss, forward), spec)
        self._num_parameters = sum(parameter.numel() for parameter in model.parameters())
        layers = find_equal_layers(model)
        self._layers = layers if layers is None or spec is None or _is_same_update(model, layers, spec) else None
        self._depths = dict[int, _Depth]()
        self._steps, self._programs = _Kept(), _Kept()
        self._contracts = dict[Omitted | None, Contract]()  # of the step for the last batch, which the next is like
        self._decided = _Kept()  # for ops, by mesh and costs

    def simulate(
        self,
        example: Any,
        *,
        mesh: Mesh | str | Mapping[str, int],
        profile: MachineProfile | str,
        plan: Plan | str | None = None,
        passes: PassesArgument = "default",
        memory_cap_bytes: int | None = None,
        accumulate: int = 1,
        pipeline: PipelineArgument = None,
        clip_grad_norm: float | None = None,
        precision: Precision | torch.dtype | None = None,
        framework: str | Framework = MESHWEAVE,
        every_layer: bool = False,
        **how: Any,
    ) -> Simulation:
        """A training step on a machine, present or not: time, exposed communication with its reasons, memory.

        example: a batch with the global shapes and dtypes. mesh, plan, accumulate, pipeline, clip_grad_norm, precision,
            memory_cap_bytes: as for `mw.compile`. passes: too, as text or list; "default" are those of the framework.
        profile: the machine, by which moves are chosen, too. framework and further arguments: as for `mw.simulate`.
        every_layer: True: all layers are built, and spans are those of the whole step; else equal layers are, where
            the step follows from few, and a note says so.

        Raises the errors of `mw.compile` and `mw.simulate`.
        """
        its = framework if isinstance(framework, Framework) else framework_named(framework)
        costs = profile if isinstance(profile, MachineProfile) else load_profile(profile)
        listed = its.passes_with(passes) if isinstance(passes, str) else passes
        question = StepQuestion(
            example=example,
            target=Target(Mesh.of(mesh), plan_of(plan), costs),
            options=CaptureOptions(
                clip_grad_norm=clip_grad_norm,
                accumulate=accumulate,
                precision=Precision.of(precision),
                pipeline=PipelineChoice.of(pipeline),
            ),
            pass_list=pass_list_of(listed, memory_cap_bytes=memory_cap_bytes),
        )
        return self.answer(question, profile, framework=its, every_layer=every_layer, **how).simulation

    def answer(
        self,
        question: StepQuestion,
        profile: MachineProfile | str,
        *,
        framework: Framework,
        every_layer: bool = False,
        **how: Any,
    ) -> Answer:
        """What the step takes on the machine of `profile`; `how` is passed on to `whatif.simulate`. Of equal layers few
        are built where the step follows from them: not with `every_layer`, passes that search among programs, a
        short pipeline, a plan that treats equal layers differently, and not where each layer more adds something else,
        as with buckets of some bytes that span layers."""
        check_size(question.target.mesh)
        if question.options.clip_grad_norm is not None and self._whole.optimizer is None:
            raise PlanError("clip_grad_norm needs an optimizer", hint="pass optimizer= to mw.Study")
        precision = precision_in(framework, question.options.precision, question.target.plan)
        question = replace(question, options=replace(question.options, precision=precision))
        how = {**how, "framework": framework}
        if not every_layer and self._has_regular_layers(question):
            try:
                is_pipeline = question.options.pipeline is not None
                return (self._from_short if is_pipeline else self._from_few)(question, profile, how)
            except _NotRegular as reason:
                self.progress(f"all layers: {reason}")
            except MeshweaveError:  # the whole model says what is wrong with it, if anything is
                self.progress("all layers")
        program, _ = self._program(self._whole, question)
        simulation = simulate(program, profile, **how)
        has_passes = program.roles is not program.expanded or bool(program.optimized.variants)
        before = simulate(program.as_expanded, profile, **how) if has_passes else None
        return Answer(simulation=simulation, before=before, program=program, num_parameters=self._num_parameters)

    def _has_regular_layers(self, question: StepQuestion) -> bool:
        """Whether the step has so many equal layers that building few of them is worth it, and nothing that looks at
        all of them together."""
        passes, layers = question.pass_list, self._layers
        is_regular = all(isinstance(each, Recompute | Prefetch) for each in passes.passes)
        if layers is None or not is_regular or passes.memory_cap_bytes is not None:
            return False
        if question.options.pipeline is not None:
            return layers.count >= _WORTH_OF_PIPELINE * SHORT_DEPTH
        return len(self._numbers(question)) >= _LEAST_STEPS

    def _numbers(self, question: StepQuestion) -> range:
        """Of how many periods of equal layers models may be built: of more than are gathered ahead, one more in each,
        and not of so many in all that the whole model is cheaper."""
        layers = self._layers
        assert layers is not None
        ahead = max((each.blocks for each in question.pass_list.passes if isinstance(each, Prefetch)), default=0)
        first = end = max(_LEAST_PERIODS, 1 + -(-ahead // layers.period))
        while sum(range(first, end + 1)) * _WORTH <= layers.num_periods:
            end += 1
        return range(first, end)

    def _from_few(self, question: StepQuestion, profile: MachineProfile | str, how: Mapping[str, Any]) -> Answer:
        """The answer from models with few periods of the equal layers."""
        layers, microbatches = self._layers, question.options.accumulate
        assert layers is not None
        self._check_plan(question)
        program, simulation, number = self._grown(question, profile, how)
        notes = _notes_of_whole(simulation, program, microbatches)
        built, of_list = f"{number * layers.period} of {layers.count} equal layers", layers.path or "the model itself"
        notes = (*notes, f"{built} ({of_list}) were built: each of the others adds the same")
        simulation = replace(simulation, notes=notes)
        return Answer(simulation=simulation, program=program, num_parameters=self._num_parameters)

    def _from_short(self, question: StepQuestion, profile: MachineProfile | str, how: Mapping[str, Any]) -> Answer:
        """The answer of a pipeline from one with a few short stages."""
        layers, target, choice = self._layers, question.target, question.options.pipeline
        assert layers is not None
        assert choice is not None
        depth, framework = self._depth(SHORT_DEPTH), how["framework"]
        whole = resolve(target.plan, self._whole.source.model, target.mesh)
        form = ShortForm.of(whole, target.mesh, choice, layers, question.options.accumulate)
        if isinstance(form, str):
            raise _NotRegular(form)
        resolved = resolve(target.plan, depth.source.model, form.mesh)
        if _by_twins(whole, depth.twins) != _by_twins(resolved, {}):
            raise _NotRegular("the plan treats equal layers differently")
        captured = self._captured(depth, question, resolved)
        stages = form.layout(captured.step.captured, depth.source.model, whole, layers.count)
        if isinstance(stages, str):
            raise _NotRegular(stages)
        # memory is asked of the whole step, once it is composed
        of_short = replace(target, mesh=form.mesh, plan=None, fits=lambda peak: True)
        short = replace(question, target=of_short, options=form.options(question.options))
        key = depth.omitted, question.batch, target, question.options, question.pass_list, short.options
        program = self._programs.get(key, lambda: self._build(captured, short, form.resolved(resolved)))
        if len(program.roles) != len(SHORT_SIZES):
            raise _NotRegular("devices of a stage have different work")
        machine = framework.machine(load_profile(profile)) if isinstance(profile, str) else profile
        simulation = simulate(program, machine, **{**how, "every_microbatch": True})
        simulation = replace(simulation, notes=_notes_of_whole(simulation, program, question.options.accumulate))
        simulation = form.whole_step(simulation, stages, question.options.accumulate, machine, framework)
        is_open = question.options.precision.accumulate_in == whole.accumulate_in == "auto"
        if simulation.verdict and is_open:
            raise _NotRegular("memory decides how gradients of microbatches are added up")
        return Answer(simulation=simulation, program=program, num_parameters=self._num_parameters)

    def _grown(
        self, question: StepQuestion, profile: MachineProfile | str, how: Mapping[str, Any]
    ) -> tuple[Program, Simulation, int]:
        """What the step takes, from models of more and more layers until the last add the same; also the program of the
        largest and the number of its periods."""
        layers, fits = self._layers, self._fits_of(question)
        assert layers is not None
        simulations, places, outside = list[Simulation](), list[PlaceOf](), set[tuple[int, int]]()
        for number in self._numbers(question):
            depth = self._depth(number)
            program, _ = self._program(depth, question, fits)
            if len(program.roles) > 1:
                raise _NotRegular("layers are on different devices")
            outside.add(_outside(program.captured, depth.omitted))
            if len(outside) > 1:
                raise _NotRegular("what is beside the layers grows with them")
            simulations.append(simulate(program, profile, **how))
            places.append(depth.place_of)
            latest, of_these = simulations[-_LEAST_STEPS:], places[-_LEAST_STEPS:]
            if len(latest) < _LEAST_STEPS:
                continue
            if not has_steady_pattern(latest, of_these):
                raise _NotRegular("each layer more is in other buckets")
            times = layers.num_periods - number
            if is_steady(latest) and (deep := deepened(latest, times, question.options.accumulate, of_these)):
                return program, deep, number
        raise _NotRegular("each layer more adds something else")

    def _depth(self, number: int) -> _Depth:
        """The model with so many periods of its equal layers."""
        assert self._layers is not None
        if number not in self._depths:
            shorter = shortened(self._whole.source.model, self._layers, number * self._layers.period)
            source, optimizer = replace(self._whole.source, model=shorter.model), self._whole.optimizer
            spec = None if optimizer is None else optimizer.renamed(shorter.names)
            self._depths[number] = _Depth(source, spec, shorter.omitted, shorter.twins)
        return self._depths[number]

    def _check_plan(self, question: StepQuestion) -> None:
        """Raise _NotRegular if the plan says something else of one of the equal layers than of the others."""
        target, depth = question.target, self._depth(_LEAST_PERIODS)
        whole, few = (resolve(target.plan, source.model, target.mesh) for source in (self._whole.source, depth.source))
        if whole.staged or whole.homes or _by_twins(whole, depth.twins) != _by_twins(few, {}):
            raise _NotRegular("the plan treats equal layers differently")

    def _fits_of(self, question: StepQuestion) -> tuple[bool, ...]:
        """What memory answers with all layers where it decides how gradients of microbatches are added up. Raises
        _NotRegular where it has room for some gathers of parameters, which are then made once a step, but not for all.
        """
        room = question.pass_list.room(question.target.costs)
        known: tuple[bool, ...] = ()
        if question.options.accumulate == 1 or room is None:
            return known
        assert self._layers is not None
        numbers = self._numbers(question)[:2]
        times = self._layers.num_periods - numbers[1]
        while True:
            built = [self._program(self._depth(number), question, known) for number in numbers]
            asked = zip(*(memory.peaks for _, memory in built), strict=True)
            fits = tuple(grown_figure(low, high, times) <= room for low, high in asked)
            guesses = (*known, *[True] * len(fits))
            wrong = next((i for i, fit in enumerate(fits) if fit != guesses[i]), None)
            if wrong is None:
                break
            known = fits[: wrong + 1]
        low, high = (max(map(peak_bytes, program.roles)) for program, _ in built)
        if fits[0] and grown_figure(low, high, times) > _CLEAR * room:
            raise _NotRegular("there is memory for some parameters to be gathered once a step")
        return known

    def _program(
        self, depth: _Depth, question: StepQuestion, known: tuple[bool, ...] | None = None
    ) -> tuple[Program, _FitAnswers]:
        """The program of a step, at most once, and what it asked of memory; `known` answers to the first questions, the
        others fit. Without them the machine's memory decides."""
        key = depth.omitted, question.batch, question.target, question.options, question.pass_list, known
        return self._programs.get(key, lambda: self._built(depth, question, known))

    def _built(
        self, depth: _Depth, question: StepQuestion, known: tuple[bool, ...] | None
    ) -> tuple[Program, _FitAnswers]:
        target, memory = question.target, _FitAnswers(known or ())
        resolved = resolve(target.plan, depth.source.model, target.mesh)
        question = replace(question, target=replace(target, fits=None if known is None else memory.fits))
        return self._build(self._captured(depth, question, resolved), question, resolved), memory

    def _captured(self, depth: _Depth, question: StepQuestion, resolved: Resolved) -> CapturedStep:
        """The captured step, at most once."""
        options, target = question.options, question.target
        precision = replace(options.precision, accumulate_in="auto")
        options = replace(options, pipeline=None, precision=precision)  # neither enters a captured step
        key = depth.omitted, question.batch, tuple(resolved.pins), options, target.own_parts

        def capture() -> CapturedStep:
            self.progress("capture")
            like, own_parts = self._contracts.get(depth.omitted), target.own_parts
            return capture_step(depth.source, question.example, depth.optimizer, resolved, options, own_parts, like)

        captured = self._steps.get(key, capture)
        self._contracts[depth.omitted] = captured.step.contract
        return captured

    def _build(self, captured: CapturedStep, question: StepQuestion, resolved: Resolved) -> Program:
        """The program of a captured step by this plan."""
        target = question.target
        target = replace(target, decided=self._decided.get((target.mesh, target.costs), dict[Any, Any]))
        its = question.options, question.pass_list, self.progress
        return build_captured(_copied(captured), resolved, target, *its)


@dataclass(slots=True)
class _FitAnswers:
    """Answers whether a step fits in memory: `known` ones, then yes; and keeps the peaks, in bytes, that were asked."""

    known: tuple[bool, ...]
    peaks: list[int] = field(default_factory=list)

    def fits(self, peak: int) -> bool:
        self.peaks.append(peak)
        return self.known[len(self.peaks) - 1] if len(self.peaks) <= len(self.known) else True


class _NotRegular(Exception):
    """Why a step does not follow from steps with fewer layers."""


def _notes_of_whole(simulation: Simulation, program: Program, microbatches: int) -> tuple[str, ...]:
    """The notes of a step of fewer layers or microbatches, without the bytes of its sums of gradients."""
    notes = [text for text in simulation.notes if text != program.accumulation]
    if program.accumulation:
        where = "in shards, reduced in each microbatch" if "in shards" in program.accumulation else "whole"
        notes.append(f"gradients of {microbatches} microbatches are added up {where}")
    return tuple(notes)


def _copied(given: CapturedStep) -> CapturedStep:
    """The captured step with graphs of its own, in which stages can be numbered."""
    step = given.step
    ahead = None if step.ahead is None else _copied_graph(step.ahead)
    return replace(given, step=replace(step, captured=_copied_graph(step.captured), ahead=ahead))


def _copied_graph(step: StepGraph) -> StepGraph:
    return StepGraph(copied_graph(step.graph), step.inputs, step.outputs, step.constants)


def _is_same_update(model: nn.Module, layers: EqualLayers, spec: OptimizerSpec) -> bool:
    """Whether the optimizer does to each of the equal layers what it does to the others; its numbers may differ."""
    forms: dict[str, set[Any]] = {}
    for name, _ in model.named_parameters():
        kind = spec.kinds[spec.kind_of[name]] if name in spec.kind_of else None
        form = None if kind is None else (kind.rule, kind.switches, tuple(spec.slots[name].items()))
        forms.setdefault(layers.name_of_all(name), set()).add(form)
    return all(len(each) == 1 for each in forms.values())


def _outside(step: StepGraph, omitted: Omitted | None) -> tuple[int, int]:
    """How many ops of forward and loss are beside the layers, and how many operands they have."""
    ops = [node for node in step.graph.nodes if node.op == "call_function"]
    ahead = [node for node in ops if PARTS[origin_of(node).phase] == PARTS["forward"]]
    beside = [node for node in ahead if omitted is None or not omitted.has(origin_of(node).module)]
    return len(beside), sum(len(node.all_input_nodes) for node in beside)


def _by_twins(resolved: Resolved, twins: Mapping[str, str]) -> tuple[set[Any], ...]:
    """What a plan says of modules and parameters, each by the name of its twin."""

    def of(name: str) -> str:
        return twins.get(name, name)

    return (
        {(of(name), *dims.items()) for name, dims in resolved.shards.items()},
        {(of(name), side, constraint) for name, side, constraint in resolved.pins},
        {of(name) for name in resolved.kept},
    )
