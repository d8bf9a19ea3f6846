"""The batch split of rank graphs: whole training steps of one role, on the shapes of its devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import fx

from meshweave.chunks.cut import FIXED, Cut
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import COLLECTIVES
from meshweave.ir.graph import copied_graph
from meshweave.ir.rank import SYMBOLS, RankGraph, bind_symbols
from meshweave.ir.values import Values, local_values, varying
from meshweave.ir.verify import verify_rank
from meshweave.rows.split import Dim, SplitReport, spec_of_val, split_batch
from meshweave.rows.ways import fits

_META = torch.device("meta")
_BEFORE = "spec of the role"  # meta of nodes that stay whole: what they said that they make


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """How whole steps are split.

    num_chunks: the numbers of chunks that are tried. when: "gain": where the simulated step is faster so; "always":
    wherever it can be, in the first of `num_chunks`, and costs are not asked.
    """

    num_chunks: tuple[int, ...] = (2, 4)
    when: Literal["gain", "always"] = "gain"

    def __post_init__(self) -> None:
        if not self.num_chunks or any(type(n) is not int or n < 2 for n in self.num_chunks):
            raise MeshweaveError("a batch is split in two chunks or more", got=f"num_chunks={self.num_chunks!r}")
        if self.when not in ("gain", "always"):
            raise MeshweaveError("unknown time to split", got=repr(self.when), expected="gain or always")


def split_role(
    role: RankGraph, num_chunks: int = 2, *, dims: Mapping[str, Dim] | None = None
) -> tuple[RankGraph, SplitReport]:
    """A new rank graph in which what goes row by row runs in chunks of a device's rows, wherever a collective is among
    it; the role is untouched, and itself what comes back where nothing is split.

    Arguments are those of `split_batch`; without `dims` rows are those of the batch's inputs. What has not the same
    shape on every device of the role stays whole, and what devices of other roles take part in. Gradients of weights
    are added in float32, or wider, chunk by chunk.
    """
    known: dict[fx.Node, fx.Node] = {}
    graph = copied_graph(role.graph, known)
    uneven, values = varying(role), local_values(role).values
    numbers = bind_symbols(role.graph, role.coordinates(role.devices[0]))
    for node, made in known.items():
        made.meta[_BEFORE] = node.meta.get("spec")
        if node in uneven:
            made.meta[FIXED] = "it has not the same shape on every device"
        elif node.op != "output":
            made.meta["val"] = numbers[node] if node.target in SYMBOLS else _val(node, values.get(node, ()))
        if node.target in COLLECTIVES and not role.has_all_of(str(node.args[-1])):
            made.meta[FIXED] = "devices of other roles take part in it"
    rows = dims or _rows(role, graph, num_chunks)
    if not rows:
        return role, SplitReport(False, num_chunks, f"no input of the batch has rows for {num_chunks} equal chunks")
    module, report = split_batch(fx.GraphModule(torch.nn.Module(), graph), num_chunks, dims=rows, fuse_sums=False)
    if not report.is_taken:
        return role, report
    return verify_rank(replace(role, graph=_told(module.graph))), report


def _rows(role: RankGraph, graph: fx.Graph, count: int) -> dict[str, Dim]:
    """The first dims of the batch's inputs, where they come apart."""
    sources = (n for n in graph.nodes if n.op == "placeholder")
    batch = [n for n, item in zip(sources, role.inputs, strict=True) if item.kind == "batch" and "val" in n.meta]
    return {n.name: 0 for n in batch if n.meta["val"].dim() and fits(Cut(0, 1, count), n.meta["val"].shape)}


def _val(node: fx.Node, made: Values) -> Any:
    tensors = tuple(torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=_META) for x in made)
    return tensors[0] if len(tensors) == 1 and not isinstance(node.meta.get("spec"), tuple) else tensors


def _told(split: fx.Graph) -> fx.Graph:
    """A copy whose nodes say what they make as rank graphs do: what stays whole as before, chunks by their shapes."""
    graph = copied_graph(split)
    for made in graph.nodes:
        told, before = made.meta, made.meta.get(_BEFORE)
        made.meta = {key: value for key, value in told.items() if key not in (_BEFORE, "val", FIXED)}
        spec = before or spec_of_val(told.get("val"))
        if spec:
            made.meta["spec"] = spec
    return graph
