"""Rows of a batch over ranks: which rows are a rank's own, and a check that ranks that need the same rows pass the same
rows."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.capture.batch import Batch, batch_size
from meshweave.errors import LayoutError, PlanError, StepError
from meshweave.interop.process_groups import store_of_job
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.plan_text import plan_of
from meshweave.place.plans import Plan
from meshweave.place.resolve import batch_axes
from meshweave.runtime.coordinator import names_of_ranks
from meshweave.runtime.fingerprint import fingerprint
from meshweave.runtime.together import join

BATCHES = ("global", "local")
ALWAYS_FIRST = 16  # the first calls, in all of which batches are compared
THEN_EVERY = 32  # after them every n-th call
MOST_WORDS = 1 << 16  # 8-byte words of a tensor that are compared: all words up to 512 KiB


def batch_shard(mesh: Mesh | str | Mapping[str, int], plan: Plan | str | None = None) -> tuple[int, int]:
    """Into how many parts a batch is cut on `mesh`, and which part is this rank's: DistributedSampler's num_replicas
    and rank. Ranks that differ only along tp, pp or cp have the same part. (1, 0) in a single process."""
    join(None)
    if store_of_job() is None:
        return 1, 0
    mesh = Mesh.of(mesh)
    axes, at = batch_axes(mesh, plan_of(plan)), mesh.coordinates(mesh.index(dist.get_rank()))
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

    It compares fingerprints, in the first ALWAYS_FIRST calls and then in each THEN_EVERY-th, without a collective. All
    ranks raise the same error, so that the job can continue.
    """

    def __init__(self, world: Any, layouts: Mapping[str, Layout], shapes: Mapping[str, tuple[int, ...]]) -> None:
        """`shapes` are those of the entries in a global microbatch, `layouts` their layouts."""
        self.world, self.num_calls, self.warned = world, 0, False
        self.ranks: tuple[int, ...] = world.mesh.devices
        size = batch_size(shapes.values())
        self.has_rows = {name: bool(shape) and shape[0] == size for name, shape in shapes.items()}
        # Per entry the place of each rank's rows: ranks at the same place have the same rows.
        self.places = {
            name: {rank: layout.box_of(shapes[name], rank).offset[:1] for rank in self.ranks}
            for name, layout in layouts.items()
        }

    @property
    def is_due(self) -> bool:
        """Whether the next call is compared."""
        return self.num_calls < ALWAYS_FIRST or self.num_calls % THEN_EVERY == 0

    def check(self, batch: Batch, groups: Sequence[Mapping[str, Any]] = (), *, is_own: bool = False) -> None:
        """Compare this call's batch, if this call is due: whole, or (`is_own`) the rows of each rank.
        Raises LayoutError or StepError on every rank."""
        is_due = self.is_due
        self.num_calls += 1
        if not is_due:
            return
        tensors = dict(zip(batch.names, batch.tensors, strict=True))
        own = {n: [str(x.dtype), list(x.shape), int(fingerprint(x, MOST_WORDS))] for n, x in tensors.items()}
        numbers = [[[key, _number(group[key])] for key in sorted(group) if key != "params"] for group in groups]
        answers = self.world.exchange("the comparison of batches", [repr(numbers), own])
        first = self.ranks[0]
        if others := [rank for rank in self.ranks if answers[rank][0] != answers[first][0]]:
            raise StepError(
                "ranks have different settings of the optimizer",
                where=names_of_ranks(others),
                got="other numbers in optimizer.param_groups than on the first rank",
                hint="schedule by values that are equal on all ranks: step numbers, or a metric reduced over the ranks",
            )
        entries = {name: {rank: answers[rank][1].get(name) for rank in self.ranks} for name in self.places}
        alike = [self._judge(name, its, is_own) for name, its in entries.items()]
        if alike.count(True) and not alike.count(False) and not self.warned and self.world.rank == first:
            self.warned = True
            warnings.warn(_ALIKE, stacklevel=5)  # the caller of the step

    def _judge(self, name: str, entries: Mapping[int, Any], is_own: bool) -> bool | None:
        """Raises if ranks differ that must not. Returns whether all passed the same rows as their own; None if the rows
        are not a rank's own."""
        first, places = entries[self.ranks[0]], self.places[name]
        if others := [rank for rank, its in entries.items() if its is None or its[:2] != first[:2]]:
            raise self._other_size(name, others, entries)
        num_places = len(set(places.values()))
        if not is_own or not self.has_rows[name] or num_places == 1:
            if others := [rank for rank, its in entries.items() if its != first]:
                raise _other_values(name, others, self.ranks[0], *self._as_whole(name, first[1], num_places, is_own))
            return None
        leaders: dict[Any, int] = {}
        for rank, place in places.items():
            leader = leaders.setdefault(place, rank)
            if entries[rank] != entries[leader]:
                raise _other_values(name, [rank], leader, *_SHARED_ROWS)
        return all(its == first for its in entries.values())

    def _as_whole(self, name: str, shape: Sequence[int], num_places: int, is_own: bool) -> tuple[str, str]:
        """What is expected of an entry that is the same on all ranks, and what to do."""
        if is_own and not self.has_rows[name]:
            return _NO_ROWS[0].format(list(shape)), _NO_ROWS[1]
        if num_places == 1:
            return "the global batch on every rank", _SEED
        part = f"of whose {shape[0]} rows each would use {shape[0] // num_places}"
        hint = f"if each rank loads its own rows (DistributedSampler), mw.compile(..., batch='local'); {_SEED}"
        return f"the global batch on every rank, {part}", hint

    def _other_size(self, name: str, others: Sequence[int], entries: Mapping[int, Any]) -> LayoutError:
        first, other = self.ranks[0], others[0]
        (_, expected, _), (_, shape, _) = entries[first], entries[other] or ("", [], 0)
        if shape[:1] != expected[:1]:
            hint = (
                "drop_last=True in the loader (DistributedSampler has it too) drops the short last batch on all ranks"
            )
        elif len(shape) == len(expected):
            hint = "pad rows to the same length on all ranks: to a fixed length, or to that of the longest on any rank"
        else:
            hint = "let the loaders of all ranks return tensors of the same shape and dtype"
        got = [
            f"{entries[rank][0].removeprefix('torch.')}{entries[rank][1]}" if entries[rank] else "nothing"
            for rank in (other, first)
        ]
        return LayoutError(
            "ranks pass batches of different sizes",
            where=f"entry '{name}', {names_of_ranks(others)}",
            got=f"{got[0]} on rank {other}, {got[1]} on rank {first}",
            expected="one shape and dtype on every rank",
            hint=hint,
        )


def _other_values(name: str, others: Sequence[int], first: int, expected: str, hint: str) -> StepError:
    return StepError(
        "ranks pass different values of the batch",
        where=f"entry '{name}', {names_of_ranks(others)}",
        got=f"other values than on rank {first}",
        expected=expected,
        hint=hint,
    )


_SEED = "seed the loader alike on every rank: generator=torch.Generator().manual_seed(0), sampler.set_epoch(epoch)"
_NO_ROWS = (
    "the same values everywhere, of shape {}: with batch='local', a rank has its own only in entries with as many rows "
    "as the first entry",
    "pass the global batch on every rank (batch='global'): edges of a graph, say, then count rows of that batch; or "
    "give the entry a dim of samples, padded to one size",
)
_SHARED_ROWS = (
    "the same rows on all ranks that differ only along axes which don't cut the batch (tp, pp, cp)",
    f"DistributedSampler(data, *mw.batch_shard(mesh)) gives them the same rows; {_SEED}",
)
_ALIKE = (
    "meshweave: every rank passed the same rows as its own; let each load different rows (DistributedSampler), or "
    "pass batch='global' to mw.compile"
)


def _number(value: Any) -> Any:
    """A setting if it is a number; that of a scalar tensor too, but only on CPU."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, (list, tuple)):
        return [_number(part) for part in value]
    return value if isinstance(value, (bool, int, float, type(None))) else None
