"""Completeness: what compiles is proven, over all rules, moves and models; what is broken is named by node."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from tests import models
from tests.check.mutants import copied
from tests.expand.test_moves import MESHES, SHAPES, layouts
from tests.place import conformance
from tests.place.test_rules import SAMPLES
from torch import fx, nn

from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.check.completeness import Completeness, check_complete
from meshweave.cost.hardware import AlphaBeta
from meshweave.errors import VerifyError
from meshweave.ir import local_ops, ops
from meshweave.ir.collectives import WAIT, functional, transfer
from meshweave.ir.graph import Input, Origin, Spec, StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.place.expand.expand import expand
from meshweave.place.movement.plan import plan_move
from meshweave.place.plans import Plan
from meshweave.program import Program

aten = torch.ops.aten
F32 = torch.float32


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))


def compiled(model: nn.Module, batch: Any, loss: Any, mesh: str, plan: Plan | None = None) -> Program:
    spec = read_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    options = CaptureOptions(clip_grad_norm=1.0)
    return build_program(StepSource(model, loss), batch, spec, Target(Mesh(mesh), plan, AlphaBeta()), options)


@cache
def program(mesh: str, batch: int = 4) -> Program:
    example = {"input": torch.zeros(batch, 4), "y": torch.zeros(batch, 4)}
    return compiled(mlp(), example, lambda out, b: ((out - b["y"]) ** 2).mean(), mesh)


# what compiles is complete

MLP_MESHES = [
    "",
    "dp=2",
    "fsdp=3",
    "tp=2",
    "dp=2,tp=2",
    "fsdp=3,tp=2",
    "dp=2,fsdp=2,tp=2",
    "pp=2",
    "pp=2,dp=3",
    "pp=2,tp=2",
]


@pytest.mark.parametrize(("mesh", "batch"), [*((mesh, 5) for mesh in MLP_MESHES), ("dp=2,tp=2", 4)])
def test_what_compiles_is_complete(mesh: str, batch: int) -> None:
    made = program(mesh, batch)
    report = check_complete(made.placed, made.roles)
    starts = [n for r in made.roles for n in r.graph.nodes if n.target in collectives_and_transfers()]
    transfers = [n for n in starts if n.target is transfer]
    assert report.num_devices == made.mesh.num_devices
    assert report.num_roles == len(made.roles)
    assert report.num_communications == len(starts) - len(transfers) + len({n.args[1] for n in transfers})
    assert report.num_values == sum("global" in n.meta for r in made.roles for n in r.graph.nodes)


def collectives_and_transfers() -> set[Any]:
    return {getattr(functional, name).default for name in COLLECTIVE_NAMES} | {transfer}


COLLECTIVE_NAMES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")


def test_a_report_of_known_counts() -> None:
    """Two devices, data parallel: the sum of four gradients, the loss, and nothing else to move."""
    made = program("dp=2")
    assert check_complete(made.placed, made.roles) == Completeness(
        num_roles=1, num_devices=2, num_values=70, num_communications=5, num_steps=10, num_twins=0
    )


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("cnn", "fsdp=3,tp=2"),
        *(
            pytest.param(kind, mesh, marks=pytest.mark.slow)
            for kind in ("llama", "gpt2", "bert", "vit", "qwen2", "cnn")
            for mesh in ("dp=2", "tp=2", "fsdp=3,tp=2", "dp=2,fsdp=2,tp=2")
        ),
        *(pytest.param("llama", mesh, marks=pytest.mark.slow) for mesh in ("pp=2", "pp=2,dp=2", "pp=2,fsdp=3,tp=2")),
    ],
)
def test_models_are_complete(kind: str, mesh: str) -> None:
    made = compiled(*models.make(kind), mesh)
    report = check_complete(made.placed, made.roles)
    assert report.num_devices == made.mesh.num_devices
    assert report.num_communications > 5


def test_a_sequence_sharded_model_is_complete() -> None:
    plan = Plan.hf_tp("tp") + Plan.sequence_parallel("tp")
    made = compiled(*models.hugging_face("llama", layers=1), "tp=2", plan)
    assert any(n.target is functional.reduce_scatter_tensor.default for n in made.rank.graph.nodes)
    assert check_complete(made.placed, made.roles).num_devices == 2


def test_the_twins_of_repeated_layers_are_proven_once() -> None:
    reports = []
    batch = {"input": torch.zeros(4, 6), "y": torch.zeros(4, 6)}
    for layers in (4, 8):
        model = nn.Sequential(*(part for _ in range(layers) for part in (nn.Linear(6, 6), nn.Tanh())))
        made = compiled(model, batch, lambda out, b: ((out - b["y"]) ** 2).mean(), "fsdp=3")
        reports.append(check_complete(made.placed, made.roles))
    assert reports[0].num_steps == reports[1].num_steps
    assert reports[0].num_twins < reports[1].num_twins


@pytest.mark.slow_rows("4", "5", "6", "7")
@pytest.mark.parametrize("part", range(8))
def test_every_rule_runs_as_its_local_call_must_be(part: int) -> None:
    """No false alarm over the whole rule table, for even, uneven and empty pieces on one axis and on two."""
    checked = 0
    for i in range(part, len(SAMPLES), 8):
        case = conformance.build_case(SAMPLES[i])
        pairs = list(conformance.two_axes(case))
        few = random.Random(0).sample(pairs, min(1, len(pairs)))
        for option in [*conformance.one_axis(case, 3), *few]:
            conformance._place(case, option)
            roles = expand(case.step, option.results[0].mesh, conformance._no_move)
            assert check_complete(case.step, roles).num_communications == 0
            checked += 1
    assert checked > 150


@pytest.mark.parametrize("mesh", ["2x2", "2x3", "2x2x2"])
def test_every_move_is_followed(mesh: str) -> None:
    chance, held = random.Random(3), list(layouts(MESHES[mesh], units=(1, 2)))
    for _ in range(50):
        shape = chance.choice(SHAPES)
        source, target = (layout.normalized(shape) for layout in chance.sample(held, 2))
        if source != target:
            step, roles = one_move(source, target, shape, MESHES[mesh])
            assert check_complete(step, roles).num_values == 2


WHOLE = Mesh("p=2,q=4")
FIRST, OTHER = Mesh("a=2,b=2", devices=[0, 1, 2, 3]), Mesh("a=2,b=2", devices=[6, 3, 2, 5])


@pytest.mark.parametrize(("before", "after"), [(FIRST, OTHER), (OTHER, FIRST), (WHOLE, FIRST), (OTHER, WHOLE)])
def test_every_move_between_meshes_is_followed(before: Mesh, after: Mesh) -> None:
    """Overlapping meshes and other orders of devices; sums are finished on the mesh that they are of."""
    chance, held, due = random.Random(3), list(layouts(before)), list(layouts(after))
    for _ in range(20):
        source, target = chance.choice(held), chance.choice(due)
        step, roles = one_move(source, target, (8, 12), WHOLE)
        assert check_complete(step, roles).num_devices == 8


def one_move(
    source: Layout, target: Layout, shape: tuple[int, ...], mesh: Mesh
) -> tuple[StepGraph, tuple[RankGraph, ...]]:
    spec, graph = Spec(shape, F32), fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(spec=spec, origin=Origin("forward"), layout=source.normalized(shape))
    y = graph.call_function(ops.move, (x, str(target)))
    y.meta.update(spec=spec, origin=Origin("forward", source="model.py:7"), layout=target.normalized(shape))
    graph.output([y])
    step = StepGraph(graph, (Input("batch", "x", spec),), (("value", "y"),))
    return step, expand(step, mesh, lambda a, b, s, d: plan_move(a, b, s, d))


# what is broken is named


def find(rank: RankGraph, target: Any, number: int = 0) -> fx.Node:
    return [n for n in rank.graph.nodes if n.target is target][number]


def broken(made: Program, change: Callable[[RankGraph], Any], role: int = 0) -> str:
    """What the check says of a program whose role has been changed."""
    roles = [copied(rank) for rank in made.roles]
    change(roles[role])
    roles[role].graph.lint()
    with pytest.raises(VerifyError) as error:
        check_complete(made.placed, roles)
    return str(error.value)


def _drop(rank: RankGraph, start: fx.Node) -> None:
    (wait,) = start.users
    wait.replace_all_uses_with(start.args[0])
    rank.graph.erase_node(wait)
    rank.graph.erase_node(start)


def test_a_sum_that_is_not_finished_before_an_op_that_is_not_linear() -> None:
    text = broken(program("tp=2"), lambda r: _drop(r, find(r, functional.all_reduce.default)))
    assert text.startswith(
        "add_tensor_1 (aten.add.Tensor): operand 0 is partial over tp, and the op is not linear in that operand alone\n"
        "  where: (2) [forward], devices 0, 1\n"
        "  got: [{}, {}] partial(sum: tp), [{}]\n"
        "  expected: every contribution, before the op"
    )


def test_a_gather_that_is_missing() -> None:
    text = broken(program("fsdp=2"), lambda r: _drop(r, find(r, functional.all_gather_into_tensor.default)))
    assert text == (
        "permute_default (aten.permute): device 0 does not have its piece\n"
        "  where: (0) [forward], devices 0, 1\n"
        "  got: [0:4, 0:3] in an array of [4, 3]\n"
        "  expected: [0:4, 0:6], its piece in [{}, {}]"
    )


def test_a_slice_beyond_the_end() -> None:
    step, (rank,) = one_move(*_parsed("[{}, {}]", "[{a}, {}]"), (8, 12), MESHES["2x2"])
    find(rank, aten.narrow.default).update_arg(2, 6)
    with pytest.raises(VerifyError, match=r"cuts beyond the array\n  where: (.|\n)*, device 0\n"):
        check_complete(step, [rank])


def test_padding_that_is_not_cut_off() -> None:
    """5 rows on 3 devices are padded to 2 each: without the table of pieces a row of padding stays."""
    mesh = MESHES["2x3"]
    step, (rank,) = one_move(Layout.parse("[{b}, {}]", mesh), Layout.parse("[{}, {}]", mesh), (5, 7), mesh)
    find(rank, local_ops.join_blocks).update_arg(4, None)
    with pytest.raises(
        VerifyError, match=r"got: \[0:2, 0:7\], \[2:4, 0:7\], \[4:5, 0:7\] in an array of \[6, 7\], 7 of it"
    ):
        check_complete(step, [rank])


def _parsed(source: str, target: str) -> tuple[Layout, Layout]:
    return Layout.parse(source, MESHES["2x2"]), Layout.parse(target, MESHES["2x2"])


def test_a_step_that_is_not_known() -> None:
    """Nothing in a move is taken for harmless."""

    def negated(rank: RankGraph) -> None:
        wait = find(rank, WAIT)
        with rank.graph.inserting_after(wait):
            flipped = rank.graph.call_function(aten.neg.default, (wait,))
        wait.replace_all_uses_with(flipped, delete_user_cb=lambda n: n is not flipped)

    assert "(aten.neg): is neither an op of the placed graph nor a known step of a move" in broken(
        program("tp=2"), negated
    )


def test_another_operand() -> None:
    def other(rank: RankGraph) -> None:
        find(rank, aten.tanh.default).update_arg(0, find(rank, aten.mm.default))

    text = broken(program("dp=2"), other)
    assert "(aten.tanh): takes mm_default, another value" in text
    assert text.endswith("got: mm_default\n  expected: add_tensor")


def test_another_op() -> None:
    def other(rank: RankGraph) -> None:
        find(rank, aten.tanh.default).target = aten.relu.default

    text = broken(program("dp=2"), other)
    assert text.endswith("got: aten.relu\n  expected: aten.tanh for these layouts")


def test_other_numbers_in_a_local_op() -> None:
    def shorter(rank: RankGraph) -> None:
        expand_node = find(rank, aten.expand.default)
        expand_node.update_arg(1, [1, 4])

    text = broken(program("dp=2"), shorter)
    assert text.endswith("got: aten.expand(full_default, [1, 4])\n  expected: aten.expand(operand, [2, 4])")


def test_a_result_that_nobody_uses() -> None:
    def idle(rank: RankGraph) -> None:
        start = find(rank, functional.all_reduce.default)
        with rank.graph.inserting_before(start):
            rank.graph.call_function(WAIT, (rank.graph.node_copy(start),))

    assert "(_c10d_functional.all_reduce): nothing uses the result of a communication" in broken(program("tp=2"), idle)


def test_outputs_that_change_places() -> None:
    def swapped(rank: RankGraph) -> None:
        (out,) = [n for n in rank.graph.nodes if n.op == "output"]
        values = list(out.args[0])
        values[-1], values[-2] = values[-2], values[-1]
        out.args = (values,)

    assert "another value" in broken(program("dp=2"), swapped)


def test_an_output_in_another_layout_than_it_is_said_to_have() -> None:
    made = program("fsdp=2")
    rank = copied(made.rank)
    last = rank.output_layouts[-1]
    rank.output_layouts = (*rank.output_layouts[:-1], Layout.replicated(last.mesh, len(last.dims)))
    with pytest.raises(
        VerifyError,
        match=r"output param 2.bias is in another layout\n  where: \(2.bias\) \[update\], devices 0, 1\n  got",
    ):
        check_complete(made.placed, [rank])


def test_devices_that_no_role_has() -> None:
    made = program("dp=2")
    with pytest.raises(VerifyError, match=r"the roles do not cover the devices(.|\n)*got: \[0\]\n  expected: \[0, 1\]"):
        check_complete(made.placed, [replace(made.rank, devices=(0,))])


# several roles


def test_a_transfer_to_other_places() -> None:
    """The messages are looked at, and what they bring: not the names of the layouts."""
    step, roles = one_move(Layout.parse("[{a}, {}]", FIRST), Layout.parse("[{a}, {}]", OTHER), (8, 12), WHOLE)
    (key,) = {key for rank in roles for key in rank.transfers}
    for rank in roles:
        if key in rank.transfers:
            swapped = replace(rank.transfers[key], target=Layout.parse("[{b}, {}]", OTHER))
            rank.transfers[key] = swapped
    with pytest.raises(VerifyError, match=r"does not have its piece\n(.|\n)*expected: .*its piece in \[\{a\}, \{\}\]"):
        check_complete(step, roles)


def test_a_role_that_leaves_a_transfer_out() -> None:
    text = broken(program("pp=2"), lambda r: _drop(r, find(r, transfer)), 0)
    assert text.startswith("roles disagree about their next communication")
    assert "device 0 at transfer_1 (transfer t1); device 1 at transfer (transfer t0)" in text


def test_a_role_that_sends_another_value() -> None:
    def other(rank: RankGraph) -> None:
        find(rank, transfer).update_arg(0, find(rank, aten.mm.default))

    text = broken(program("pp=2"), other, 0)
    assert text == (
        "wait_tensor_default (_c10d_functional.wait_tensor): is a form of another value\n"
        "  where: (1) [forward], device 1\n"
        "  got: mm_default\n"
        "  expected: tanh_default"
    )


def test_roles_that_send_at_different_times() -> None:
    def later(rank: RankGraph) -> None:
        first, second = find(rank, transfer, 3), find(rank, transfer, 4)
        assert (first.args[1], second.args[1]) == ("t3", "t4")
        second.append(first)

    made = program("pp=2,tp=2")
    assert broken(made, later, 1).startswith("roles disagree about their next communication")


# symbols


@pytest.mark.parametrize(
    ("symbol", "position", "value"),
    [
        ("piece_size", 0, 6),
        ("piece_size_1", 0, 9),
        ("member_pieces", 0, 9),
        ("axis_index", 0, ("fsdp",)),
        ("linear", 0, 1),
    ],
)
def test_a_symbol_of_other_pieces(symbol: str, position: int, value: Any) -> None:
    """5 rows on 3 devices: every number that depends on the device is one that something is checked against."""

    def other(rank: RankGraph) -> None:
        node = next(n for n in rank.graph.nodes if n.name == symbol)
        assert node.target in SYMBOLS
        node.update_arg(position, value)

    assert "\n  where: " in broken(program("fsdp=3,tp=2", 5), other)


def test_roles_that_number_their_meshes_differently() -> None:
    made = program("pp=2")
    first, second = made.roles
    swapped = replace(second, meshes=(second.meshes[0], second.meshes[2], second.meshes[1]))
    with pytest.raises(VerifyError, match="roles number the meshes of the program differently"):
        check_complete(made.placed, [first, swapped])
