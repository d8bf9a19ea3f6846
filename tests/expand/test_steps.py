"""Every kind of step over one, two and three axes, in every order, on even, uneven and empty pieces: proven and run."""

from __future__ import annotations

import random
from functools import partial
from itertools import cycle, permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.check.mutants import split
from tests.expand.test_moves import check_pieces, full_value, run_rank
from tests.steps import DTYPES, KINDS, MESHES, SHAPES, UNEVEN, Chain, check, every, following, program

from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.errors import VerifyError
from meshweave.ir import local_ops
from meshweave.ir.collectives import reduce_in_order
from meshweave.ir.graph import op_name
from meshweave.ir.layout import Layout
from meshweave.ir.rank import SYMBOLS
from meshweave.place.movement.steps import Step

OPS = {torch.float32: ["sum", "max"], torch.int64: ["sum", "min", "max"], torch.bool: ["max", "min"]}
MANY = 200  # of so many steps of one kind and shape each dtype takes a third


@pytest.mark.slow_rows(
    "all_gather-2x2x2-torch.bool-a fifth",
    "all_gather-2x2x2-torch.int64-a fifth",
    "all_reduce-2x2x2-torch.bool-a fifth",
    "all_reduce-2x2x2-torch.int64-a fifth",
    "all_to_all-2x2x2-torch.bool-a fifth",
    "all_to_all-2x2x2-torch.int64-a fifth",
    "permute-2x2x2-torch.bool-a fifth",
    "permute-2x2x2-torch.int64-a fifth",
    "reduce_scatter-2x2x2-torch.bool-a fifth",
    "reduce_scatter-2x2x2-torch.int64-a fifth",
    "slice-2x2x2-torch.bool-a fifth",
    "slice-2x2x2-torch.int64-a fifth",
    "to_partial-2x2x2-torch.bool-a fifth",
    "to_partial-2x2x2-torch.int64-a fifth",
)
@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.slow)], ids=["a fifth", "all"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_step(kind: str, mesh: str, dtype: torch.dtype, share: int) -> None:
    chance, ops = random.Random(f"{kind} {mesh} {dtype}"), cycle(OPS[dtype])
    for shape in SHAPES:
        chains = list(every(kind, MESHES[mesh], shape, next(ops), chance))
        begin, stride = (DTYPES.index(dtype), 3) if len(chains) > MANY else (0, 1)
        for number, chain in enumerate(chains[begin :: stride * share]):
            check(chain, dtype, number)


@st.composite
def chains(draw: st.DrawFn) -> tuple[Chain, torch.dtype]:
    mesh, dtype = MESHES[draw(st.sampled_from(list(MESHES)))], draw(st.sampled_from(DTYPES))
    shape = tuple(draw(st.sampled_from([0, 1, 2, 3, 5, 8, 12])) for _ in range(draw(st.integers(2, 3))))
    op = draw(st.sampled_from(OPS[dtype]))
    pick = lambda those: draw(st.sampled_from(list(those)))  # noqa: E731
    chain = Chain(Layout.replicated(mesh, len(shape)), shape)
    for _ in range(draw(st.integers(0, 3))):
        chain = Chain(chain.then(following(chain, op, pick)).target, shape)
    for _ in range(draw(st.integers(1, 5))):
        chain = chain.then(following(chain, op, pick))
    return chain, dtype


@given(chains(), st.integers(0, 99))
def test_chains_of_steps(made: tuple[Chain, torch.dtype], seed: int) -> None:
    check(*made, seed)


@pytest.mark.slow
@given(chains(), st.integers(0, 99))
@settings(max_examples=5000, deadline=None)
def test_more_chains_of_steps(made: tuple[Chain, torch.dtype], seed: int) -> None:
    check(*made, seed)


@given(chains(), st.integers(0, 99))
def test_groups_may_be_of_several_roles(made: tuple[Chain, torch.dtype], seed: int) -> None:
    """The devices of a group need not run one rank graph: what they hold together is proven all the same."""
    placed, roles = program(*made)
    halves = split(roles, random.Random(seed))
    assert check_complete(placed, halves).num_roles == 2
    assert check_deadlock(halves).num_roles == 2


# bits


def _random_parts(source: Layout, shape: tuple[int, ...]) -> list[torch.Tensor]:
    """Per device of the mesh a whole tensor of random floats, in row-major order."""
    made = torch.Generator().manual_seed(5)
    wide = 10.0 ** torch.randint(-3, 4, (source.mesh.num_devices, *shape), generator=made)
    return list(torch.randn((source.mesh.num_devices, *shape), generator=made) * wide)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("axes", [("a", "b"), ("a", "c"), ("a", "b", "c"), ("c",)], ids=",".join)
def test_sums_are_taken_in_the_order_of_the_mesh(axes: tuple[str, ...], shape: tuple[int, ...]) -> None:
    """Random floats: the same bits on every device of a group, whatever the order of the axes and the kind of step."""
    mesh = MESHES["2x2x2"]
    source = Layout(mesh, Layout.replicated(mesh, 3).dims, tuple((axis, "sum") for axis in axes))
    parts = _random_parts(source, shape)
    sums = {}
    for group in mesh.groups(axes):
        total = reduce_in_order([parts[mesh.index(device)] for device in group], "sum")
        sums.update(dict.fromkeys(group, total))
    for order in permutations(axes):
        for dim in range(-1, 3):
            step = Step("all_reduce" if dim < 0 else "reduce_scatter", order, source, source, dim=dim, op="sum")
            chain = Chain(source, shape).then(step)
            _, (rank,) = program(chain, torch.float32)
            for device, piece in zip(mesh.devices, run_rank(rank, parts), strict=True):
                expected = sums[device][chain.target.box_of(shape, device).slices()]
                assert torch.equal(piece, expected), f"{chain} on device {device}"


def test_an_average_may_be_moved_before_it_is_scaled() -> None:
    mesh, shape = MESHES["2x2x2"], UNEVEN
    source = Layout.parse("[{}, {c}, {}] partial(avg: a,b)", mesh)
    moved = Layout.parse("[{}, {b}, {c}] partial(avg: a)", mesh)
    steps = [
        Step("reduce_scatter", ("b",), source, source, dim=0, op="sum"),
        Step("permute", ("b", "c"), source, moved),
        Step("all_reduce", ("a",), source, source, op="sum"),
        Step("scale", ("a", "b"), source, source, factor=0.25),
    ]
    chain = Chain(source, shape)
    for step in steps:
        chain = chain.then(step)
    placed, (rank,) = program(chain, torch.float32)
    check_complete(placed, [rank])
    full = full_value(shape, torch.float32, 2)
    weights = {(0, 0): 4.0, (0, 1): -8.0, (1, 0): 2.0, (1, 1): 6.0}
    held = [
        full[source.box_of(shape, device).slices()] * weights[coords["a"], coords["b"]]
        for device, coords in ((d, mesh.coordinates(mesh.index(d))) for d in mesh.devices)
    ]
    check_pieces(run_rank(rank, held), full, chain.target)


def test_an_average_may_be_scaled_before_it_is_taken() -> None:
    """Each part divided by their number: a sum is left to take."""
    mesh, shape = MESHES["2x2"], UNEVEN
    source, target = (Layout.parse(f"[{{a}}, {{}}, {{}}] partial({op}: b)", mesh) for op in ("avg", "sum"))
    placed, (rank,) = program(
        Chain(source, shape).then(Step("scale", ("b",), source, target, factor=0.5)), torch.float32
    )
    check_complete(placed, [rank])
    find = next(n for n in rank.graph.nodes if n.op == "call_function")
    find.update_arg(1, 0.25)
    with pytest.raises(VerifyError, match=r"scaled wrongly\n(.|\n)*got: 0.5 times the value\n  expected: the value"):
        check_complete(placed, [rank])


# what is written


def _lines(source: str, shape: tuple[int, ...], step: Any, mesh: str = "2x3") -> list[str]:
    """The calls of one step, without symbols: op and what is no tensor."""
    start = Layout.parse(source, MESHES[mesh])
    _, (rank,) = program(Chain(start, shape).then(step(start, start)), torch.float32)
    return [
        f"{op_name(n.target)}{n.args[1:]}"
        for n in rank.graph.nodes
        if n.op == "call_function" and n.target not in SYMBOLS
    ]


def test_groups_are_named_in_the_order_of_the_mesh() -> None:
    """Axes that cut a dim in another order are turned, by two small tuples whatever the size of the group."""
    gather = partial(Step, "all_gather", ("b", "a"), dim=0)
    assert _lines("[{b,a}, {}]", (12, 6), gather) == [
        "aten.contiguous()",
        "_c10d_functional.all_gather_into_tensor(6, 'a,b')",
        "_c10d_functional.wait_tensor()",
        "join_blocks((3, 2), (1, 0), 0, None)",
    ]
    assert _lines("[{a,b}, {}]", (12, 6), partial(Step, "all_gather", ("a", "b"), dim=0))[3:] == []
    assert _lines(
        "[{}, {}] partial(sum: a,b)", (12, 6), partial(Step, "reduce_scatter", ("b", "a"), dim=0, op="sum")
    ) == [
        "deal_blocks((3, 2), (1, 0), 0, None, 2)",
        "aten.contiguous()",
        "_c10d_functional.reduce_scatter_tensor('sum', 6, 'a,b')",
        "_c10d_functional.wait_tensor()",
    ]


def test_a_permute_is_one_start_and_one_wait() -> None:
    start, goal = (Layout.parse(text, MESHES["2x3"]) for text in ("[{a,b}, {}]", "[{b,a}, {}]"))
    _, (rank,) = program(Chain(start, (12, 6)).then(Step("permute", ("b", "a"), start, goal)), torch.float32)
    calls = [n for n in rank.graph.nodes if n.op == "call_function"]
    assert [op_name(n.target) for n in calls] == ["transfer", "_c10d_functional.wait_tensor"]
    assert rank.transfers["t0"].axes == ("a", "b")
    remote = [m for m in rank.transfers["t0"].routes.messages if m.sender != m.receiver]
    assert len(remote) == 4  # the first and the last of six devices keep what they have
    assert {m.box.size for m in remote} == {(2, 6)}


def test_what_stops_to_cut_a_dim_is_padded_with_the_identity() -> None:
    step = partial(Step, "to_partial", ("b",), dim=0, op="max")
    assert _lines("[{b}, {}]", (12, 6), step) == ["embed_part(0, piece_offset, 12, 'max', 'b')"]
    assert _lines("[{a,b}, {}]", (7, 6), step) == ["embed_part(0, linear, piece_size, 'max', 'b')"]
    x = torch.arange(2)
    for op, dtype, filler in (
        ("sum", torch.float32, 0.0),
        ("max", torch.float32, float("-inf")),
        ("min", torch.int64, torch.iinfo(torch.int64).max),
        ("max", torch.uint8, 0),
        ("max", torch.bool, False),
        ("min", torch.bool, True),
    ):
        made = local_ops.embed_part(x.to(dtype), 0, 1, 4, op, "b")
        assert made.tolist() == [filler, *x.to(dtype).tolist(), filler]


def test_a_permute_in_which_nothing_crosses_is_cut_out() -> None:
    mesh = MESHES["2x2"]
    start, goal = Layout.parse("[{}, {}]", mesh), Layout.parse("[{b}, {a}]", mesh)
    chain = Chain(start, (5, 7)).then(Step("permute", ("a", "b"), start, goal))
    _, (rank,) = program(chain, torch.float32)
    assert rank.transfers == {}
    check(chain, torch.float32)


def test_a_move_may_hold_several_permutes() -> None:
    mesh = MESHES["2x2x2"]
    start, then, goal = (Layout.parse(t, mesh) for t in ("[{a,b}, {c}]", "[{b,a}, {c}]", "[{b,c}, {a}]"))
    chain = Chain(start, (5, 7)).then(Step("permute", ("a", "b"), start, then))
    chain = chain.then(Step("permute", ("a", "c"), then, goal))
    _, (rank,) = program(chain, torch.float32)
    assert [made.axes for made in rank.transfers.values()] == [("a", "b"), ("a", "c")]
    check(chain, torch.float32)
