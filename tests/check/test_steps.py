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
from meshweave.ir.collectives import functional, transfer
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


def test_a_part_that_does_not_fit_into_the_whole() -> None:
    text = refused(zero_padded(), local_ops.embed_part, lambda n: n.update_arg(3, 6))
    assert "has a part outside of the whole" in text
    assert "device 5" in text  # with the last of the three pieces


def test_parts_that_leave_a_gap() -> None:
    text = refused(zero_padded(), local_ops.embed_part, lambda n: n.update_arg(3, 8))
    assert "got: [0:3, 0:6], [3:6, 0:6], [6:7, 0:6] in an array of [8, 6], 6 of it padding" in text


def test_parts_along_an_axis_along_which_the_value_is_replicated() -> None:
    text = refused(zero_padded(), local_ops.embed_part, lambda n: n.update_arg(5, "a"))
    assert "parts of a sum overlap" in text


def test_parts_along_an_axis_along_which_the_value_is_partial() -> None:
    one = made("to_partial", "[{b}, {}] partial(sum: a)", "b", dim=0, op="sum")
    assert "over an axis over which it is" in refused(one, local_ops.embed_part, lambda n: n.update_arg(5, "a"))


def test_parts_of_another_reduction() -> None:
    text = refused(zero_padded(), local_ops.embed_part, lambda n: n.update_arg(4, "min"))
    assert "got: still to reduce: min over b\n  expected: still to reduce: max over b" in text


def test_what_is_padded_is_no_communication() -> None:
    placed, roles = zero_padded()
    assert check_complete(placed, roles).num_communications == 0
    assert check_complete(placed, split(roles, random.Random(1))).num_communications == 0


def test_parts_that_overlap_between_roles() -> None:
    """One device puts its part where another has its own; they run different graphs."""
    placed, roles = zero_padded()
    halves = split(roles, random.Random(3))
    next(n for n in halves[0].graph.nodes if n.target is local_ops.embed_part).update_arg(2, 0)
    with pytest.raises(VerifyError, match=r"parts of a sum overlap|does not have its piece|roles disagree"):
        check_complete(placed, halves)


def test_blocks_of_a_group_in_the_order_of_the_dim() -> None:
    gathered = made("all_gather", "[{b,a}, {}]", "b,a", (12, 6), dim=0)
    text = refused(gathered, local_ops.join_blocks, lambda n: n.update_arg(2, (0, 1)))
    assert "join_blocks (join_blocks): device 4 does not have its piece" in text
    dealt = made("reduce_scatter", "[{}, {}] partial(sum: a,b)", "b,a", (12, 6), dim=0, op="sum")
    text = refused(dealt, local_ops.deal_blocks, lambda n: n.update_arg(1, (2, 3)))
    assert "does not have its piece" in text


@pytest.mark.parametrize(("sizes", "order"), [((), ()), ((3, 2), (0, 0)), ((3, 2), (0,)), ((3, -2), (1, 0))])
def test_an_order_that_is_none(sizes: tuple[int, ...], order: tuple[int, ...]) -> None:
    def change(node: fx.Node) -> None:
        node.update_arg(1, sizes)
        node.update_arg(2, order)

    text = refused(made("all_gather", "[{b,a}, {}]", "b,a", dim=0), local_ops.join_blocks, change)
    assert "has an impossible order of the pieces of a group\n" in text
    assert f"got: sizes {list(sizes)}, order {list(order)}" in text


def test_a_table_of_fewer_axes() -> None:
    one = made("all_gather", "[{b,a}, {}]", "b,a", dim=0)
    assert "joins blocks by a table that does not fit" in refused(one, member_pieces, lambda n: n.update_arg(4, 1))


def test_a_number_that_cannot_be_computed() -> None:
    one = made("all_gather", "[{b,a}, {}]", "b,a", dim=0)
    text = refused(one, member_pieces, lambda n: n.update_arg(3, 0))
    assert "a number cannot be computed" in text
    assert "got: ZeroDivisionError" in text


def test_a_group_that_is_too_small() -> None:
    one = made("all_gather", "[{b,a}, {}]", "b,a", (12, 6), dim=0)
    start = functional.all_gather_into_tensor.default
    assert "has a wrong size of its group" in refused(one, start, lambda n: n.update_arg(2, "a"))


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


def test_a_permute_to_another_place() -> None:
    layout = Layout.parse("[{}, {a,b}, {}] partial(sum: c)", MESHES["2x2x2"])
    text = changed(turned(), target=layout)
    assert "does not have its piece" in text
    assert "expected: [0:2, 0:2, 0:2], its piece in [{b}, {a}, {}] partial(sum: c)" in text


def test_a_permute_that_changes_what_is_pending() -> None:
    mesh = MESHES["2x2x2"]
    whole, other = (Layout.parse(f"[{{b}}, {{a}}, {{}}]{p}", mesh) for p in ("", " partial(max: c)"))
    for target in (whole, other):
        assert "cannot be exchanged" in changed(turned(), target=target)


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


def test_a_permute_that_one_role_leaves_out() -> None:
    placed, roles = turned()
    halves = split(roles, random.Random(0))
    graph = halves[0].graph
    start = next(n for n in graph.nodes if n.target is transfer)
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])
    graph.erase_node(wait)
    graph.erase_node(start)
    with pytest.raises(VerifyError, match="roles disagree about their next communication"):
        check_complete(placed, halves)
