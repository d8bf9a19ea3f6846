"""Ops that choose rows of the batch by numbers in the batch or in a buffer, or by their place.

The step computes on the global batch: its rows are those of all ranks. Where each rank passes its own rows
(`batch="local"`), numbers that count rows from 0 on each rank mean rows of the first rank only, and the first half of
the batch is that of the first ranks.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from meshweave.capture.batch import batch_size
from meshweave.errors import PlanError
from meshweave.ir.graph import Spec, StepGraph, argument, op_name, origin_of, spec_of, tensor_inputs
from meshweave.ops.factors import Dims, Rule
from meshweave.ops.registry import TABLE, results_of, row_for

aten = torch.ops.aten

_PARTS = frozenset({aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default})
_SUMS = frozenset({aten.index_put.default, aten._unsafe_index_put.default, aten.scatter_add.default})
_NOTES = logging.getLogger("meshweave")


# By value and dim, where rows of the batch are in it: neighbouring rows are so many elements apart, all rows together
# are so many. A dim that a view has joined has the rows and their own elements.
_Range = tuple[int, int]
_Rows = dict[fx.Node, dict[int, _Range]]


@dataclass(frozen=True, slots=True)
class RowLookup:
    """An op that chooses places along a dim by the numbers in `entries` of the batch or buffers. `is_table`: it adds
    rows of the batch up, in a table of another number of rows; else the dim holds rows of the batch. Without entries it
    takes neighbouring rows by their place (`out[: n // 2]`, `out.chunk(2)`)."""

    node: fx.Node
    entries: tuple[str, ...]
    is_table: bool

    @property
    def names(self) -> str:
        """The entries, for messages."""
        return ", ".join(f"'{name}'" for name in self.entries)

    @property
    def call(self) -> str:
        """The op and what it chooses by, for messages."""
        return f"{op_name(self.node.target)} {f'by {self.names}' if self.entries else 'of rows'}"


def row_lookups(step: StepGraph, entries: Collection[str] | None = None) -> list[RowLookup]:
    """The lookups in rows of the batch, and sums of rows, in forward and loss of a captured step. `entries` are those
    with the rows of the batch, by default those with as many rows as the first."""
    named = [item for item in step.inputs if item.kind == "batch" and (entries is None or item.name in entries)]
    num_rows = batch_size(item.spec.shape for item in named)
    batch = {node: item for node, item in step.sources.items() if item.kind in ("batch", "buffer")}
    # The dims of a value that hold rows of the batch, and the entries and buffers from which integers are computed.
    own = [n for n, item in batch.items() if item in named and item.spec.shape[:1] == (num_rows,)]
    rows: _Rows = {n: {0: (1, num_rows)} for n in own if num_rows}
    numbers = {n: (item.kind, item.name) for n, item in batch.items() if item.spec.is_integer}
    origins = {n: frozenset({name if kind == "batch" else f"buffer {name}"}) for n, (kind, name) in numbers.items()}
    lookups: list[RowLookup] = []
    for node in step.graph.nodes:
        if node.op != "call_function" or origin_of(node).phase not in ("forward", "loss"):
            continue
        operands = tensor_inputs(node)
        if isinstance(node.meta["spec"], Spec) and spec_of(node).is_integer:
            origins[node] = frozenset().union(*(origins.get(n, ()) for n in operands if spec_of(n).is_integer))
        if node.target in TABLE or operands:
            rule = row_for(node).rule(node)
            lookups += _lookups(node, rule, rows, origins, num_rows)
            if _is_part_of_rows(node, rows):
                lookups.append(RowLookup(node, (), False))
            _carry_rows(node, rule, rows)
    return lookups


def check_own_rows(step: StepGraph, num_parts: int) -> None:
    """PlanError if a step on rows of `num_parts` ranks chooses rows of the batch by numbers that are the ranks' own.
    Sums of rows in a table that all ranks share are noted in the log."""
    for lookup in row_lookups(step):
        if lookup.is_table:
            _NOTES.warning(
                "%s: rows are added up by %s, over the rows of all %d ranks: with batch='local', too, a place of the "
                "table is one for all ranks. If each rank counts places of its own from 0, add the rank's first place",
                origin_of(lookup.node), lookup.names, num_parts,
            )  # fmt: skip
            continue
        if not lookup.entries:
            raise PlanError(
                "a part of the batch is taken by the place of its rows, and each rank passes rows of its own",
                where=str(origin_of(lookup.node)),
                got=f"{lookup.call}, with batch='local' on {num_parts} ranks",
                expected="places in the global batch, which is the rows of all ranks, in order of rank",
                hint="if each rank's batch has its parts one after the other (chosen and rejected, two views), make "
                "each part an entry of the batch and torch.cat them in forward; or pass the global batch on every "
                "rank (batch='global')",
            )
        raise PlanError(
            "rows of the batch are chosen by numbers, and each rank passes rows of its own",
            where=str(origin_of(lookup.node)),
            got=f"{lookup.call}, with batch='local' on {num_parts} ranks",
            expected="numbers of rows of the global batch, which are those of all ranks, in order of rank",
            hint="pass the global batch on every rank (batch='global'), in which numbers count rows of that batch; or "
            "give samples a dim of their own (x [samples, nodes, features]), and choose along the dim of the nodes",
        )


def check_rows_in_time(step: StepGraph, entries: Collection[str], microbatches: int) -> None:
    """PlanError if a step on the whole batch chooses rows of its `entries` by numbers: a microbatch has only some."""
    for lookup in row_lookups(step, entries):
        if lookup.entries and not lookup.is_table:
            raise PlanError(
                "rows of the batch are chosen by numbers, and a microbatch has only some rows",
                where=str(origin_of(lookup.node)),
                got=f"{lookup.call}, with accumulate={microbatches}",
                expected="row by row, so that a microbatch needs its own rows alone",
                hint="accumulate=1 for this step; or choose the rows before the batch is passed (an entry "
                "batch['partner'] = x[numbers] beside x)",
            )


def _lookups(
    node: fx.Node,
    rule: Rule,
    rows: _Rows,
    origins: Mapping[fx.Node, frozenset[str]],
    num_rows: int | None,
) -> Iterator[RowLookup]:
    chosen = [(dim, index) for dim, index in row_for(node).on_piece.indexed(node) if origins.get(index)]
    if not chosen:
        return
    table, *others = tensor_inputs(node)
    added = _row_loops(others, rule, rule.operands[1:], rows)
    is_sum = node.target in _SUMS and (node.target is aten.scatter_add.default or bool(argument(node, 3, False)))
    for dim, index in chosen:
        is_of_rows = dim in rows.get(table, ()) or (is_sum and spec_of(table).shape[dim] == num_rows)
        merges = is_sum and bool(added) and not any(added.keys() & dim for dim in rule.results[0])
        if is_of_rows or merges:
            yield RowLookup(node, tuple(sorted(origins[index])), not is_of_rows)


def _is_part_of_rows(node: fx.Node, rows: _Rows) -> bool:
    """Whether an op takes several neighbouring rows, and not all. A single row is one of a loop over them all, and
    every second row is the same on each rank."""
    if node.target not in _PARTS:
        return False
    table = argument(node, 0)
    dim = argument(node, 1 if node.target is aten.slice.Tensor else 2, 0) % len(spec_of(table).shape)
    sizes = {spec_of(part).shape[dim] for part in results_of(node) if part is not None}
    _, together = rows.get(table, {}).get(dim, (1, 1))
    is_part = any(size % together for size in sizes - {1})
    return is_part and (node.target is not aten.slice.Tensor or argument(node, 4, 1) == 1)


def _row_loops(operands: Sequence[fx.Node], rule: Rule, dims: Sequence[Dims], rows: _Rows) -> dict[int, _Range]:
    """The loops over rows of these operands, and where rows are in each."""
    loops: dict[int, _Range] = {}
    for operand, its in zip(operands, dims, strict=True):
        for d, (apart, together) in rows.get(operand, {}).items():
            for factor in its[d]:
                inner = rule.inner_size(its, d, factor)
                low, high = max(apart, inner), min(together, inner * rule.sizes[factor])
                if low < high:
                    loops[factor] = low // inner, -(-high // inner)
    return loops


def _carry_rows(node: fx.Node, rule: Rule, rows: _Rows) -> None:
    """The dims of the results that have a loop over rows of an operand."""
    loops = _row_loops(tensor_inputs(node), rule, rule.operands, rows)
    for value, dims in zip(results_of(node), rule.results, strict=True):
        own: dict[int, _Range] = {}
        for d, dim in enumerate(dims):
            sizes = {factor: rule.inner_size(dims, d, factor) for factor in dim if factor in loops}
            if sizes:
                low = min(inner * loops[factor][0] for factor, inner in sizes.items())
                own[d] = low, max(inner * loops[factor][1] for factor, inner in sizes.items())
        if value is not None and own:
            rows[value] = own
