"""The table of sharding rules: op -> how it shards and how it runs on pieces."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from meshweave.errors import RuleError
from meshweave.ir.graph import Spec, op_name, origin_of, tensor_inputs
from meshweave.sharding.factors import Linear, Rule, RuleBuilder, rule_from_text

RuleFunction = Callable[[fx.Node], Rule]


@dataclass(frozen=True, slots=True)
class Row:
    """One op: its rule, and the name of the rewrite that makes it run on pieces (see expand/localize)."""

    rule: RuleFunction
    localize: str = ""


TABLE: dict[Any, Row] = {}


def add(targets: Any, rule: RuleFunction | str, *, localize: str = "", linear: tuple[Linear, ...] = ()) -> None:
    """Enter one row for each target. A rule is a factor text or a function of the node."""
    function = rule if callable(rule) else _text_rule(rule, linear)
    for target in targets if isinstance(targets, (list, tuple, set)) else [targets]:
        assert target not in TABLE, f"{op_name(target)} has two rows"
        TABLE[target] = Row(function, localize)


def register_rule(target: Any, rule: str | RuleFunction, *, linear: tuple[int, ...] = ()) -> None:
    """Teach meshweave an op: `mw.register_rule(torch.ops.my.op.default, "b s h -> b s h", linear=(0,))`.

    The text names the factors of every tensor operand and result: a letter shared is a loop shared, a factor absent
    from a result makes it a partial sum when sharded, `h!` cannot be sharded. `linear` lists operands of which a
    partial sum may pass through (each alone). The op runs on pieces as it is. Registering again replaces the row.
    """
    modes = tuple(Linear(frozenset({i})) for i in linear)
    TABLE[target] = Row(rule if callable(rule) else _text_rule(rule, modes))


def _text_rule(text: str, linear: tuple[Linear, ...]) -> RuleFunction:
    def rule(node: fx.Node) -> Rule:
        return rule_from_text(text, [n.meta["spec"] for n in tensor_inputs(node)], result_specs(node), linear)

    return rule


def result_specs(node: fx.Node) -> list[Spec]:
    """Specs of the tensors that a node makes; absent ones of a tuple are left out."""
    spec = node.meta["spec"]
    if isinstance(spec, tuple):
        return [s for s in spec if s is not None]
    return [spec]


def row_for(node: fx.Node) -> Row:
    """The row of a node's op. RuleError that names op, line and the registration to write for an unknown one."""
    row = TABLE.get(node.target)
    if row is None and torch.Tag.pointwise in getattr(node.target, "tags", ()):
        return POINTWISE
    if row is None:
        shapes = ", ".join(_letters(s, i) for i, s in enumerate(n.meta["spec"] for n in tensor_inputs(node)))
        results = ", ".join(" ".join(f"z{d}" for d in range(len(s.shape))) for s in result_specs(node))
        raise RuleError(
            f"no sharding rule for {op_name(node.target)}",
            where=str(origin_of(node)),
            got=f"{node.name}({', '.join(str(n.meta['spec']) for n in tensor_inputs(node))})",
            expected="a row in the rule table",
            hint=f'register one: meshweave.register_rule(torch.ops.{node.target}, "{shapes} -> {results}") with equal '
            "letters for loops that operands and results share, and ! after what cannot be sharded",
        )
    return row


def pointwise(node: fx.Node, linear: tuple[Linear, ...] = ()) -> Rule:
    """One factor per dim of the result; operands broadcast to it from the right."""
    (result,) = result_specs(node)
    build = RuleBuilder()
    dims = build.dims(result.shape)
    operands = []
    for value in tensor_inputs(node):
        shape = value.meta["spec"].shape
        last = dims[len(dims) - len(shape) :]
        operands.append([() if size == 1 else dim for size, dim in zip(shape, last, strict=True)])
    return build.rule(operands, [dims], linear)


POINTWISE = Row(pointwise)


def _letters(spec: Spec, operand: int) -> str:
    return " ".join(f"{'abcdefgh'[operand % 8]}{d}" for d in range(len(spec.shape)))
