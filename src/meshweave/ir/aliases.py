"""Which operands an op's results alias, and which it writes, by its schema."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from meshweave.interop.ops import OpOverload, arguments_of, is_operator, returns_of

_MOST_PARTS = 4096  # for an op that returns a list of views
_ALIASES = frozenset({"aten::_unsafe_view", "aten::_reshape_alias"})  # view ops whose schema does not declare the alias


@cache
def aliases_of(target: OpOverload) -> Mapping[int, tuple[tuple[int, str], ...]]:
    """For each result the arguments (position, name) that it may alias, by the op's schema."""
    arguments, returns = arguments_of(target), returns_of(target)
    if target.name().partition(".")[0] in _ALIASES:
        return {0: ((0, arguments[0].name),)}
    aliases = {}
    for i, result in enumerate(returns):
        if result.alias_info is None:
            continue
        sets = result.alias_info.before_set
        aliases[i] = tuple(
            (p, a.name)
            for p, a in enumerate(arguments)
            if a.alias_info is not None and (a.alias_info.before_set & sets or "*" in sets)
        )
    # split, unbind: every part aliases the same operand
    if len(returns) == 1 and str(returns[0].type).startswith("List"):
        annotated = tuple((p, a.name) for p, a in enumerate(arguments) if a.alias_info is not None)
        return dict.fromkeys(range(_MOST_PARTS), annotated) if annotated else {}
    return aliases


@cache
def written_of(target: Any) -> tuple[tuple[int, str], ...]:
    """The arguments (position, name) that an op writes, by its schema."""
    if not is_operator(target):
        return ()
    arguments = enumerate(arguments_of(target))
    return tuple((p, a.name) for p, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def is_view_op(target: Any) -> bool:
    """Whether an op returns views, by its schema, and writes nothing."""
    return is_operator(target) and bool(aliases_of(target)) and not written_of(target)
