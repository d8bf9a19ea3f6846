"""Steps over several axes that are broken by hand: each is refused, and named."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.check.mutants import split
from tests.steps import MESHES, Chain, program
from torch import fx

from meshweave.check.completeness import check_complete
from meshweave.errors import VerifyError
from meshweave.ir import local_ops
from meshweave.ir.graph import Spec, StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.rank import RankGraph, Transfer, member_pieces
from meshweave.ir.routes import Message
from meshweave.place.movement.steps import Kind, Step
from meshweave.replay.communication import check_messages

F32 = torch.float32
Made = tuple[StepGraph, tuple[RankGraph, ...]]


def made(kind: Kind, source: str, axes: str, shape: tuple[int, ...] = (7, 6), mesh: str = "2x3", **given: Any) -> Made:
    """One step as a program. A `target` is that of a permute."""
    start = Layout.parse(source, MESHES[mesh])
    target = Layout.parse(given.pop("target", source), MESHES[mesh])
    return program(Chain(start, shape).then(Step(kind, tuple(axes.split(",")), start, target, **given)), F32)


def refused(one: Made, target: Any, change: Callable[[fx.Node], Any]) -> str:
    """The error for the program whose first call of `target` is changed."""
    placed, roles = one
    check_complete(placed, roles)
    change(next(n for n in roles[0].graph.nodes if n.target is target))
    with pytest.raises(VerifyError) as error:
        check_complete(placed, roles)
    return str(error.value)


def zero_padded() -> Made:
    return made("to_partial", "[{b}, {}]", "b", dim=0, op="max")


def test_parts_that_overlap() -> None:
    """Each at the beginning: the elements would be reduced with each other."""
    text = refused(zero_padded(), local_ops.embed_part, lambda n: n.update_arg(2, 0))
    assert text.startswith("embed_part (embed_part): parts of a sum overlap\n")
    assert text.endswith("got: in the group of device 4, along dim 0")


def test_what_is_padded_is_no_communication() -> None:
    placed, roles = zero_padded()
    assert check_complete(placed, roles).num_communications == 0
    assert check_complete(placed, split(roles, random.Random(1))).num_communications == 0


@pytest.mark.parametrize(("sizes", "order"), [((), ()), ((3, 2), (0, 0)), ((3, 2), (0,)), ((3, -2), (1, 0))])
def test_an_order_that_is_none(sizes: tuple[int, ...], order: tuple[int, ...]) -> None:
    def change(node: fx.Node) -> None:
        node.update_arg(1, sizes)
        node.update_arg(2, order)

    text = refused(made("all_gather", "[{b,a}, {}]", "b,a", dim=0), local_ops.join_blocks, change)
    assert "has an impossible order of the pieces of a group\n" in text
    assert f"got: sizes {list(sizes)}, order {list(order)}" in text


def test_a_number_that_cannot_be_computed() -> None:
    one = made("all_gather", "[{b,a}, {}]", "b,a", dim=0)
    text = refused(one, member_pieces, lambda n: n.update_arg(3, 0))
    assert "a number cannot be computed" in text
    assert "got: ZeroDivisionError" in text


# permutes


def turned() -> Made:
    return made(
        "permute", "[{a}, {b}, {}] partial(sum: c)", "a,b", (4, 4, 2), "2x2x2", target="[{b}, {a}, {}] partial(sum: c)"
    )


def changed(one: Made, **other: Any) -> str:
    placed, (rank,) = one
    check_complete(placed, [rank])
    known = rank.transfers["t0"]
    parts = {"source": known.source, "target": known.target, "spec": known.spec, "axes": known.axes} | other
    rank.transfers["t0"] = Transfer(**parts)
    with pytest.raises(VerifyError) as error:
        check_complete(placed, [rank])
    return str(error.value)


def test_a_permute_in_other_groups() -> None:
    assert "transfer (transfer): the pieces cannot be exchanged inside groups of these axes" in changed(
        turned(), axes=("a",)
    )
    assert "got: groups of a, b, c" in changed(turned(), axes=("a", "b", "c"))
    assert "a partial value cannot go to another mesh" in changed(turned(), axes=())


def _crossed(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Two messages of different groups come from each other's senders."""
    turn = {a: b for group in MESHES["2x2x2"].groups(("c",)) for a, b in (group, group[::-1])}
    return tuple(Message(turn[m.sender], m.receiver, m.box) for m in messages)


def test_a_message_from_another_group() -> None:
    """The sender has the same box, but of another part of the sum."""
    source, target = (
        Layout.parse(f"[{{{x}}}, {{{y}}}, {{}}] partial(sum: c)", MESHES["2x2x2"]) for x, y in ("ab", "ba")
    )
    spec = Spec((4, 4, 2), F32)
    axes = ("a", "b")
    messages = Transfer(source, target, spec, axes).routes.messages
    assert len(messages) == 8
    check_messages(source, target, spec.shape, axes, messages)
    with pytest.raises(VerifyError, match="a message leaves its group"):
        check_messages(source, target, spec.shape, axes, _crossed(messages))
