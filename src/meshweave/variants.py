"""The programs of a step: one for each batch shape, number of microbatches, part of the step, and plain attributes of
modules (`training` among them) that make a difference. All share the same state."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshweave.capture.batch import Batch, batch_size, check_microbatches, is_plain_number, shapes_text
from meshweave.capture.guards import RECOMPILE, Guards, StepKey, check_entries, entry_place
from meshweave.capture.record import Difference
from meshweave.capture.step import Part
from meshweave.errors import CaptureError, LayoutError, MeshweaveError, StepError
from meshweave.ir.graph import Input, Spec, spec_of
from meshweave.place.row_lookups import row_lookups
from meshweave.program import Program
from meshweave.runtime.interfaces import World
from meshweave.runtime.rows import RowsCheck
from meshweave.runtime.session import Session

# (example, part, accumulate, a program of the same state, whose choices it shares)
Build = Callable[[Any, Part, int, Program | None], Program]
_MOST_KEYS = 16  # of a program: so many plain attributes or entries of batches that make no difference are remembered
_NOTES = logging.getLogger("meshweave")


@dataclass(slots=True, kw_only=True)
class Variant:
    """A program with its session. `keys` are those of calls for which it is known to be valid, the latest last."""

    program: Program
    session: Session
    keys: list[StepKey]
    rows: RowsCheck | None = None
    number: int = 1
    last_use: int = 0
    updated: frozenset[str] = field(init=False)  # the parameters that it changes
    ahead: Session | None = field(init=False, default=None)  # of what microbatches need of the whole batch

    def __post_init__(self) -> None:
        self.updated = frozenset(self.program.captured.updated)
        if self.program.ahead is not None:
            settings = replace(self.session.settings, accumulate=1, is_sum=False, pipeline=None)
            self.ahead = Session(self.program.ahead.roles, self.session.world, settings, share=self.session)

    def micros(self, batch: Batch) -> list[dict[str, Tensor]]:
        """The entries of each microbatch, with what all need of the whole batch."""
        parts = batch.split(self.accumulate, self.program.rows)
        whole: dict[str, Tensor] = {}
        if self.ahead is not None and self.program.ahead is not None:
            specs = outputs_of(self.program.ahead)
            _, whole = self.ahead.evaluate(dict(zip(batch.names, batch.tensors, strict=True)), specs)
        return [dict(zip(batch.names, part, strict=True)) | whole for part in parts]

    @property
    def shown(self) -> str:
        """The shapes that it takes, as text."""
        return shapes_text((item.name, item.spec.shape) for item in self.batch)

    @property
    def part(self) -> Part:
        return self.program.options.part

    @property
    def accumulate(self) -> int:
        return self.program.options.accumulate

    @property
    def batch(self) -> list[Input]:
        """The batch inputs of the captured step: those of a microbatch."""
        return [item for item in self.program.captured.inputs if item.kind == "batch"]

    @property
    def outputs(self) -> dict[str, Spec]:
        """The model's outputs, by name."""
        return outputs_of(self.program)

    def local_shape(self, item: Input) -> tuple[int, ...]:
        """The local shape of a batch tensor on the first device of this process."""
        layout = self.program.placement.layout("batch", item.name, item.spec)
        return layout.box_of(item.spec.shape, self.session.world.devices[0]).size

    def fits(self, batch: Batch, is_local: bool) -> bool:
        """Whether microbatches match the shapes of this program: the global shapes, or this rank's (`is_local`)."""
        shapes = batch.shapes_in_parts(self.accumulate, self.program.rows)
        return all(shapes.get(i.name) == (self.local_shape(i) if is_local else i.spec.shape) for i in self.batch)


class Variants:
    """Finds or compiles the program for a call."""

    def __init__(self, guards: Guards, first: Variant, build: Build | None) -> None:
        """`build` compiles a program; without it there is only the example's shape."""
        options = first.session.settings.run
        self.guards, self.build, self.limit = guards, build, options.max_programs
        self._places: set[str] = set()  # whose changes have cost a trace
        self._noted: set[str] = set()  # of those, the ones that were noted
        self._numbers: set[str] = set()  # entries of batches, numbers that change, which are inputs of the step
        self._constants: set[str] = set()  # such on which shapes or control flow depend
        self.is_local = False  # whether batches are this rank's rows alone
        self._num_uses, self._num_compiled = 0, 1
        self.all = [first]
        self._add_program(first)

    @property
    def first(self) -> Variant:
        return self.all[0]

    def _add_program(self, variant: Variant) -> None:
        """What forward assigns while it is traced is no change of a user's."""
        self.guards.written |= variant.program.contract.written

    def prepare(self, batch: Batch) -> None:
        """Compile for batches of these global shapes."""
        known, self.is_local = self.is_local, False
        self._choose(batch, "train", self.first.accumulate)
        self.is_local = known

    def of(
        self,
        batch: Batch,
        part: Part = "train",
        accumulate: int | None = None,
        groups: Sequence[Mapping[str, Any]] = (),
    ) -> tuple[Variant, Batch]:
        """The program for a batch, and the batch with its changing numbers as tensors. Its guards have been checked.

        The optimizer's `groups` are compared over the ranks, as the batch is. Raises LayoutError for a batch of another
        dtype or number of dims than the example, and when there would be more than `max_programs`; StepError if
        anything but shapes and modes has changed.
        """
        count = self.first.accumulate if accumulate is None else accumulate
        is_trained = part == "train"
        if is_trained:
            self.compare(self.first, batch, groups)
        variant = self._choose(batch, part, count)
        batch = self._with_numbers(batch)
        if is_trained and variant is not self.first:
            self.compare(variant, batch, groups)
        return variant, batch

    def _with_numbers(self, batch: Batch) -> Batch:
        """The batch with numbers that have changed as tensors, as precise as the step."""
        is_wide = any(item.spec.dtype == torch.float64 for item in self.first.program.captured.inputs)
        return batch.with_numbers(self._numbers, torch.float64 if is_wide else torch.get_default_dtype())

    def _choose(self, batch: Batch, part: Part, accumulate: int) -> Variant:
        check_microbatches(accumulate)
        if self.first.program.is_sum:  # the same step with any number of microbatches
            accumulate = batch.parts_from(accumulate, self.first.program.rows)
        batch = self._with_numbers(batch)
        key = self.guards.check(batch)
        fitting = [v for v in self._alike(part, accumulate) if v.fits(batch, self.is_local)]
        if known := next((v for v in fitting if key in v.keys), None):
            return self._used(known)
        if variant := self._with_changing_numbers(fitting, batch, part, accumulate, key):
            return variant
        differences = list[Difference]()
        for variant in fitting:
            difference = self._compare_step(variant, batch, key)
            if difference is None:
                return self._used(variant)
            differences.append(difference)
        if differences and (self.build is None or self.limit < 2):
            raise _another_step(fitting[0], key, differences[0])
        return self._compiled(batch, part, accumulate, key)

    def _with_changing_numbers(
        self, fitting: Sequence[Variant], batch: Batch, part: Part, accumulate: int, key: StepKey
    ) -> Variant | None:
        """A program that has the numbers of the batch which have changed as inputs. None if none has, there may be no
        other program, or shapes or control flow depend on them."""
        places = {place for variant in fitting for place in key.changes(variant.keys[-1])}
        changing = {n for n, v in batch.rest.items() if is_plain_number(v) and entry_place(n) in places}
        changing -= self._constants
        if not changing or self.build is None or self.limit < 2:
            return None
        self._numbers |= changing
        try:
            return self._choose(batch, part, accumulate)
        except MeshweaveError:
            self._numbers -= changing
            self._constants |= changing
            return None

    def _compare_step(self, variant: Variant, batch: Batch, key: StepKey) -> Difference | None:
        """Trace the step once more, in the present state of the modules: the first op in which a program differs from
        it. If there is none, the program is valid for this key, too."""
        changed = {place for place in key.changes(variant.keys[-1]) if not place.endswith(".training")}
        difference = variant.program.contract.difference(batch)
        if difference is None:
            variant.keys[:] = [*variant.keys[1 - _MOST_KEYS :], key]
            if often := sorted(changed & self._places - self._noted):
                _NOTES.warning(
                    "%s makes no difference to the step, but each new value costs a trace of the step: keep it outside "
                    "of the module, or in a dict; leave it out of the batch",
                    ", ".join(often[:3]),
                )
                self._noted.update(often)
            self._places |= changed
        return difference

    def _alike(self, part: Part, accumulate: int) -> list[Variant]:
        return [v for v in self.all if (v.part, v.accumulate) == (part, accumulate)]

    def compare(self, variant: Variant, batch: Batch, groups: Sequence[Mapping[str, Any]]) -> None:
        """Compare over the ranks the batches that they pass."""
        if variant.rows is None or not {item.name for item in variant.batch} <= set(batch.names):
            return
        variant.rows.check(batch, groups, is_own=self.is_local)

    def _compiled(self, batch: Batch, part: Part, accumulate: int, key: StepKey) -> Variant:
        first = self.first
        if self.build is None or (part != "outputs" and not self._is_like_the_example(batch)):
            check_entries(first.program.contract.batch, batch)
            return first  # its error lists the expected entries
        if self.limit < 2:
            raise LayoutError(
                "this step has one program, and may have no other",
                where=f"batch of {shapes_text(batch.shapes)}",
                expected="batches of the example's shape",
                hint="raise mw.RunOptions(max_programs=...), or pad batches to that shape in your collate function",
            )
        example = self._example(batch)
        self._num_compiled += 1
        like = max(self._alike(part, accumulate), key=lambda v: v.last_use, default=first)
        shown = f"{shapes_text(batch.shapes)}, {self._attributes_text(key)}{self._entries_text(key, like)}"
        first.session.world.note(f"compiles program {self._num_compiled} ({shown})")
        level = logging.WARNING if self._num_compiled <= self.limit + 1 else logging.INFO
        if len(self.all) >= self.limit:
            self._drop_variant(batch, level)
        _NOTES.log(
            level,
            "compiles for a batch of shape %s%s (program %d of at most %d)",
            shown, f", {accumulate} microbatches" if accumulate > 1 else "", len(self.all) + 1, self.limit,
        )  # fmt: skip
        try:
            program = self.build(example, part, accumulate, like.program)
        except CaptureError:
            if part != "outputs":
                check_entries(first.program.contract.batch, batch)  # an entry that is not there may be the reason
            raise
        settings = replace(
            first.session.settings,
            accumulate=accumulate,
            is_sum=program.is_sum,
            pipeline=program.pipeline,
            pairs=program.pairs,
        )
        session = Session(program.roles, first.session.world, settings, share=first.session)
        rows, number = rows_check(program, first.session.world), self._num_compiled
        variant = Variant(program=program, session=session, keys=[key], rows=rows, number=number)
        self.all.append(variant)
        self._add_program(variant)
        return self._used(variant)

    def _attributes_text(self, key: StepKey) -> str:
        """The modes of the modules, and other plain attributes that differ from those at compile."""
        count, training = len(self.guards.modules), sum(module.training for _, module in self.guards.modules)
        modes = f"{training} of {count} modules in training"
        if training in (0, count):
            modes = "model.train()" if training else "model.eval()"
        others = [f"{place}={value}" for place, value in key.attributes if not place.endswith(".training")]
        return ", ".join([modes, *others])

    def _entries_text(self, key: StepKey, before: Variant) -> str:
        """The entries of the batch that differ from those of an earlier program and are not tensors."""
        entries = dict(key.rest).keys() | dict(before.keys[-1].rest)
        changed = sorted({entry_place(name) for name in entries}.intersection(key.changes(before.keys[-1])))
        return f", for another value of {', '.join(changed)}" if changed else ""

    def _used(self, variant: Variant) -> Variant:
        self._num_uses += 1
        variant.last_use = self._num_uses
        return variant

    def _drop_variant(self, batch: Batch, level: int) -> None:
        """Drop the least recently used program, except the first, which owns the state; it is compiled again when its
        shape comes back. What is logged at first only is a warning: sizes that change in every batch are in order."""
        oldest = min(self.all[1:], key=lambda v: v.last_use)
        self.all.remove(oldest)
        if _NOTES.isEnabledFor(level):
            text = "this step may have at most %d programs: the least recently used, for %s, is dropped. %s"
            _NOTES.log(level, text, self.limit, oldest.shown, self._advice(batch))

    def _advice(self, batch: Batch) -> str:
        """Which few shapes would be enough: the sizes that vary, rounded up to powers of two. If none does, attributes
        of modules or other entries of the batch do."""
        shapes = [dict(batch.shapes), *({i.name: i.spec.shape for i in v.batch} for v in self.all)]
        sizes = {
            (name, dim): {its[name][dim] for its in shapes if name in its and len(its[name]) > dim}
            for name, shape in shapes[0].items()
            for dim in range(len(shape))
        }
        by_number = {name for lookup in row_lookups(self.first.program.captured) for name in lookup.entries}
        counting = sorted({name for (name, _), each in sizes.items() if len(each) > 1} & by_number)
        few = [
            f"{name} dim {dim}: {', '.join(str(s) for s in sorted({1 << (size - 1).bit_length() for size in each}))}"
            for (name, dim), each in sizes.items()
            if len(each) > 1 and name not in counting
        ]
        unpadded = f"; do not pad {', '.join(counting)}, whose numbers choose rows of the batch" if counting else ""
        if not few and not counting:
            return "Pass a value that changes from step to step in the batch, as a tensor"
        if not few:
            return f"Raise max_programs{unpadded}"
        return (
            f"Pad to few sizes in your collate function (mw.compile(shapes=[...])), such as {'; '.join(few)}, "
            f"or raise max_programs{unpadded}"
        )

    def _example(self, batch: Batch) -> Any:
        """The batch as an example of global shapes. If ranks pass their own rows, sizes are multiplied as the rows of
        the first example are cut."""
        shapes = {item.name: (item.spec.shape, self.first.local_shape(item)) for item in self.first.batch}
        is_cut = any(whole != local for whole, local in shapes.values())
        if not (self.first.session.world.is_distributed and is_cut and self.is_local):
            return batch.rebuild(batch.tensors)
        whole, local = next((a, b) for a, b in shapes.values() if a != b)
        count, rows = whole[0] // max(local[0], 1), batch_size(t.shape for t in batch.tensors)
        is_rows = [bool(t.dim()) and t.shape[0] == rows for t in batch.tensors]
        tensors = [
            t.repeat(count, *(1 for _ in t.shape[1:])) if r else t for t, r in zip(batch.tensors, is_rows, strict=True)
        ]
        return batch.rebuild(tensors)

    def _is_like_the_example(self, batch: Batch) -> bool:
        """Whether those of the batch's entries that the example has are of the same dtype and number of dims."""
        tensors = dict(zip(batch.names, batch.tensors, strict=True))
        both = [(tensors[item.name], item.spec) for item in self.first.batch if item.name in tensors]
        return bool(both) and all((t.dtype, t.dim()) == (spec.dtype, len(spec.shape)) for t, spec in both)


def _another_step(variant: Variant, key: StepKey, difference: Difference) -> StepError:
    return StepError(
        "the step would differ from the compiled step",
        where=", ".join(key.changes(variant.keys[0])[:3]),
        got=f"{difference.got} for {difference.expected}",
        expected="what the only program of this step was compiled from",
        hint=f"raise RunOptions(max_programs=...), or {RECOMPILE}",
    )


def outputs_of(program: Program) -> dict[str, Spec]:
    """The outputs of kind output, by name."""
    results = program.captured.results
    return {name: spec_of(node) for (kind, name), node in results.items() if kind == "output"}


def rows_check(program: Program, world: World) -> RowsCheck | None:
    """The check that compares the batches of ranks; None if a process has all devices."""
    if not world.is_distributed:
        return None
    specs = {item.name: item.spec for item in program.captured.inputs if item.kind == "batch"}
    layouts = {name: program.placement.layout("batch", name, spec) for name, spec in specs.items()}
    return RowsCheck(world, layouts, {name: spec.shape for name, spec in specs.items()})


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """`model.eval()`, and every module back in its own mode at the end."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
