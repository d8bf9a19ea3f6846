"""Rows of a batch over ranks: which rows are a rank's own, and a check that ranks that need the same rows pass the same
rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from meshweave.capture.batch import Batch, batch_size
from meshweave.errors import LayoutError, PlanError, StepError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.runtime.consensus import named, ranks_of_job
from meshweave.runtime.fingerprint import fingerprint, text_number
from meshweave.runtime.together import join
from meshweave.sharding.plan_text import plan_of
from meshweave.sharding.plans import Plan
from meshweave.sharding.resolve import batch_axes

BATCHES = ("global", "local")
ALWAYS_FIRST = 16  # the first calls, in all of which batches are compared
THEN_EVERY = 32  # after them every n-th call
MOST_WORDS = 1 << 16  # 8-byte words of a tensor that are compared: all words up to 512 KiB


def batch_shard(mesh: Mesh | str | Mapping[str, int], plan: Plan | str | None = None) -> tuple[int, int]:
    """Into how many parts a batch is cut on `mesh`, and which part is this rank's: DistributedSampler's num_replicas
    and rank. Ranks that differ only along tp, pp or cp have the same part. (1, 0) in a single process."""
    join(None)
    job = ranks_of_job()
    if job is None:
        return 1, 0
    mesh = Mesh.of(mesh)
    axes, at = batch_axes(mesh, plan_of(plan)), mesh.coordinates(mesh.index(job[1]))
    index = 0
    for axis in axes:
        index = index * mesh.size(axis) + at[axis]
    return prod(mesh.size(axis) for axis in axes), index


def global_example(example: Any, batch: str, num_parts: int) -> Any:
    """The global batch of which `example` is a single rank's rows: each entry with rows repeated `num_parts` times; the
    example itself with batch="global". Values do not matter. PlanError for another value of `batch`, or an entry
    without rows that would then count as an entry with rows."""
    if batch not in BATCHES:
        raise PlanError("unknown kind of batch", got=f"batch={batch!r}", expected=" or ".join(BATCHES))
    if batch == "global" or num_parts == 1:
        return example
    local = Batch.of(example)
    rows = batch_size(t.shape for t in local.tensors)
    for name, tensor in zip(local.names, local.tensors, strict=True):
        if rows is not None and tensor.dim() and tensor.shape[0] == rows * num_parts:
            raise PlanError(
                "an entry without rows has as many as the global batch",
                where=f"entry '{name}'",
                got=f"{list(tensor.shape)} beside {rows} rows on each of {num_parts} ranks",
                hint="pass it as a buffer of the model, or pass global batches with batch='global'",
            )
    has_rows = [t.dim() > 0 and t.shape[0] == rows for t in local.tensors]
    whole = [torch.cat([t] * num_parts) if is_cut else t for t, is_cut in zip(local.tensors, has_rows, strict=True)]
    return local.rebuild(whole)


class RowsCheck:
    """Compares over all ranks the batches that they pass: whole batches must be the same everywhere, own rows on ranks
    at the same place of the batch axes; and numbers of the optimizer's groups everywhere.

    It compares fingerprints, in the first ALWAYS_FIRST calls and then in each THEN_EVERY-th: an all-gather of 32 bytes
    per entry and a wait for it. All ranks raise the same error, so that the job can continue.
    """

    def __init__(self, world: Any, layouts: Mapping[str, Layout], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` are those of the entries in a global microbatch, `layouts` their layouts."""
        self.world, self.num_calls, self.warned = world, 0, False
        self.names = tuple(layouts)
        self.ranks: tuple[int, ...] = world.mesh.devices
        size = batch_size(shapes.values())
        self.has_rows = {name: bool(shape) and shape[0] == size for name, shape in shapes.items()}
        self.num_rows = {name: shape[0] if shape else -1 for name, shape in shapes.items()}
        # Per entry the place of each rank's rows: ranks at the same place have the same rows.
        self.places = {
            name: {rank: layout.box_of(shapes[name], rank).offset[:1] for rank in self.ranks}
            for name, layout in layouts.items()
        }

    @property
    def is_due(self) -> bool:
        """Whether the next call is compared."""
        return self.num_calls < ALWAYS_FIRST or self.num_calls % THEN_EVERY == 0

    def are_own(self, batch: Batch, is_whole: bool) -> bool:
        """Whether ranks pass rows of their own: no rank has a batch of the global sizes (`is_whole`), and batches
        differ. All ranks call it, and get the same answer."""
        contents = [(list(t.shape), int(fingerprint(t, MOST_WORDS))) for t in batch.tensors]
        answers = self.world.gather(torch.tensor([text_number(repr(contents)), int(is_whole)]))
        values = {rank: int(answer[0]) for rank, answer in answers.items()}
        return not any(int(answer[1]) for answer in answers.values()) and bool(_others(values))

    def check(
        self, batch: Batch, parts: int = 1, groups: Sequence[Mapping[str, Any]] = (), *, is_own: bool = False
    ) -> None:
        """Compare this call's batch, of `parts` microbatches, if this call is due: whole, or (`is_own`) the rows of
        each rank. Raises LayoutError or StepError on every rank."""
        is_due = self.is_due
        self.num_calls += 1
        if not is_due:
            return
        tensors = dict(zip(batch.names, batch.tensors, strict=True))
        numbers = [torch.tensor([text_number(_settings_text(groups))])]
        for name in self.names:
            value = tensors[name]
            sizes = (*value.shape, -1, -1)[:2]
            numbers += [torch.tensor([*sizes, text_number(f"{value.dtype}{list(value.shape)}")])]
            numbers += [fingerprint(value, MOST_WORDS).reshape(1).cpu()]
        answers = self.world.gather(torch.cat(numbers))
        self._judge({rank: numbers.tolist() for rank, numbers in answers.items()}, parts, is_own)

    def _judge(self, answers: Mapping[int, Sequence[int]], parts: int, is_own: bool) -> None:
        settings = {rank: numbers[0] for rank, numbers in answers.items()}
        if others := _others(settings):
            raise StepError(
                "ranks have different settings of the optimizer",
                where=named(others),
                got="other numbers in optimizer.param_groups than on the first rank",
                hint="schedule by values that are equal on all ranks: step numbers, or a metric reduced over the ranks",
            )
        alike = []
        for i, name in enumerate(self.names):
            rows, lengths, shapes, contents = (
                {rank: numbers[1 + 4 * i + column] for rank, numbers in answers.items()} for column in range(4)
            )
            if others := _others(shapes):
                raise self._other_size(name, others, rows, lengths)
            num_whole = self.num_rows[name] * (parts if self.has_rows[name] else 1)
            alike.append(self._judge_entry(name, num_whole, contents, is_own and self.has_rows[name]))
        if alike.count(True) and not alike.count(False) and not self.warned and self.world.rank == self.ranks[0]:
            self.warned = True
            warnings.warn(_ALIKE, stacklevel=5)  # the caller of the step

    def _judge_entry(self, name: str, num_whole: int, contents: Mapping[int, int], is_own: bool) -> bool | None:
        """Raises if ranks differ that must not. Returns whether all passed the same rows as their own; None if the rows
        are not a rank's own."""
        places = self.places[name]
        num_places = len(set(places.values()))
        if not is_own or num_places == 1:
            if others := _others(contents):
                raise self._other_whole(name, others, num_whole, num_places)
            return None
        for place in dict.fromkeys(places.values()):
            mine = {rank: contents[rank] for rank, at in places.items() if at == place}
            if others := _others(mine):
                raise self._other_rows(name, min(mine), others)
        return not _others(contents)

    def _other_size(
        self, name: str, others: Sequence[int], rows: Mapping[int, int], lengths: Mapping[int, int]
    ) -> LayoutError:
        first, other = self.ranks[0], others[0]
        if rows[first] != rows[other]:
            got = f"{rows[other]} rows on rank {other}, {rows[first]} on rank {first}"
            hint = (
                "drop_last=True in the loader (DistributedSampler has it too) drops the short last batch on all ranks"
            )
        elif lengths[first] != lengths[other]:
            got = f"rows of length {lengths[other]} on rank {other}, of length {lengths[first]} on rank {first}"
            hint = "pad rows to the same length on all ranks: to a fixed length, or to that of the longest on any rank"
        else:
            got = f"other dims or another dtype on rank {other} than on rank {first}"
            hint = "let the loaders of all ranks return tensors of the same shape and dtype"
        return LayoutError(
            "ranks pass batches of different sizes",
            where=f"entry '{name}', {named(others)}",
            got=got,
            expected="one shape and dtype on every rank",
            hint=hint,
        )

    def _other_whole(self, name: str, others: Sequence[int], num_whole: int, num_places: int) -> StepError:
        part = f", of whose {num_whole} rows each would use {num_whole // num_places}" if num_places > 1 else ""
        hint = f"if each rank loads its own rows (DistributedSampler), mw.compile(..., batch='local'); {_SEED}"
        return StepError(
            "ranks pass different batches",
            where=f"entry '{name}', {named(others)}",
            got=f"other values than on rank {self.ranks[0]}",
            expected=f"the global batch on every rank{part}",
            hint=hint if num_places > 1 else _SEED,
        )

    def _other_rows(self, name: str, first: int, others: Sequence[int]) -> StepError:
        return StepError(
            "ranks that share rows pass different rows",
            where=f"entry '{name}', {named(others)}",
            got=f"other values than on rank {first}, which needs the same rows",
            expected="the same rows on all ranks that differ only along axes which don't cut the batch (tp, pp, cp)",
            hint=f"DistributedSampler(data, *mw.batch_shard(mesh)) gives them the same rows; {_SEED}",
        )


_SEED = "seed the loader alike on every rank: generator=torch.Generator().manual_seed(0), sampler.set_epoch(epoch)"
_ALIKE = (
    "meshweave: every rank passed the same rows as its own; let each load different rows (DistributedSampler), or "
    "pass batch='global' to mw.compile"
)


def _others(values: Mapping[int, int]) -> list[int]:
    """The keys whose values differ from the first."""
    first = next(iter(values.values()))
    return [rank for rank, value in values.items() if value != first]


def _settings_text(groups: Sequence[Mapping[str, Any]]) -> str:
    """The numbers of an optimizer's groups; scalars in tensors too, but those are read only on CPU."""
    return repr([[(key, _number(group[key])) for key in sorted(group) if key != "params"] for group in groups])


def _number(value: Any) -> Any:
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (list, tuple)):
        return [_number(part) for part in value]
    return value if isinstance(value, (bool, int, float, type(None))) else None
