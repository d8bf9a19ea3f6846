"""replay: it passes what the planner makes, and fails whatever is changed in it."""

import importlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.effort import calls_of

import meshweave as mw
from meshweave.errors import VerifyError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box
from meshweave.ir.routes import Message, Routes, routes
from meshweave.place.movement.plan import MovePlan, plan_move
from meshweave.place.movement.replay import replay
from meshweave.place.movement.steps import Step, apply

MESH = Mesh("a=2,b=2,c=2")
SHAPE = (9, 6)
MOVES = [
    ("[{a,b}, {}]", "[{b,a}, {}]"),
    ("[{a}, {b}] partial(sum: c)", "[{b}, {}]"),
    ("[{}, {}] partial(sum: a,b)", "[{b,c}, {}]"),
    ("[{}, {c}] partial(avg: a; sum: b)", "[{c}, {a}] partial(max: b)"),
    ("[{a}x4, {}] partial(avg: b)", "[{c}, {a}x2] partial(avg: b)"),
    ("[{a,b,c}, {}]", "[{a}, {b,c}]"),
]


def planned(source: str, target: str, shape: tuple[int, ...] = SHAPE) -> MovePlan:
    return plan_move(Layout.parse(source, MESH), Layout.parse(target, MESH), shape, torch.float32)


def by_hand(source: str, target: str, *steps: Step) -> MovePlan:
    """A plan of the given steps, which state the layouts that they really have."""
    made, layout, chained = planned(source, target), Layout.parse(source, MESH), []
    for step in steps:
        chained.append(replace(step, source=layout, target=apply(layout, step).normalized(SHAPE)))
        layout = chained[-1].target
    return replace(made, steps=tuple(chained))


ANY = Layout.replicated(MESH, 2)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_no_step_can_be_dropped_repeated_or_swapped(source: str, target: str) -> None:
    made = planned(source, target)
    replay(made, SHAPE)
    steps = made.steps
    assert steps
    wrong = [
        *(steps[:i] + steps[i + 1 :] for i in range(len(steps))),
        *((*steps[:i], steps[i], *steps[i:]) for i in range(len(steps))),
        *((*steps[:i], steps[i + 1], steps[i], *steps[i + 2 :]) for i in range(len(steps) - 1)),
    ]
    for mutant in wrong:
        with pytest.raises(VerifyError):
            replay(replace(made, steps=mutant), SHAPE)


@pytest.mark.parametrize(("source", "target"), MOVES)
def test_no_field_of_a_step_can_change(source: str, target: str) -> None:
    made = planned(source, target)
    for i, step in enumerate(made.steps):
        changes = [
            {"axes": ("a",) if step.axes[0] == "c" else ("c", *step.axes[1:])} if step.kind != "scale" else {},
            {"dim": 1 - step.dim} if step.dim >= 0 else {},
            {"to_dim": step.dim} if step.to_dim is not None else {},
            {"op": "min"} if step.op else {},
            {"factor": 0.25} if step.kind == "scale" else {},
            {"source": ANY if step.source != ANY else Layout.parse("[{a}, {}]", MESH)},
        ]
        for change in filter(None, changes):
            mutant = replace(step, **change)
            with pytest.raises(VerifyError):
                replay(replace(made, steps=(*made.steps[:i], mutant, *made.steps[i + 1 :])), SHAPE)


def test_a_wrong_unit_shows() -> None:
    step = Step("slice", ("a",), ANY, ANY, 0, unit=2)
    with pytest.raises(VerifyError, match="do not lead to the target: device 0 does not have its piece"):
        replay(by_hand("[{}, {}]", "[{a}x4, {}]", step), SHAPE)
    replay(by_hand("[{}, {}]", "[{a}x4, {}]", replace(step, unit=4)), SHAPE)


def test_a_contribution_that_counts_twice_shows() -> None:
    (step,) = planned("[{}, {}] partial(sum: a)", "[{}, {}]").steps
    made = planned("[{}, {}]", "[{}, {}]")
    with pytest.raises(
        VerifyError, match=r"contributions are counted 2 times\n  where: step 1: all_reduce\(sum\) over a"
    ):
        replay(replace(made, steps=(step,)), SHAPE)
    partial = Layout.parse("[{}, {}] partial(sum: a)", MESH)
    with pytest.raises(VerifyError, match="a whole value is used as a part of a sum"):
        replay(replace(made, target=partial), SHAPE)


def test_devices_that_reduce_must_hold_the_same_elements() -> None:
    cut = Step("slice", ("b",), ANY, ANY, 0)
    (step,) = planned("[{}, {}] partial(sum: a)", "[{}, {}]").steps
    made = planned("[{}, {}] partial(sum: a,b)", "[{}, {}]", (8, 6))
    with pytest.raises(VerifyError, match="adds up different elements"):
        replay(replace(made, steps=(cut, replace(step, axes=("b",)))), (8, 6))


def test_a_reduction_after_a_gather_is_not_order_sound() -> None:
    gather = Step("all_gather", ("a",), ANY, ANY, 0)
    reduce = Step("all_reduce", ("b",), ANY, ANY, op="sum")
    with pytest.raises(VerifyError, match=r"replicas would add in different orders(.|\n)*got: a replicated before it"):
        replay(by_hand("[{a}, {}] partial(sum: b)", "[{}, {}]", gather, reduce), SHAPE)
    replay(by_hand("[{a}, {}] partial(sum: b)", "[{}, {}]", reduce, gather), SHAPE)


def test_an_all_reduce_may_come_before_another_once_what_it_replicates_is_cut() -> None:
    """Then no device of a group has a twin in another that adds up the same."""
    steps = [
        Step("all_reduce", ("a",), ANY, ANY, op="sum"),
        Step("slice", ("a",), ANY, ANY, 0),
        Step("all_reduce", ("b",), ANY, ANY, op="sum"),
    ]
    replay(by_hand("[{}, {}] partial(sum: a,b)", "[{a}, {}]", *steps), SHAPE)
    with pytest.raises(VerifyError, match="a reduction runs where replicas would add in different orders"):
        replay(by_hand("[{}, {}] partial(sum: a,b)", "[{}, {}]", steps[0], steps[2]), SHAPE)


def test_a_value_that_is_not_partial_may_not_be_summed() -> None:
    steps = [Step("to_partial", ("a",), ANY, ANY, 0, op="sum"), Step("all_reduce", ("a",), ANY, ANY, op="sum")]
    with pytest.raises(VerifyError, match="a value that is not partial is summed"):
        replay(by_hand("[{a}, {}]", "[{}, {}]", *steps), SHAPE)


def test_apply_does_not_read_the_layouts_of_the_step() -> None:
    step = Step("all_to_all", ("a",), ANY, ANY, 0, 1, ("a",), 3)
    assert str(apply(Layout.parse("[{b,a}x2, {c}]", MESH), step)) == "[{b}x2, {c,a}x3]"
    for bad in (replace(step, to_dim=0), replace(step, to_dim=None), replace(step, axes=("b",)), replace(step, dim=5)):
        with pytest.raises(VerifyError, match="the step does not fit the layout"):
            apply(Layout.parse("[{b,a}x2, {c}]", MESH), bad)


LEFT, RIGHT = Mesh("dp=2", devices=[0, 1]), Mesh("dp=2", devices=[2, 3])


def crossing(source: str, target: str) -> MovePlan:
    return plan_move(Layout.parse(source, LEFT), Layout.parse(target, RIGHT), (4, 2), torch.float32)


def rows(sender: int, receiver: int, start: int, size: int) -> Message:
    return Message(sender, receiver, Box((start, 0), (size, 2)))


TO_2, TO_3 = [rows(0, 2, 0, 2), rows(1, 2, 2, 2)], [rows(0, 3, 0, 2), rows(1, 3, 2, 2)]


SENDER, RECEIVER = (f"a message contains elements that its {end} does not have" for end in ("sender", "receiver"))
TWICE = "a device receives elements twice, or not at all"


@pytest.mark.parametrize(
    ("messages", "what"),
    [
        ([*TO_2, TO_3[0]], TWICE),
        ([*TO_2, *TO_3, TO_2[0]], TWICE),
        ([TO_2[0], TO_2[0], *TO_3], TWICE),
        ([TO_2[0], rows(0, 2, 2, 2), *TO_3], SENDER),
        ([rows(0, 2, 1, 2), TO_2[1], *TO_3], SENDER),
        ([rows(0, 2, 0, 1), TO_2[1], *TO_3], TWICE),
        ([TO_2[0], rows(1, 2, 3, 2), *TO_3], SENDER),
        ([TO_2[0], rows(3, 2, 2, 2), *TO_3], SENDER),
        ([*TO_2, *TO_3, rows(0, 1, 0, 2)], RECEIVER),
    ],
)
def test_messages_that_do_not_bring_each_element_once_are_refused(messages: list[Message], what: str) -> None:
    made = crossing("[{dp}, {}]", "[{}, {}]")
    right = Routes((*TO_2, *TO_3))
    replay(made, (4, 2), lambda step, shape: right)
    assert sorted(map(str, routes(made.source, made.target, (4, 2)).messages)) == sorted(map(str, right.messages))
    with pytest.raises(VerifyError) as error:
        replay(made, (4, 2), lambda step, shape: Routes(tuple(messages)))
    assert str(error.value).startswith(
        f"{what}\n  where: step 1: transfer to dp=2 on [2, 3], [{{dp}}, {{}}] -> [{{}}, {{}}]"
    )


@pytest.mark.parametrize("message", [rows(0, 2, 0, 3), rows(0, 2, 1, 2)])
def test_what_the_receiver_does_not_want_is_refused(message: Message) -> None:
    made = crossing("[{}, {}]", "[{dp}, {}]")
    replay(made, (4, 2))
    with pytest.raises(VerifyError, match=RECEIVER):
        replay(made, (4, 2), lambda step, shape: Routes((message, rows(1, 3, 2, 2))))


def test_a_transfer_that_states_another_source_is_refused() -> None:
    """Where a device's array lies is read from the layouts; the contents show that it does not lie there."""
    turned = Layout.parse("[{dp}, {}]", Mesh("dp=2", devices=[1, 0]))
    made = crossing("[{dp}, {}]", "[{dp}, {}]")
    lying = replace(made.steps[0], source=turned)
    with pytest.raises(VerifyError, match=r"^device 0 does not have its piece\n  where: step 1: transfer"):
        replay(replace(made, steps=(lying,)), (4, 2))


def test_a_partial_value_does_not_cross() -> None:
    made = crossing("[{}, {}] partial(sum: dp)", "[{}, {}]")
    assert [step.kind for step in made.steps] == ["reduce_scatter", "transfer"]
    whole = replace(made.steps[1], source=Layout.replicated(LEFT, 2))
    with pytest.raises(VerifyError, match=r"^contributions are missing\n  where: step 1: transfer"):
        replay(replace(made, steps=(whole,)), (4, 2))


def test_no_step_of_a_crossing_can_be_dropped_or_moved() -> None:
    mesh = Mesh("a=2,b=2", devices=[2, 3, 4, 5])
    source, target = Layout.parse("[{}, {}] partial(avg: dp)", LEFT), Layout.parse("[{b}, {}] partial(sum: a)", mesh)
    made = plan_move(source, target, (4, 2), torch.float32)
    assert [step.kind for step in made.steps] == ["reduce_scatter", "scale", "transfer", "to_partial"]
    for i in range(4):
        without = (*made.steps[:i], *made.steps[i + 1 :])
        for steps in (without, (*without, made.steps[i]) if i < 3 else (made.steps[i], *without)):
            with pytest.raises(VerifyError):
                replay(replace(made, steps=steps), (4, 2))


def test_a_reduction_on_another_mesh_is_refused() -> None:
    made = crossing("[{dp}, {}]", "[{}, {}]")
    whole = made.steps[-1].target
    partial = replace(whole, partial=(("dp", "sum"),))
    detour = (
        Step("to_partial", ("dp",), whole, partial, op="sum"),
        Step("all_reduce", ("dp",), partial, whole, op="sum"),
    )
    with pytest.raises(VerifyError) as error:
        replay(replace(made, steps=(*made.steps, *detour)), (4, 2))
    assert str(error.value) == (
        "a value is reduced on another mesh than its own\n  where: all_reduce(sum) over dp\n"
        "  got: mesh dp=2 on [2, 3]\n  expected: mesh dp=2"
    )


def test_compile_takes_no_plan_that_is_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planner that leaves out a step is caught, whatever it says of its layouts."""
    compiler = importlib.import_module("meshweave.build")

    def careless(*args: Any, **kwargs: Any) -> MovePlan:
        made = plan_move(*args, **kwargs)
        reductions = [step for step in made.steps if step.kind == "all_reduce"]
        return replace(made, steps=tuple(step for step in made.steps if step not in reductions))

    model, x = torch.nn.Linear(4, 4), torch.randn(4, 4)
    options: dict[str, Any] = {"loss": lambda out, batch: out.square().mean(), "example": (x,), "mesh": "dp=2"}
    assert mw.compile(model, **options)((x,)) > 0
    monkeypatch.setattr(compiler, "plan_move", careless)
    with pytest.raises(VerifyError, match="the steps do not lead to the target: contributions are missing"):
        mw.compile(model, **options)


def test_axes_that_no_step_touches_cost_nothing() -> None:
    """A gather over 4 of 16,384 devices, with uneven pieces: one replay for each size that the outer axis leaves."""
    mesh = Mesh("a=4096,b=4")
    made = plan_move(Layout.parse("[{a,b}, {}]", mesh), Layout.parse("[{a}, {}]", mesh), (30001, 8), torch.float32)
    replay(made, (30001, 8))
    assert calls_of(lambda: replay(made, (30001, 8))) < 100_000
