"""What a graph may observe of a tensor besides its elements: its storage, its offset there, its neighbours."""

from __future__ import annotations

import operator
import re
from functools import cache
from typing import Any

import torch
from torch import fx

from meshweave.interop.ops import is_operator, operator_name
from meshweave.ir.aliases import written_of
from meshweave.ir.collectives import WAIT, collective_of
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.rank import SYMBOLS
from meshweave.optimize.overlap.read import begin

# Namespaces whose ops see only elements, and the exceptions among them: ops that use an offset into the storage,
# exchange or resize it, or need an offset that is a multiple of a larger element.
_PLAIN = ("aten", "prims", "meshweave")
_SEEING = re.compile(r"as_strided|storage|resize|^set(_|$)|_nested|view_as_complex")
_INDIFFERENT = frozenset({WAIT, operator.getitem, begin, *SYMBOLS})


def observed_storages(program: DeviceProgram) -> frozenset[int]:
    """The storages that must not be replaced by views: those of outputs, those that an op writes, and those of an
    operand of an op that may see more than elements. A tensor in any other storage may become a view into a larger
    storage."""
    seen = program.results()
    for node in program.graph.nodes:
        is_plain = node.op in ("placeholder", "get_attr") or (node.op == "call_function" and _sees_elements(node))
        if not is_plain and node.op != "output":
            seen += node.all_input_nodes
    return frozenset(x.storage for node in seen for x in program.values[node])


def _sees_elements(node: fx.Node) -> bool:
    return _is_plain(node.target) or (not written_of(node.target) and collective_of(node) is not None)


@cache
def _is_plain(target: Any) -> bool:
    """Whether an op only reads the elements of its operands, or makes a view relative to them."""
    if not is_operator(target):
        return target in _INDIFFERENT
    if target is WAIT:
        return True
    is_known = target.namespace in _PLAIN and target is not torch.ops.aten.view.dtype
    return is_known and not written_of(target) and not _SEEING.search(operator_name(target))
