"""Represents blocks of a group in any graph by a single op each, to join or to cut them.

A graph of torch.compile cuts and joins the blocks of a collective along dims other than 0 by split and cat; these
become join_blocks and deal_blocks, for which the tables of cuts have rows. The remaining ops are lowered to slices and
a cat.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from meshweave.chunks.writer import kept_meta
from meshweave.ir import local_ops
from meshweave.ir.collectives import WAIT
from meshweave.ir.described import is_symbolic
from meshweave.ir.graph import erase_unused
from meshweave.rings.find import KINDS

aten = torch.ops.aten


def raise_blocks(graph: fx.Graph) -> None:
    """Rewrite them in place."""
    for node in list(graph.nodes):
        if node.target is not aten.cat.default or node.kwargs:
            continue
        parts: Any = node.args[0]
        to = int(node.args[1]) if len(node.args) > 1 else 0  # type: ignore[arg-type]
        cut = _cut_of(parts)
        if cut is None:
            continue
        source, dim = cut
        rank, n = source.meta["val"].dim(), len(parts)
        to, dim = to % rank, dim % rank
        if to and not dim and source.target is WAIT:
            _replace(node, local_ops.join_blocks, (source, [n], [0], to, None))
        elif dim and not to and any(user.target in KINDS for user in node.users):
            block = source.meta["val"].shape[dim] // n
            _replace(node, local_ops.deal_blocks, (source, [n], [0], dim, None, block))


def _cut_of(parts: Sequence[Any]) -> tuple[fx.Node, int] | None:
    """The value that these are all the parts of, in order, and the dim. A cat along another dim takes equal sizes."""
    items = [p for p in parts if isinstance(p, fx.Node) and p.target is operator.getitem]
    if len(items) != len(parts) or len(items) < 2 or [p.args[1] for p in items] != list(range(len(items))):
        return None
    split = items[0].args[0]
    if not isinstance(split, fx.Node) or any(p.args[0] is not split for p in items) or split.kwargs:
        return None
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    vals, source = split.meta.get("val"), split.args[0]
    if vals is None or len(vals) != len(items) or not isinstance(source, fx.Node):
        return None
    if any(map(is_symbolic, vals)):
        return None
    return source, int(split.args[2]) if len(split.args) > 2 else 0  # type: ignore[arg-type]


def _replace(node: fx.Node, target: Any, args: tuple[Any, ...]) -> None:
    with node.graph.inserting_before(node):
        block = node.graph.call_function(target, args)
    block.meta = kept_meta(node) | {"val": node.meta["val"]}
    node.replace_all_uses_with(block)
    erase_unused(node.graph, [node])
