"""Merges equal gathers: a value that several matmuls use through separate views is gathered once, and shares a ring."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from meshweave.chunks.cut import kind_of
from meshweave.ir.collectives import ALL_GATHER
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import erase_unused, origin_of
from meshweave.rings.rewrite import wait_of

aten = torch.ops.aten
Shared = tuple[str, str, str]  # a removed gather: its name, its group, and the name of the gather that replaces it


def share_gathers(program: DeviceProgram) -> tuple[Shared, ...]:
    """Replace gathers of a phase that gather the same activation over the same group by the first of them.

    Returns for each removed gather: its name, its group, and the name of the gather that replaces it. Parameters are
    excluded: how long they stay gathered is decided where they are moved.
    """
    first: dict[Any, fx.Node] = {}
    lasting, shared = program.lasting(), list[Shared]()
    for start in [node for node in program.graph.nodes if node.target is ALL_GATHER.op]:
        if start in lasting or program.refused(start):
            continue
        kept = first.setdefault((_text(start.args[0]), start.args[1:], origin_of(start).phase), start)
        if kept is start:
            continue
        wait, its = wait_of(start), wait_of(kept)
        order = {node: i for i, node in enumerate(program.graph.nodes)}
        if order[wait] < order[its]:
            wait.prepend(its)
        wait.replace_all_uses_with(its)
        shared.append((start.name, str(start.args[-1]), kept.name))
        erase_unused(program.graph, [wait])
    return tuple(shared)


def _text(value: Any) -> Any:
    """A value as text, down to its first ancestor that is not a view."""
    if not isinstance(value, fx.Node):
        return str(value)
    kind = kind_of(value)
    if kind is None or not (kind.is_free or value.target is aten.contiguous.default):
        return value
    return (value.target, *map(_text, value.args), *((name, _text(arg)) for name, arg in value.kwargs.items()))
