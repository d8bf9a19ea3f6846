"""The table of ops: how each is sharded, runs on pieces and in chunks of rows, and what it costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from meshweave.errors import RuleError
from meshweave.interop.ops import OpOverload, is_operator, only_overload
from meshweave.ir.graph import Spec, op_name, origin_of, tensor_inputs
from meshweave.ir.traits import is_pointwise
from meshweave.ir.values import Value
from meshweave.ir.work import MEMORY_KINDS, Work
from meshweave.ops.factors import Linear, Rule, RuleBuilder, parse_factors, rule_from_text
from meshweave.ops.pieces import AS_IT_IS, OnPiece

RuleFunction = Callable[[fx.Node], Rule]
Cost = Callable[[fx.Node, Sequence[Value], Sequence[Value]], Work | tuple[Work, ...]]  # node, operands, results


@dataclass(frozen=True, slots=True)
class OpRecord:
    """The record of an op: its sharding rule, how it runs on pieces, and its cost (a kind of memory work, or a
    function; "" if `ir.traits` has its kind). `registered`: what a user registered, as text; None for a function, ""
    for an op of meshweave."""

    rule: RuleFunction
    on_piece: OnPiece = AS_IT_IS
    registered: str | None = ""
    cost: str | Cost = ""


TABLE: dict[Any, OpRecord] = {}


def _placed(rule: RuleFunction, node: fx.Node) -> Rule:
    """The rule of an op whose local version gets the offset of its piece."""
    plain = rule(node)
    return replace(plain, placed=frozenset(range(len(plain.sizes))))


def add(
    targets: Any,
    rule: RuleFunction | str,
    *,
    on_piece: OnPiece = AS_IT_IS,
    linear: tuple[Linear, ...] = (),
    cost: str | Cost = "",
) -> None:
    """Add a record for each target. A rule is a factor text or a function of the node; `cost` as in `OpRecord`."""
    function = rule if callable(rule) else _text_rule(rule, linear)
    if on_piece.is_placed:
        function = partial(_placed, function)
    for target in targets if isinstance(targets, (list, tuple, set)) else [targets]:
        assert target not in TABLE, f"{op_name(target)} has two rows"
        TABLE[target] = OpRecord(function, on_piece, cost=cost)


def register_rule(
    target: Any, rule: str | RuleFunction, *, linear: tuple[int, ...] = (), cost: str | Cost = "", backward: Any = None
) -> None:
    """Teach meshweave an op: `mw.register_rule(torch.ops.my.op, "b s h -> b s h", linear=(0,))`.

    An op, and its `backward`, is an operator (with its overload, if it has several: `torch.ops.aten.add.Tensor`) or a
    function decorated by `torch.library.custom_op`.

    The text names the factors of every tensor operand and result: a shared letter is a shared loop, a sharded factor
    that a result lacks makes that result a partial sum, `h!` cannot be sharded. `linear` lists operands whose partial
    sums may pass through (each alone). The op runs on pieces unchanged. Registering again replaces the row.

    cost: how the simulator prices the op: a kind of memory work ("pointwise", "reduction", "gather", ...: operands are
        read and results written), or a function (node, operands, results) -> a Matmul, Attention or Memory of
        `meshweave.cost.hardware`, or a tuple of them. Without a cost it is priced by the bytes that it moves,
        and a note says so.
    backward: the op that computes the gradients, called with the gradients of all results and then all tensor operands,
        and returning the gradient of each operand. Its rule follows from `rule`, which must be text; it has the same
        cost. Register a backward op of another form by itself; a backward of known ops needs nothing.

    Raises RuleError for what is no op, a text that is no rule, an unknown kind of work, and `backward` with a rule that
    is not text.
    """
    target, backward = _operator(target), None if backward is None else _operator(backward)
    modes = tuple(Linear(frozenset({i})) for i in linear)
    if not callable(cost) and cost not in ("", *MEMORY_KINDS):
        raise RuleError(
            "unknown kind of work",
            where=f"cost of {op_name(target)}",
            got=repr(cost),
            expected=f"{', '.join(MEMORY_KINDS)}, or a function (node, operands, results) -> work",
        )
    registered = None if callable(rule) or callable(cost) else f"{rule}, {linear}, {cost}"
    TABLE[target] = OpRecord(rule if callable(rule) else _text_rule(rule, modes), registered=registered, cost=cost)
    if backward is None:
        return
    if callable(rule):
        raise RuleError(
            "the rule of the backward op can only follow from a text",
            where=f"register_rule({op_name(target)})",
            got="a function",
            hint="register the backward op by itself",
        )
    operands, _, results = rule.partition("->")
    gradients = frozenset(range(len(results.split(","))))
    written = _text_rule(f"{results},{operands}->{operands}", (Linear(gradients),))
    backward_text = None if registered is None else f"backward of {registered}"
    TABLE[backward] = OpRecord(written, registered=backward_text, cost=cost)


def registrations() -> tuple[str | None, ...]:
    """The rules and costs that the user registered, as text; None for each that is a function."""
    rows = ((target, row.registered) for target, row in TABLE.items() if row.registered != "")
    return tuple(None if text is None else f"{target}: {text}" for target, text in rows)


def _operator(target: Any) -> OpOverload:
    """The operator that `target` means, or a RuleError."""
    overload = only_overload(target)
    if is_operator(overload):
        return overload
    raise RuleError(
        "a rule is for an operator of PyTorch",
        where="register_rule",
        got=repr(target),
        expected="torch.ops.my.op, torch.ops.my.op.default, or a function decorated by torch.library.custom_op",
        hint=f"of several overloads name one: {', '.join(target.overloads())}" if hasattr(target, "overloads") else "",
    )


def _text_rule(text: str, linear: tuple[Linear, ...]) -> RuleFunction:
    parse_factors(text)

    def rule(node: fx.Node) -> Rule:
        try:
            return rule_from_text(text, [n.meta["spec"] for n in tensor_inputs(node)], result_specs(node), linear)
        except RuleError as error:
            place = f"the rule '{text}' of {op_name(node.target)}, called in {origin_of(node)}"
            hint = "register another rule for it: meshweave.register_rule(op, text) replaces the row"
            raise RuleError(error.what, where=place, got=error.got, expected=error.expected, hint=hint) from None

    return rule


def result_specs(node: fx.Node) -> list[Spec]:
    """Specs of the tensors that a node returns; absent elements of a tuple are omitted."""
    spec = node.meta["spec"]
    if isinstance(spec, tuple):
        return [s for s in spec if s is not None]
    return [spec]


def results_of(node: fx.Node) -> list[fx.Node | None]:
    """The results of a node, None where nothing uses a result."""
    if isinstance(node.meta["spec"], Spec):
        return [node]
    users = {user.args[1]: user for user in node.users}
    return [users.get(i) for i, spec in enumerate(node.meta["spec"]) if spec is not None]


def row_for(node: fx.Node) -> OpRecord:
    """The row of a node's op. An unknown op is a RuleError with the op, its line and the registration to write."""
    row = TABLE.get(node.target)
    if row is None and is_pointwise(node.target):
        return POINTWISE
    if row is None:
        operands = _whole_text([n.meta["spec"] for n in tensor_inputs(node)], "abcdefgh")
        results = _whole_text(result_specs(node), "zyxwvuts")
        raise RuleError(
            f"no sharding rule for {op_name(node.target)}",
            where=str(origin_of(node)),
            got=f"{node.name}({', '.join(str(n.meta['spec']) for n in tensor_inputs(node))})",
            expected="an op in the rule table",
            hint="register one, which runs the op unsharded as it stands: "
            f'meshweave.register_rule(torch.ops.{node.target}, "{operands} -> {results}") '
            "and give equal letters, without !, to loops that operands and results share and that can be cut",
        )
    return row


def pointwise(node: fx.Node, linear: tuple[Linear, ...] = ()) -> Rule:
    """One factor per dim of the result; operands broadcast to it from the right."""
    (result,) = result_specs(node)
    build = RuleBuilder()
    dims = build.dims(result.shape)
    return build.rule([build.broadcast(n.meta["spec"].shape, dims) for n in tensor_inputs(node)], [dims], linear)


POINTWISE = OpRecord(pointwise)


def _whole_text(specs: Sequence[Spec], letters: str) -> str:
    """One side of a factor text in which every dim is a whole factor of its own."""
    names = [letters[i % len(letters)] * (1 + i // len(letters)) for i in range(len(specs))]
    return ", ".join(" ".join(f"{n}{d}!" for d in range(len(s.shape))) for n, s in zip(names, specs, strict=True))
