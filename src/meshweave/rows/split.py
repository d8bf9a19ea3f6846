"""The batch split: regions whose rows do not depend on each other run as chunks, so that communication of one chunk
can run under the compute of another (Domino, Wang et al., arXiv:2409.15241). Weights are gathered once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from meshweave.chunks.cut import Cut
from meshweave.errors import MeshweaveError
from meshweave.ir.described import is_symbolic
from meshweave.ir.graph import Spec, copied_graph, copied_module, module_like, op_name, tensor_inputs
from meshweave.rings.blocks import raise_blocks
from meshweave.rings.lower import lower_blocks
from meshweave.rows.regions import Regions, regions, work_of
from meshweave.rows.ways import ATTENTION, fits
from meshweave.rows.write import RowWriter

aten = torch.ops.aten
Seconds = Callable[[fx.GraphModule], float]
Dim = int | tuple[int, int]  # a dim, or (dim, outer): the dim is [outer, rows, ...], rows of every outer index are cut

_MOST_INPUTS = 8  # whose first dim is tried as rows, where no attention or batched matmul says what the rows are
_ENOUGH = 0.5  # of all multiplications: a way to cut that has them in chunks is taken without trying others


@dataclass(frozen=True, slots=True)
class Whole:
    """An op that stays whole although its neighbours run in chunks: there the region ends."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True, slots=True)
class SplitReport:
    """What became of a graph.

    `rows` says what was cut: a value, and how. `whole` are the ops at which regions end, each with its reason; `sums`
    the ops whose results are put together out of those of the chunks. `copied_bytes` are written by slices and joins.
    Seconds are those that the caller's function gives, 0 where there is none.
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
        """The same, of a graph that stays whole for this reason."""
        return replace(self, is_taken=False, reason=reason) if self.is_taken else self

    def __str__(self) -> str:
        verdict = f"split in {self.num_chunks} chunks" if self.is_taken else "not split"
        lines = [f"{verdict}: {self.reason}"]
        if self.rows:
            lines += [
                f"rows: {self.rows}; {self.num_split} ops in chunks, {self.num_collectives} of them collectives, "
                f"{self.work_share:.0%} of all multiplications",
                f"{self.num_slices} slices, {self.num_joins} joins: {self.copied_bytes / 1e6:.1f} MB written; "
                f"{len(self.sums)} results put together: {self.numerics}",
            ]
        if self.seconds_before:
            lines.append(f"{self.seconds_before * 1e3:.3f} ms whole, {self.seconds_after * 1e3:.3f} ms in chunks")
        return "\n".join([*lines, *(f"  whole: {w.name} ({w.op}): {w.reason}" for w in self.whole)])


def split_batch(
    gm: fx.GraphModule,
    num_chunks: int | Sequence[int] = 2,
    *,
    dims: Mapping[str, Dim] | None = None,
    seconds: Seconds | None = None,
    fuse_sums: bool = True,
) -> tuple[fx.GraphModule, SplitReport]:
    """A new graph in which what goes row by row runs in chunks of the rows; the input is untouched.

    gm: an ATen graph with functional collectives and fake tensors in meta["val"]: forward, backward, or both in one.
    num_chunks: a number of chunks, or several to choose from by `seconds`.
    dims: {name of a node: dim or (dim, outer)}, one value whose rows are known; without it they are found: the batch of
        attention, else that of batched matmuls, else the first dim of an input, whichever covers most multiplications.
    seconds: what a graph takes, best after it is ordered (`lambda one: mw.overlap(one, cost=profile)[1].seconds`): the
        split is taken if it is faster. Without it, it is taken wherever a collective is in a region.
    fuse_sums: whether a gradient of a weight is added to that of the chunk before by the matmul itself (addmm), which
        rounds the sum to the matmul's dtype per chunk; else chunks are added in float32.

    Values are those of the input: what goes row by row has its operands' rows and no others; sums over rows are taken
    per chunk and then added, in the order of the chunks; random numbers are drawn whole. Split before the partitioner
    (the joint graph), saved activations stay in chunks and nothing is joined. Raises MeshweaveError for arguments that
    fit no graph; a graph that cannot be split comes back as a copy, with the reason.
    """
    counts = (num_chunks,) if isinstance(num_chunks, int) else tuple(num_chunks)
    if not counts or any(type(n) is not int or n < 2 for n in counts):
        raise MeshweaveError("a batch is split in two chunks or more", got=f"num_chunks={num_chunks!r}")
    if len(counts) > 1 and seconds is None:
        raise MeshweaveError(
            "several numbers of chunks need something to choose by",
            got=f"num_chunks={num_chunks!r}, no seconds",
            hint="hand over seconds=lambda one: mw.overlap(one, cost=profile)[1].seconds",
        )
    before = seconds(gm) if seconds is not None else 0.0
    best: tuple[fx.GraphModule, SplitReport] | None = None
    for n in counts:
        made, report = _split(gm, n, dims, fuse_sums)
        if report.is_taken and seconds is not None:
            report = replace(report, seconds_before=before, seconds_after=seconds(made))
        if best is None or _rank(report) < _rank(best[1]):
            best = made, report
    assert best is not None
    made, report = best
    if report.is_taken and seconds is not None and report.seconds_after >= before:
        return copied_module(gm), replace(report, is_taken=False, reason="it is not faster in chunks")
    return made, report


def _rank(report: SplitReport) -> tuple[bool, float]:
    return not report.is_taken, report.seconds_after


def _split(
    gm: fx.GraphModule, count: int, dims: Mapping[str, Dim] | None, fuse_sums: bool
) -> tuple[fx.GraphModule, SplitReport]:
    graph, has_blocks = _described(gm.graph)
    found = _chosen(graph, count, dims)
    if found is None or not found[1].num_collectives:
        reason = "no value has rows that come apart into equal chunks"
        if found is not None:
            reason = "no collective stands between ops that go row by row"
        return copied_module(gm), SplitReport(False, count, reason, whole=_ends(found[1]) if found is not None else ())
    rows, made = found
    writer = RowWriter(graph, made, fuse_sums)
    written = writer.run()
    if has_blocks:
        lower_blocks(written)
    module = module_like(gm, written)
    work = sum(work_of(node) for node in graph.nodes)
    report = SplitReport(
        is_taken=True,
        num_chunks=count,
        reason="regions without dependence between rows have collectives",
        rows=rows,
        num_split=len(made.ways),
        num_collectives=made.num_collectives,
        work_share=made.work / work if work else 0.0,
        num_slices=writer.num_slices,
        num_joins=writer.num_joins,
        copied_bytes=writer.copied,
        sums=tuple(n.name for n, way in made.ways.items() if not any(isinstance(r, Cut) for r in way.results)),
        whole=_ends(made),
        numerics=_numerics(fuse_sums),
    )
    return module, report


def _numerics(fuse_sums: bool) -> str:
    """The tier of what differs from the whole graph: rows are the same but for the kernels' choices at another size."""
    products = (
        "products rounded to their dtype after each chunk" if fuse_sums else "products of chunks added in float32"
    )
    return f"{products}, other sums over rows in float32 or wider and rounded once; in the order of the chunks"


def _ends(made: Regions) -> tuple[Whole, ...]:
    """Ops that stay whole and have an operand in chunks, or a result that is taken so."""
    touching = [n for n in made.refused if any(o in made.cuts for o in tensor_inputs(n))]
    return tuple(Whole(n.name, op_name(n.target), made.refused[n]) for n in touching)


def _described(old: fx.Graph) -> tuple[fx.Graph, bool]:
    """A copy whose nodes say what they make in meta["spec"], as sharding rules read it; symbolic shapes say nothing.
    And whether one op joins or deals blocks in it where several did."""
    graph = copied_graph(old)
    has_blocks = raise_blocks(graph)
    for node in graph.nodes:
        spec = spec_of_val(node.meta.get("val"))
        if node.op != "output" and spec is not None:
            node.meta["spec"] = spec
    return graph, has_blocks


def spec_of_val(val: Any) -> Any:
    """What a node's meta["val"] says, as rank graphs have it; None where that is no tensor, or of symbolic shape."""
    if isinstance(val, (list, tuple)):
        return tuple(spec_of_val(one) for one in val)
    return Spec(tuple(val.shape), val.dtype) if isinstance(val, torch.Tensor) and not is_symbolic(val) else None


def _chosen(graph: fx.Graph, count: int, dims: Mapping[str, Dim] | None) -> tuple[str, Regions] | None:
    """The cut that has most multiplications in chunks; the first of equals."""
    total = sum(work_of(node) for node in graph.nodes)
    best: tuple[str, Regions] | None = None
    tried: set[tuple[fx.Node, Cut]] = set()
    for node, cut in _named(graph, count, dims) if dims is not None else _seeds(graph, count):
        if (node, cut) in tried:
            continue
        made = regions(graph, node, cut)
        tried |= set(made.cuts.items()) | {(node, cut)}
        if best is None or (made.work, made.num_collectives) > (best[1].work, best[1].num_collectives):
            best = f"dim {cut.dim} of {node.name}" + (f" inside {cut.outer}" if cut.outer > 1 else ""), made
        if total and made.work > _ENOUGH * total:
            break
    return best


def _named(graph: fx.Graph, count: int, dims: Mapping[str, Dim]) -> Iterator[tuple[fx.Node, Cut]]:
    nodes = {node.name: node for node in graph.nodes}
    for name, at in dims.items():
        dim, outer = (at, 1) if isinstance(at, int) else at
        spec = nodes[name].meta.get("spec") if name in nodes else None
        if not isinstance(spec, Spec):
            raise MeshweaveError("dims names no tensor of the graph", got=name, expected="the name of a node")
        cut = Cut(dim, outer, count)
        if dim < 0 or not fits(cut, spec.shape):
            raise MeshweaveError(
                "rows do not come apart into equal chunks",
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
