"""Compares two forms of a role: the same ops on the same values, in any order, merged or not."""

from __future__ import annotations

from typing import Any

from torch import fx

from meshweave.errors import VerifyError
from meshweave.ir.graph import op_name, value_numbers
from meshweave.ir.rank import RankGraph
from meshweave.optimize.overlap.unmerge import unmerge_buckets

Forms = dict[Any, int]  # op, group and arguments -> number of the resulting value


def check_same(before: RankGraph, after: RankGraph) -> int:
    """The number of values that both compute; raises VerifyError for the first output that is computed differently.

    The results of ops in rank graphs depend only on their arguments, so that equal ops on equal values give equal
    values. Merged collectives are undone first.
    """
    forms: Forms = {}
    first, other = _outputs(before, forms), _outputs(unmerge_buckets(after), forms)
    for key in dict.fromkeys((*first, *other)):
        if key not in first or key not in other or first[key][0] != other[key][0]:
            node = (other.get(key) or first[key])[1]
            raise VerifyError(
                f"output {key[0]} {key[1]} is computed differently than before scheduling",
                where=f"node {node.name} ({op_name(node.target)})",
                got="no such output" if key not in other else "other ops, or other operands",
            )
    return len(forms)


def _outputs(role: RankGraph, forms: Forms) -> dict[tuple[str, str], tuple[int, fx.Node]]:
    """By output the number of its value, and the node that computes it."""
    inputs = {node: ("input", item.kind, item.name) for node, item in role.sources.items()}
    numbers = value_numbers(role.graph, forms, inputs.get)
    return {key: (numbers[node], node) for key, node in role.results.items()}
