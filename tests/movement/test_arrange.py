"""arrange: moves go past casts, views and sums where less moves, are shared, and mean what they meant."""

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from tests.layouts import all_layouts
from torch import fx, nn

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.cli.sources import load_source
from meshweave.cost.hardware import AlphaBeta
from meshweave.ir import ops
from meshweave.ir.graph import Input, Origin, Spec, StepGraph, op_name, origin_of, spec_of
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.verify import verify_placed
from meshweave.ops.registry import row_for
from meshweave.place.assign import candidates
from meshweave.place.movement.arrange import arrange
from meshweave.place.movement.plan import MovePlan, plan_move

aten = torch.ops.aten
MESH = Mesh("a=2,b=4")
PROFILE = AlphaBeta(bandwidth={"a": 50e9, "b": 400e9, "c": 400e9})
SHAPE = (4096, 4096)


def plan(source: Layout, target: Layout, shape: tuple[int, ...], dtype: torch.dtype) -> MovePlan:
    return plan_move(source, target, shape, dtype, PROFILE)


class Placed:
    """A placed graph, written op by op."""

    def __init__(self) -> None:
        self.graph, self.inputs = fx.Graph(), list[Input]()

    def input(self, layout: str, dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> fx.Node:
        node, spec = self.graph.placeholder(f"x{len(self.inputs)}"), Spec(shape, dtype)
        node.meta.update(spec=spec, layout=Layout.parse(layout, MESH), origin=Origin("forward"))
        self.inputs.append(Input("batch", node.name, spec))
        return node

    def move(self, x: fx.Node, layout: str | Layout, phase: str = "forward") -> fx.Node:
        target = Layout.parse(layout, MESH) if isinstance(layout, str) else layout
        node = self.graph.call_function(ops.move, (x, str(target)))
        node.meta.update(spec=spec_of(x), layout=target, origin=Origin(phase))
        return node

    def op(self, target: torch._ops.OpOverload, spec: Spec, *operands: fx.Node, **kwargs: object) -> fx.Node:
        """The op on operands in the layouts that they have."""
        node = self.graph.call_function(target, operands, kwargs)  # type: ignore[arg-type]
        node.meta.update(spec=spec, origin=Origin("forward"))
        layouts = [x.meta["layout"] for x in operands]
        found = candidates(
            row_for(node).rule(node), MESH, [[one] for one in layouts], [*map(spec_of, operands)], [spec]
        )
        option = next(one for one in found if one.operands == tuple(layouts))
        node.meta.update(layout=option.results[0], assignment=option)
        return node

    def cast(self, x: fx.Node, dtype: torch.dtype) -> fx.Node:
        return self.op(aten._to_copy.default, Spec(spec_of(x).shape, dtype), x, dtype=dtype)

    def done(self, *outputs: fx.Node) -> StepGraph:
        self.graph.output(list(outputs))
        names = tuple(("grad", str(i)) for i in range(len(outputs)))
        return verify_placed(StepGraph(self.graph, tuple(self.inputs), names))


def arranged(step: StepGraph, *, reduce_after_cast: bool = False) -> list[str]:
    """The ops after `arrange`, with the dtypes in which values move; each output is what and where it was."""
    before = [(spec_of(n), n.meta["layout"]) for n in step.output_values]
    cost = price(step)
    verify_placed(arrange(step, plan, reduce_after_cast=reduce_after_cast))
    assert [(spec_of(n), n.meta["layout"]) for n in step.output_values] == before
    assert price(step) <= cost
    return [_text(node) for node in step.graph.nodes if node.op == "call_function"]


def _text(node: fx.Node) -> str:
    dtype = str(spec_of(node).dtype).removeprefix("torch.")
    return f"move {dtype}" if node.target is ops.move else op_name(node.target).removeprefix("aten.")


def price(step: StepGraph) -> float:
    moves = [node for node in step.graph.nodes if node.target is ops.move]
    return sum(
        plan(m.args[0].meta["layout"], m.meta["layout"], spec_of(m).shape, spec_of(m).dtype).seconds for m in moves
    )


def test_a_gather_goes_before_a_cast_up() -> None:
    g = Placed()
    wide = g.cast(g.input("[{b}, {}]", torch.bfloat16), torch.float32)
    assert arranged(g.done(g.move(wide, "[{}, {}]"))) == ["move bfloat16", "_to_copy"]


def test_a_gather_goes_after_a_cast_down() -> None:
    g = Placed()
    moved = g.move(g.input("[{b}, {}]"), "[{}, {}]")
    assert arranged(g.done(g.cast(moved, torch.bfloat16))) == ["_to_copy", "move bfloat16"]


def test_a_gather_stays_where_the_wide_value_is_used_too() -> None:
    g = Placed()
    moved = g.move(g.input("[{b}, {}]"), "[{}, {}]")
    narrow = g.cast(moved, torch.bfloat16)
    assert arranged(g.done(narrow, moved)) == ["move float32", "_to_copy"]


@pytest.mark.parametrize(
    ("op", "asked", "expected"),
    [
        ("sum", False, ["move float32", "_to_copy"]),
        ("sum", True, ["meshweave.round_parts", "move bfloat16"]),
        ("max", False, ["_to_copy", "move bfloat16"]),
    ],
)
def test_a_reduction_goes_after_a_cast_down_only_where_its_bits_stay_or_it_is_asked_for(
    op: str, asked: bool, expected: list[str]
) -> None:
    g = Placed()
    moved = g.move(g.input(f"[{{}}, {{}}] partial({op}: b)"), "[{}, {}]")
    assert arranged(g.done(g.cast(moved, torch.bfloat16)), reduce_after_cast=asked) == expected


def test_a_sum_in_the_wider_dtype_is_not_taken_in_the_smaller_one() -> None:
    g = Placed()
    wide = g.cast(g.input("[{}, {}] partial(sum: b)", torch.bfloat16), torch.float32)
    assert arranged(g.done(g.move(wide, "[{}, {}]"))) == ["_to_copy", "move float32"]


def test_an_integer_is_gathered_before_it_becomes_a_number() -> None:
    """Casts that are not between floats stay where they are."""
    g = Placed()
    wide = g.cast(g.input("[{b}, {}]", torch.int8), torch.int64)
    assert arranged(g.done(g.move(wide, "[{}, {}]"))) == ["_to_copy", "move int64"]


def test_a_gather_goes_before_an_expansion() -> None:
    g = Placed()
    row = g.input("[{b}, {}]", shape=(4096, 1))
    node = g.graph.call_function(aten.expand.default, (row, [4096, 4096]))
    spec, layout = Spec(SHAPE, torch.float32), Layout.parse("[{b}, {}]", MESH)
    node.meta.update(spec=spec, origin=Origin("forward"))
    found = candidates(row_for(node).rule(node), MESH, [[layout]], [spec_of(row)], [spec])
    option = next(one for one in found if one.operands == (layout,) and one.results == (layout,))
    node.meta.update(layout=layout, assignment=option)
    step = g.done(g.move(node, "[{}, {}]"))
    assert arranged(step) == ["move float32", "expand"]
    assert spec_of(next(n for n in step.graph.nodes if n.target is ops.move)).shape == (4096, 1)


def test_gradients_that_are_added_are_reduced_once() -> None:
    """As under autocast: three sums in bfloat16, each cast up and added."""
    g = Placed()
    parts = [g.input("[{a}, {}] partial(sum: b)", torch.bfloat16) for _ in range(3)]
    wide = [g.cast(g.move(x, "[{a}, {}]"), torch.float32) for x in parts]
    spec = Spec(SHAPE, torch.float32)
    total = g.op(aten.add.Tensor, spec, g.op(aten.add.Tensor, spec, wide[0], wide[1]), wide[2])
    assert arranged(g.done(total)) == ["_to_copy"] * 2 + ["add.Tensor", "_to_copy", "add.Tensor", "move float32"]


def test_what_others_use_reduced_is_reduced() -> None:
    g = Placed()
    x, y = (g.input("[{}, {}] partial(sum: b)") for _ in range(2))
    first, second = g.move(x, "[{}, {}]"), g.move(y, "[{}, {}]")
    total = g.op(aten.add.Tensor, Spec(SHAPE, torch.float32), first, second)
    assert arranged(g.done(total, first)) == ["move float32", "move float32", "add.Tensor"]


def test_ops_that_are_not_linear_keep_their_operands_whole() -> None:
    g = Placed()
    x, y = (g.move(g.input("[{}, {}] partial(sum: b)"), "[{}, {}]") for _ in range(2))
    assert arranged(g.done(g.op(aten.maximum.default, Spec(SHAPE, torch.float32), x, y)))[-1] == "maximum"


def elements(node: fx.Node, shape: tuple[int, ...]) -> int:
    return torch.Size(node.meta["layout"].local_shape(shape)).numel()


def copies(source: Layout, targets: Sequence[tuple[Layout, str]], shape: tuple[int, ...]) -> StepGraph:
    """A value and its copies, each made from the cheapest that there is, as placement does."""
    g = Placed()
    x = g.input("[{}, {}]", shape=shape)
    x.meta["layout"] = source
    made = [x]
    for target, phase in targets:
        dtype = torch.float32
        usable = [c for c in made if c is x or origin_of(c).phase == phase or elements(c, shape) <= elements(x, shape)]
        nearest = min(usable, key=lambda c: plan(c.meta["layout"], target, shape, dtype).seconds)
        made.append(g.move(nearest, target, phase))
    return g.done(*made[1:])


def test_two_copies_share_what_their_plans_have_in_common() -> None:
    """Both need the sum over b, scattered: it is taken once."""
    first, second, third = (
        Layout.parse(text, MESH) for text in ("[{}, {a}] partial(sum: b)", "[{b,a}, {}]", "[{b}, {}]")
    )
    step = copies(first, [(second, "forward"), (third, "forward")], SHAPE)
    cost = price(step)
    arranged(step)
    both = sum(plan(first, target, SHAPE, torch.float32).seconds for target in (second, third))
    assert price(step) < 0.8 * both
    assert price(step) <= cost


@pytest.mark.parametrize("seed", range(20))
def test_random_copies_cost_no_more_and_are_what_they_were(seed: int) -> None:
    chance = random.Random(seed)
    layouts = all_layouts(MESH, 2)
    source = chance.choice(layouts)
    reachable = [one for one in layouts if set(one.partial) <= set(source.partial) and one != source]
    if not reachable:
        pytest.skip("nowhere to go")
    chosen = chance.sample(reachable, min(3, len(reachable)))
    phases = sorted((chance.choice(["forward", "backward"]) for _ in chosen), reverse=True)
    step = copies(source, list(zip(chosen, phases, strict=True)), SHAPE)
    arranged(step)
    order = {node: i for i, node in enumerate(step.graph.nodes)}
    for node in (n for n in step.graph.nodes if n.target is ops.move):
        parent = node.args[0]
        assert order[parent] < order[node]
        late = origin_of(parent).phase == "forward" and origin_of(node).phase == "backward"
        if late and parent.op != "placeholder":  # a copy that lasts is no larger than the value
            assert elements(parent, SHAPE) <= elements(step.placeholders[0], SHAPE)


@pytest.mark.parametrize("mesh", ["a=2", "a=3"])
def test_a_copy_as_small_as_the_piece_is_kept_for_backward(mesh: str) -> None:
    """A weight of one element is no larger whole than in pieces: gathered once, and nothing moves that is there."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), torch.randn(1, 1)
    loss = lambda out, batch: out.square().sum()  # noqa: E731
    step = mw.compile(
        model,
        loss=loss,
        example=(x,),
        mesh=mesh,
        plan=mw.Plan.fsdp("a"),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    gathered = [row for row in step.explain() if row.name == "_1_weight"]
    assert [row.phase for row in gathered if row.phase != "update"] == ["forward"]
    expected = loss(model(x), None).item()
    assert step((x,)) == pytest.approx(expected)


class Heads(nn.Module):
    """Three projections of one input: their gradients meet."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.layer_norm(self.first(x).float(), (16,))
        return sum(part(x).relu() for part in self.parts)  # type: ignore[return-value]


def test_under_autocast_the_gradients_of_three_projections_are_reduced_once() -> None:
    torch.manual_seed(0)
    model, x = Heads(), torch.randn(4, 16)
    step = mw.compile(
        model,
        loss=lambda out, batch: out.float().square().mean(),
        example=(x,),
        mesh="tp=2",
        plan=mw.Plan({"parts.*.weight": "[{tp}, {}]"}),
        precision=torch.bfloat16,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )
    reduced = [
        row for row in step.explain() if row.phase == "backward" and "[4, 16]" in row.value.replace("4,16", "4, 16")
    ]
    assert len([row for row in reduced if "partial" in row.source]) == 1
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x).float().square().mean().item()
    assert step((x,)) == pytest.approx(expected, rel=2e-2)


class Rounded(nn.Module):
    """A matmul in float32 whose result is wanted in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)).bfloat16().relu()


@pytest.mark.parametrize(("asked", "dtype"), [(False, "float32"), (True, "bfloat16")])
def test_a_compiled_step_reduces_after_a_cast_only_if_asked(asked: bool, dtype: str) -> None:
    torch.manual_seed(0)
    model, x = Rounded(), torch.randn(4, 16)
    loss = lambda out, batch: out.float().square().mean()  # noqa: E731
    step = mw.compile(
        model,
        loss=loss,
        example=(x,),
        mesh="tp=2",
        plan=mw.Plan({"first.weight": "[{tp}, {}]", "second.weight": "[{}, {tp}]"}),
        precision=mw.Precision(reduce_after_cast=asked),
    )
    check_complete(step.program.placed, step.program.roles)
    (reduced,) = [row for row in step.explain() if row.phase == "forward" and "partial" in row.source]
    assert reduced.value.startswith(dtype)
    assert step((x,)) == pytest.approx(loss(model(x), None).item(), rel=1e-2 if asked else 1e-6)


def test_an_operand_is_gathered_once_for_all_matmuls() -> None:
    """Each matmul has its own view of its operand, which with a single row can be cut as the operand is: the operand
    itself is gathered for all of them, once in forward (2 in a layer) and once in backward, and so are gradients."""
    source = load_source("hf:llama?num_hidden_layers=3", batch=1, seq=64)
    plan = mw.Plan.hf_tp("tp") + mw.Plan.sequence_parallel("tp")
    step = mw.compile(source.model, loss=source.loss, example=source.batch, mesh="tp=2", plan=plan, profile="h100")
    rows = [row for row in step.explain() if "layers.1." in row.module and row.kind == "all_gather"]
    of_matmuls = [row for row in rows if row.why.endswith(("aten.view", "aten.mm", "aten.t"))]
    assert Counter(row.phase for row in of_matmuls) == {"forward": 2, "backward": 4}
    expected = source.loss(source.model(**source.batch), source.batch).item()
    assert step(source.batch) == pytest.approx(expected, rel=1e-6)
