"""The batch split: regions whose rows are independent run in chunks, so that communication of a chunk can run under the
compute of another (Domino, Wang et al., arXiv:2409.15241). Weights are gathered once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import COLLECTIVES
from meshweave.ir.described import is_symbolic
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import Spec, copied_module, op_name, tensor_inputs
from meshweave.optimize.batch_split.regions import Regions, regions, work_of
from meshweave.optimize.batch_split.row_rules import ATTENTION, fits
from meshweave.optimize.batch_split.write import RowWriter
from meshweave.optimize.decompose.cut import FIXED, Cut
from meshweave.optimize.decompose.lower import rewrite_graph

aten = torch.ops.aten
Dim = int | tuple[int, int]  # a dim, or (dim, outer): the dim is [outer, rows, ...], rows of every outer index are cut

_META = torch.device("meta")
_MOST_INPUTS = 8  # inputs whose first dim is tried as rows, if no attention or batched matmul determines the rows
_ENOUGH = 0.5  # share of all multiplications: a cut that has so many in chunks is taken without trying others


@dataclass(frozen=True, slots=True)
class Whole:
    """An op that stays whole although its neighbours run in chunks: the region ends there."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class SplitReport:
    """The outcome of a graph. `rows` is the cut value, and how it is cut. `whole` are the ops at which regions end,
    each with its reason; `sums` the ops whose results are combined from those of the chunks. `copied_bytes` are written
    by slices and joins. Seconds come from the caller's function, 0 without one.
    """

    is_taken: bool
    num_chunks: int
    reason: str
    rows: str = ""
    num_split: int = 0
    num_collectives: int = 0
    work_share: float = 0.0
    num_slices: int = 0
    num_joins: int = 0
    copied_bytes: int = 0
    sums: tuple[str, ...] = ()
    whole: tuple[Whole, ...] = ()
    numerics: str = ""
    seconds_before: float = 0.0
    seconds_after: float = 0.0

    def left(self, reason: str) -> SplitReport:
        """A report of a graph that stays whole, with the reason."""
        return replace(self, is_taken=False, reason=reason) if self.is_taken else self

    def __str__(self) -> str:
        verdict = f"split in {self.num_chunks} chunks" if self.is_taken else "not split"
        lines = [f"{verdict}: {self.reason}"]
        if self.rows:
            lines += [
                f"rows: {self.rows}; {self.num_split} ops in chunks, {self.num_collectives} of them collectives, "
                f"{self.work_share:.0%} of all multiplications",
                f"{self.num_slices} slices, {self.num_joins} joins: {self.copied_bytes / 1e6:.1f} MB written; "
                f"{len(self.sums)} results combined: {self.numerics}",
            ]
        if self.seconds_before:
            lines.append(f"{self.seconds_before * 1e3:.3f} ms whole, {self.seconds_after * 1e3:.3f} ms in chunks")
        return "\n".join([*lines, *(f"  whole: {w.name} ({w.op}): {w.reason}" for w in self.whole)])


def split_batch(
    gm: fx.GraphModule, num_chunks: int = 2, *, dims: Mapping[str, Dim] | None = None, fuse_sums: bool = True
) -> tuple[fx.GraphModule, SplitReport]:
    """A new graph in which row-wise ops run in chunks of the rows; the input is not changed.

    gm: an ATen graph with functional collectives and fake tensors in meta["val"]: forward, backward, or both. If the
    joint graph is split, before the partitioner, saved activations stay in chunks and nothing is joined.
    num_chunks, dims, fuse_sums: those of `split_program`. Raises MeshweaveError for invalid arguments; a graph that
    cannot be split is returned as a copy, with the reason.
    """
    rewrite = partial(split_program, num_chunks=num_chunks, dims=dims, fuse_sums=fuse_sums)
    module, report = rewrite_graph(gm, rewrite)
    return copied_module(gm) if module is gm else module, report


def split_program(
    program: DeviceProgram,
    num_chunks: int = 2,
    *,
    dims: Mapping[str, Dim] | None = None,
    fuse_sums: bool = False,
    positions: bool = False,
) -> tuple[fx.Graph | None, SplitReport]:
    """The graph of a program with its row-wise ops in chunks of the rows, wherever they include a collective; None if
    nothing is split, with the reason in the report. The program's own graph is used up.

    dims: {name of a node: dim or (dim, outer)}, a single value whose rows are known. Without it rows are the first dims
        of the program's batch, or with `positions`, if that has fewer sequences than chunks, the second, with attention
        whole. If the devices of a group each have a block of the rows, a chunk has a part of each block where more
        collectives are in chunks so. If the batch is unknown, candidates are tried: the batch of attention, else that
        of batched matmuls, else the first dim of an input, whichever covers most multiplications.
    fuse_sums: whether a gradient of a weight is added to that of the previous chunk by the matmul itself (addmm), which
        rounds the sum to the matmul's dtype per chunk; else chunks are added in float32.

    Values are those of the input: row-wise ops depend only on the same rows of their operands; sums over rows are
    computed per chunk and then added, in the order of the chunks; random numbers are drawn whole. Nodes whose shape
    differs between devices of a role stay whole, and so do communications with devices of other roles.
    """
    graph, added = program.graph, _describe(program)
    choices: list[Mapping[str, Dim] | None] = [dims]
    if dims is None and program.batch is not None:
        choices = [*_batch_rows(program, num_chunks, positions)]
        if not choices:
            reason = f"no input of the batch has rows for {num_chunks} equal chunks"
            return None, SplitReport(False, num_chunks, reason)
    chosen = _most_communication(graph, num_chunks, choices)
    if chosen is None or not chosen[1].num_collectives:
        reason = "no value has rows that divide into equal chunks"
        if chosen is not None:
            reason = "there is no collective between row-wise ops"
        return None, SplitReport(False, num_chunks, reason, whole=_ends(chosen[1]) if chosen is not None else ())
    rows, cut = chosen
    writer = RowWriter(graph, cut, fuse_sums)
    split = writer.run()
    for node in split.nodes:
        for key in added:
            node.meta.pop(key, None)
    return split, report_of(graph, cut, writer, rows)


def report_of(graph: fx.Graph, cut: Regions, writer: RowWriter, rows: str) -> SplitReport:
    """The report of a graph that was written in chunks of `rows`."""
    work = sum(work_of(node) for node in graph.nodes)
    return SplitReport(
        is_taken=True,
        num_chunks=cut.count,
        reason="regions without dependence between rows have collectives",
        rows=rows,
        num_split=len(cut.rules),
        num_collectives=cut.num_collectives,
        work_share=cut.work / work if work else 0.0,
        num_slices=writer.num_slices,
        num_joins=writer.num_joins,
        copied_bytes=writer.copied,
        sums=tuple(n.name for n, rule in cut.rules.items() if not any(isinstance(r, Cut) for r in rule.results)),
        whole=_ends(cut),
        numerics=_numerics(writer.fuse_sums),
    )


def _numerics(fuse_sums: bool) -> str:
    """The numerical difference from the whole graph: rows are the same except for the kernels' choices at another
    size."""
    products = (
        "products rounded to their dtype after each chunk" if fuse_sums else "products of chunks added in float32"
    )
    return f"{products}, other sums over rows in float32 or wider and rounded once; in the order of the chunks"


def _ends(cut: Regions) -> tuple[Whole, ...]:
    """Ops that stay whole and have an operand in chunks, or a result that is used in chunks."""
    touching = [n for n in cut.refused if any(o in cut.cuts for o in tensor_inputs(n))]
    return tuple(Whole(n.name, op_name(n.target), cut.refused[n]) for n in touching)


def _describe(program: DeviceProgram) -> tuple[str, ...]:
    """Set meta["spec"], which sharding rules read, and meta["val"], from which new nodes are described, on all nodes;
    returns the keys to remove again. Symbolic shapes are omitted."""
    is_role = not any("val" in node.meta for node in program.graph.nodes)
    for node in program.graph.nodes:
        if node in program.uneven:
            node.meta[FIXED] = "its shape differs between devices"
        elif is_role and (values := program.values[node]):
            tensors = tuple(torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=_META) for x in values)
            is_list = len(tensors) != 1 or isinstance(node.meta.get("spec"), tuple)
            node.meta["val"] = tensors if is_list else tensors[0]
        elif node in program.symbols:
            node.meta["val"] = program.symbols[node]
        if node.target in COLLECTIVES and (reason := program.refused(node)):
            node.meta[FIXED] = reason
        spec = _spec_of(node.meta.get("val"))
        if node.op != "output" and "spec" not in node.meta and spec is not None:
            node.meta["spec"] = spec
    return (FIXED, "val") if is_role else (FIXED, "spec")


def _batch_rows(program: DeviceProgram, count: int, positions: bool) -> Iterator[Mapping[str, Dim]]:
    """The rows of the batch that may be cut: one after the other, then inside the blocks of the groups that there
    are."""
    groups = (program.group_of(n) for n in program.graph.nodes if n.target in COLLECTIVES)
    sizes = sorted({mesh.flat_size(axes) for mesh, axes in groups})
    for dim in (0, 1) if positions else (0,):
        cuts = [Cut(dim, outer, count) for outer in (1, *sizes)]
        fitting = [{n.name: (dim, cut.outer) for n in program.batch or () if _has_rows(n, cut)} for cut in cuts]
        yield from (rows for rows in fitting if rows)
        if fitting[0]:
            return


def _has_rows(node: fx.Node, cut: Cut) -> bool:
    spec = node.meta.get("spec")
    return "val" in node.meta and isinstance(spec, Spec) and fits(cut, spec.shape)


def _most_communication(
    graph: fx.Graph, count: int, choices: Sequence[Mapping[str, Dim] | None]
) -> tuple[str, Regions] | None:
    """The way to cut that has most collectives in chunks, the first of equals."""
    best: tuple[str, Regions] | None = None
    for dims in choices:
        chosen = _best_cut(graph, count, dims)
        if chosen is not None and (best is None or chosen[1].num_collectives > best[1].num_collectives):
            best = chosen
        if best is not None and not any(node.target in COLLECTIVES for node in best[1].refused):
            break
    return best


def _spec_of(val: Any) -> Any:
    """meta["val"] as meta["spec"]; None if that is not a tensor, or has a symbolic shape."""
    if isinstance(val, (list, tuple)):
        return tuple(map(_spec_of, val))
    return Spec(tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) and not is_symbolic(val) else None


def _best_cut(graph: fx.Graph, count: int, dims: Mapping[str, Dim] | None) -> tuple[str, Regions] | None:
    """The cut that has the most multiplications in chunks; the first of equals."""
    total = sum(work_of(node) for node in graph.nodes)
    best: tuple[str, Regions] | None = None
    tried: set[tuple[fx.Node, Cut]] = set()
    for node, cut in _named(graph, count, dims) if dims is not None else _seeds(graph, count):
        if (node, cut) in tried:
            continue
        reached = regions(graph, {node: cut})
        tried |= set(reached.cuts.items()) | {(node, cut)}
        if best is None or (reached.work, reached.num_collectives) > (best[1].work, best[1].num_collectives):
            best = f"dim {cut.dim} of {node.name}" + (f" inside {cut.outer}" if cut.outer > 1 else ""), reached
        if total and reached.work > _ENOUGH * total:
            break
    return best


def _named(graph: fx.Graph, count: int, dims: Mapping[str, Dim]) -> Iterator[tuple[fx.Node, Cut]]:
    nodes = {node.name: node for node in graph.nodes}
    for name, at in dims.items():
        dim, outer = (at, 1) if isinstance(at, int) else at
        spec = nodes[name].meta.get("spec") if name in nodes else None
        if not isinstance(spec, Spec):
            raise MeshweaveError("dims does not name a tensor of the graph", got=name, expected="the name of a node")
        cut = Cut(dim, outer, count)
        if dim < 0 or not fits(cut, spec.shape):
            raise MeshweaveError(
                "rows do not divide into equal chunks",
                where=f"dims[{name!r}]",
                got=f"dim {dim} of {spec} inside {outer}, {count} chunks",
                expected="a dim, counted from 0, whose size is a multiple of outer * num_chunks",
            )
        yield nodes[name], cut


def _seeds(graph: fx.Graph, count: int) -> Iterator[tuple[fx.Node, Cut]]:
    """Values whose first dim may be rows: of attentions, of batched matmuls, of inputs."""
    batched = (aten.bmm.default, aten.baddbmm.default)
    values = [tensor_inputs(n)[0] for n in graph.nodes if n.target in ATTENTION]
    values += [tensor_inputs(n)[-2] for n in graph.nodes if n.target in batched]
    values += [n for n in graph.nodes if n.op == "placeholder" and isinstance(n.meta.get("spec"), Spec)][-_MOST_INPUTS:]
    for node in values:
        if fits(Cut(0, 1, count), node.meta["spec"].shape):
            yield node, Cut(0, 1, count)
