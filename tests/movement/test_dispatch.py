"""Token rows are sent to the devices that read them, and no others: same results, fewer bytes, proven."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
import torch
from tests.training import assert_tensors, train
from torch import Tensor, fx, nn
from torch.nn.functional import grouped_mm

import meshweave as mw
from meshweave import build
from meshweave.check.completeness import check_complete
from meshweave.cost.hardware.alpha_beta import AlphaBeta
from meshweave.errors import VerifyError
from meshweave.ir import ops
from meshweave.ir.collectives import SPARSE_GATHER, SPARSE_SCATTER, TABLE
from meshweave.ir.graph import origin_of, spec_of
from meshweave.place.movement.dispatch import make_sparse
from meshweave.place.movement.plan import plan_move

WIDTH = 8
SLOW_LINKS = AlphaBeta(0.0, 1e6)  # bytes are all that counts
PLANS = {"ep=2": "ep:ep", "ep=4": "ep:ep", "dp=2,ep=2": "dp:dp+ep:ep"}
SPARSE = {SPARSE_GATHER.op, SPARSE_SCATTER.op}
row_readers = torch.ops.meshweave.row_readers.default
row_owners = torch.ops.meshweave.row_owners.default


class Experts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 2)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(grouped_mm(rows, self.up, offs=ends).tanh(), self.down, offs=ends)


class Model(nn.Module):
    """`favoured` experts are chosen whatever the token. The sum over a token's experts is a sum over a dim, or
    (`is_added`) rows that are added at the places of their tokens."""

    def __init__(
        self,
        count: int = 5,
        top: int = 2,
        favoured: tuple[int, ...] = (),
        is_added: bool = False,
        is_sorted_twice: bool = False,
        is_backwards: bool = False,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.count, self.top, self.is_added, self.is_sorted_twice = count, top, is_added, is_sorted_twice
        self.is_backwards = is_backwards
        self.first, self.router, self.experts = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, count), Experts(count)
        bias = torch.zeros(count)
        bias[list(favoured)] = 99.0
        self.register_buffer("bias", bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        scores = self.router(x).sigmoid()
        chosen = (scores + self.bias).topk(self.top, -1).indices
        experts, order = chosen.reshape(-1).sort(stable=True)
        ends = (experts.unsqueeze(1) == torch.arange(self.count)).sum(0).cumsum(0).to(torch.int32)
        rows = self.experts(x[order // self.top], ends)
        rows = rows * scores.gather(1, chosen).reshape(-1)[order].unsqueeze(1)
        if self.is_added:
            return x + torch.zeros_like(x).index_add(0, order // self.top, rows)
        places = order.argsort(descending=self.is_backwards) if self.is_sorted_twice else torch.empty_like(order)
        if not self.is_sorted_twice:
            places[order] = torch.arange(len(order))
        return x + rows[places].view(-1, self.top, WIDTH).sum(1)


def batches(count: int, num_rows: int = 16) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    double = {"generator": generator, "dtype": torch.float64}
    return [{name: torch.randn(num_rows, WIDTH, **double) for name in ("x", "y")} for _ in range(count)]


def sparse_moves(step: mw.TrainStep) -> list[fx.Node]:
    """The sparse moves of tokens; those of the weights that a router gives are left out."""
    moves = (n for n in step.program.placed.graph.nodes if n.target is ops.move and len(n.args) > 2)
    return [n for n in moves if spec_of(n).shape[-1] == WIDTH]


FOUR = (("gather", "forward"), ("scatter", "forward"), ("gather", "backward"), ("scatter", "backward"))
MODELS = {
    "a sum over each token": {},
    "an order that is sorted": {"is_sorted_twice": True},
    "added rows": {"is_added": True},
    "all to one expert": {"favoured": (3,), "top": 1},
    "empty experts": {"favoured": (1, 4)},
    "fewer experts than devices": {"count": 3, "top": 1},
}


# Sums over a token's rows as the model has them, or of own rows alone (`movement.own_sums`).
FORMS = ("own rows", "as written")


def in_form(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if form == "as written":
        monkeypatch.setattr(build, "own_sums", lambda placed: placed)


SAMPLE = {("empty experts", "ep=4", "own rows"), ("a sum over each token", "ep=4", "as written")}
SAMPLE |= {("fewer experts than devices", "dp=2,ep=2", "own rows"), ("added rows", "ep=4", "own rows")}
CASES = [
    pytest.param(MODELS[name], mesh, form, marks=() if (name, mesh, form) in SAMPLE else pytest.mark.slow, id=name)
    for name in MODELS
    for mesh in ("ep=4", "dp=2,ep=2")
    for form in FORMS
]


@pytest.mark.parametrize(("settings", "mesh", "form"), CASES)
def test_devices_equal_one_device_and_the_dense_form_to_the_bit(
    settings: dict[str, Any], mesh: str, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_form(form, monkeypatch)
    options: dict[str, Any] = {"plan": PLANS[mesh], "profile": SLOW_LINKS}
    data = batches(3)
    alone, expected = train(Model(**settings).double(), data)
    step, losses = train(Model(**settings).double(), data, mesh, **options)
    kinds = {
        ("scatter" if n.args[0].meta["layout"].partial else "gather", origin_of(n).phase) for n in sparse_moves(step)
    }
    assert kinds == set(FOUR) or ("dp" in mesh and kinds)
    assert losses == pytest.approx(expected, rel=1e-10)
    assert_tensors(step.parameters(), alone.parameters(), 1e-10)
    check_complete(step.program.placed, step.program.optimized.roles)
    monkeypatch.setattr(build, "make_sparse", lambda placed, planner, rates: placed)
    dense, dense_losses = train(Model(**settings).double(), data, mesh, **options)
    assert not sparse_moves(dense)
    assert losses == dense_losses
    for name, value in dense.parameters().items():
        assert torch.equal(step.parameters()[name], value), name


def test_what_is_sorted_backwards_is_no_inverse() -> None:
    settings = {"is_sorted_twice": True, "is_backwards": True}
    _, expected = train(Model(**settings).double(), batches(2))
    _, losses = train(Model(**settings).double(), batches(2), "ep=2", plan="ep:ep", profile=SLOW_LINKS)
    assert losses == pytest.approx(expected, rel=1e-10)


def test_a_scheduled_step_gives_the_same_bits() -> None:
    slow = mw.load_profile("h100").scaled(bandwidth=1e-5)
    options: dict[str, Any] = {"plan": "ep:ep", "profile": slow}
    plain, losses = train(Model().double(), batches(2), "ep=4", **options)
    ordered, others = train(Model().double(), batches(2), "ep=4", passes="overlap", **options)
    assert losses == others
    nodes = [n for role in ordered.program.optimized.roles for n in role.graph.nodes]
    assert sum(n.target in SPARSE for n in nodes) >= len(sparse_moves(plain)) == 4
    check_complete(ordered.program.placed, ordered.program.optimized.roles)


# which form is taken


def test_the_cheaper_form_is_taken() -> None:
    def num_sparse(costs: Any, **settings: Any) -> int:
        return len(sparse_moves(train(Model(**settings), _float(batches(1)), "ep=4", plan="ep:ep", profile=costs)[0]))

    assert num_sparse(SLOW_LINKS, count=8, top=2) == 4
    assert num_sparse(SLOW_LINKS, count=4, top=4) == 0  # every device reads all rows
    assert num_sparse(AlphaBeta(0.0, 1e13), count=8, top=2) == 0  # to handle the rows takes longer than to send them


def test_the_share_of_rows_is_that_of_routers_that_choose_all_experts_alike() -> None:
    for count, top in ((8, 2), (8, 4), (4, 1)):
        step, _ = train(Model(count, top), _float(batches(1)), "ep=4", plan="ep:ep", profile=SLOW_LINKS)
        choices = list(combinations(range(count), top))
        expected = sum(any(expert < count // 4 for expert in chosen) for chosen in choices) / len(choices)
        assert [n.args[3] for n in sparse_moves(step)] == pytest.approx([expected] * 4)
        for n in sparse_moves(step):
            num_bytes = spec_of(n).num_elements * 4 * expected * 3 / 4
            assert n.meta["plan"].bytes_received == pytest.approx(num_bytes)


def _float(data: list[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    return [{name: x.float() for name, x in batch.items()} for batch in data]


def placed_and_dense(monkeypatch: pytest.MonkeyPatch) -> tuple[mw.TrainStep, list[fx.Node]]:
    """A step without sparse moves, and the moves that could be."""
    names = [n.args[0].name for n in sparse_moves(compiled())]
    monkeypatch.setattr(build, "make_sparse", lambda placed, planner, rates: placed)
    step = compiled()
    moves = [n for n in step.program.placed.graph.nodes if n.target is ops.move and n.args[0].name in names]
    return step, moves


def compiled(mesh: str = "ep=4") -> mw.TrainStep:
    return train(Model(), _float(batches(1)), mesh, plan=PLANS[mesh], profile=SLOW_LINKS)[0]


def test_a_value_that_others_read_is_gathered_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    step, moves = placed_and_dense(monkeypatch)
    placed = step.program.placed
    gather = next(n for n in moves if not n.args[0].meta["layout"].partial)
    with placed.graph.inserting_after(gather):
        other = placed.graph.call_function(torch.ops.aten.neg.default, (gather,))
    other.meta = dict(gather.meta)
    for node in placed.graph.nodes:
        node.meta.pop("plan", None)
    planner = lambda source, target, shape, dtype: plan_move(source, target, shape, dtype, SLOW_LINKS)  # noqa: E731
    make_sparse(placed, planner)
    assert len(sparse_moves(step)) == len(moves) - 1
    assert gather in placed.graph.nodes


# the proof


def prove(step: mw.TrainStep) -> None:
    check_complete(step.program.placed, step.program.optimized.roles)


def sparse_move(step: mw.TrainStep, is_sum: bool, phase: str = "forward") -> fx.Node:
    moves = sparse_moves(step)
    return next(n for n in moves if bool(n.args[0].meta["layout"].partial) == is_sum and origin_of(n).phase == phase)


def made_of(node: fx.Node, target: Any) -> fx.Node:
    while node.target is not target:
        node = node.args[0]
    return node


def _other_members(step: mw.TrainStep, is_sum: bool) -> None:
    owners = made_of(sparse_move(step, is_sum).args[2], row_owners)
    owners.update_arg(4, [1, 0, 2, 3])


def _other_experts(step: mw.TrainStep, is_sum: bool) -> None:
    owners = made_of(sparse_move(step, is_sum).args[2], row_owners)
    owners.update_arg(3, [1, 2, 4, 5])


def _other_places(step: mw.TrainStep, is_sum: bool) -> None:
    """Readers of rows by the order of the sorted ones, without the lookup."""
    readers = sparse_move(step, is_sum).args[2]
    if readers.args[1] is not None:
        readers.update_arg(1, readers.args[1].args[0])
    else:
        group = readers.args[0]
        group.update_arg(0, group.args[0].args[0])


def _readers_of_another_move(step: mw.TrainStep, is_sum: bool) -> None:
    move = sparse_move(step, is_sum)
    masks = step.program.placed.graph.find_nodes(op="call_function", target=row_readers)
    move.update_arg(2, next(mask for mask in masks if mask is not move.args[2]))


def _another_reader(step: mw.TrainStep, is_sum: bool) -> None:
    """An op that reads all rows: of the gathered value, or of the sum before it is one."""
    move = sparse_move(step, is_sum)
    if is_sum:
        source = move.args[0]
        with step.program.placed.graph.inserting_before(move):
            other = step.program.placed.graph.call_function(torch.ops.aten.add.Tensor, (source, source))
        other.meta = dict(source.meta)
        move.update_arg(0, other)
    else:
        with step.program.placed.graph.inserting_after(move):
            other = step.program.placed.graph.call_function(torch.ops.aten.neg.default, (move,))
        other.meta = dict(move.meta)


PLACED = (_other_members, _other_experts, _other_places, _readers_of_another_move, _another_reader)


@pytest.mark.slow_rows(
    "as written-_other_members-gather",
    "as written-_other_experts-sum",
    "as written-_other_places-gather",
    "as written-_readers_of_another_move-gather",
)
@pytest.mark.parametrize("is_sum", [False, True], ids=["gather", "sum"])
@pytest.mark.parametrize("change", PLACED)
@pytest.mark.parametrize("form", ["as written", pytest.param("own rows", marks=pytest.mark.slow)])
def test_wrong_readers_of_a_placed_graph_are_refused(
    form: str, change: Callable[..., None], is_sum: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_form(form, monkeypatch)
    step = compiled()
    prove(step)
    change(step, is_sum)
    with pytest.raises(VerifyError, match="a sparse move omits rows that are read"):
        prove(step)


def test_a_missing_member_of_devices_that_share_rows_is_refused() -> None:
    step = compiled("dp=2,ep=2")
    prove(step)
    owners = made_of(sparse_move(step, False).args[2], row_owners)
    owners.update_arg(4, owners.args[4][::-1])
    with pytest.raises(VerifyError, match="lacks rows that it owns"):
        prove(step)


@pytest.mark.parametrize("op", [SPARSE_GATHER, SPARSE_SCATTER], ids=lambda row: row.name)
def test_wrong_readers_of_a_rank_graph_are_refused(op: Any) -> None:
    step = compiled()
    (role,) = step.program.optimized.roles
    starts = [n for n in role.graph.nodes if n.target in SPARSE]
    mine = next(n for n in starts if n.target is op.op)
    other = next(n.args[1] for n in starts if n.args[1] is not mine.args[1])
    mine.update_arg(1, other)
    move_ahead(mine, other)
    with pytest.raises(VerifyError, match=r"rows are missing that others read|for other rows"):
        prove(step)


def move_ahead(node: fx.Node, needed: fx.Node) -> None:
    """Put what a node needs in front of it."""
    if needed > node:
        node.prepend(needed)
        for operand in needed.all_input_nodes:
            move_ahead(needed, operand)


def test_a_sparse_gather_in_place_of_a_dense_one_is_refused() -> None:
    step = compiled()
    move = sparse_move(step, False)
    move.args = move.args[:2]
    with pytest.raises(VerifyError, match="rows are missing that others read"):
        prove(step)


# what members get


def test_a_sparse_exchange_is_the_dense_one_with_zeros_in_other_rows() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(6, 2, 3, generator=generator) for _ in range(3)]
    of_gathered, of_parts = (torch.rand(3, rows, generator=generator) < 0.4 for rows in (36, 12))
    whole = torch.cat(parts).view(36, 3)
    for got, is_read in zip(TABLE[SPARSE_GATHER.op].exchange(parts, [of_gathered, 3, 1.0]), of_gathered, strict=True):
        assert torch.equal(got, (whole * is_read.unsqueeze(1)).view(18, 2, 3))
    given = [part.view(12, 3) * is_given.unsqueeze(1) for part, is_given in zip(parts, of_parts, strict=True)]
    for i, got in enumerate(TABLE[SPARSE_SCATTER.op].exchange(parts, [of_parts, 3, 1.0])):
        assert torch.equal(got, (given[0] + given[1] + given[2]).view(6, 2, 3)[2 * i : 2 * i + 2])


def test_no_device_has_the_rows_of_all_experts() -> None:
    """In sums over a token's experts, and their gradients, it has those that it owns."""
    placed = compiled().program.placed
    sizes = {n.meta["layout"].local_shape(spec_of(n).shape) for n in placed.graph.nodes if _is_wide(n)}
    assert sizes == {(16, WIDTH), (8, WIDTH), (4, WIDTH)}  # of all tokens, of its share of 32 rows, of its own tokens


def _is_wide(node: fx.Node) -> bool:
    spec = node.meta.get("spec")
    return origin_of(node).module in ("", "experts") and spec is not None and getattr(spec, "shape", ())[1:] == (WIDTH,)
