"""The verifier: graphs as passes make them pass, and each way to break one is named by its node."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.training import mse, sgd
from torch import fx, nn

from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import AlphaBeta
from meshweave.errors import VerifyError
from meshweave.ir import ops
from meshweave.ir.collectives import STARTS, WAIT, functional
from meshweave.ir.graph import Spec, op_name, origin_of, spec_of
from meshweave.ir.layout import DimSharding, Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.verify import verify_placed, verify_rank, verify_step
from meshweave.program import Program

aten = torch.ops.aten


def program() -> Program:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4))
    example = {"input": torch.ones(4, 4), "y": torch.ones(4, 4)}
    spec = read_optimizer(sgd(model.parameters()), model)
    return build_program(
        StepSource(model, mse), example, spec, Target(Mesh("dp=2,tp=2"), None, AlphaBeta()), CaptureOptions()
    )


def first(graph: fx.Graph, target: Any) -> fx.Node:
    return next(n for n in graph.nodes if n.target == target)


def test_what_the_pipeline_makes_is_well_formed() -> None:
    made = program()
    assert verify_step(made.captured) is made.captured
    assert verify_placed(made.placed) is made.placed
    assert verify_rank(made.rank) is made.rank


# captured graphs


def _no_spec(made: Program) -> str:
    node = first(made.captured.graph, aten.tanh.default)
    del node.meta["spec"]
    return f"captured graph: {node.name} (aten.tanh) has no spec"


def _no_origin(made: Program) -> str:
    node = first(made.captured.graph, aten.tanh.default)
    node.meta["origin"] = "somewhere"
    return f"captured graph: {node.name} (aten.tanh) has no origin"


def _in_place(made: Program) -> str:
    node = first(made.captured.graph, aten.tanh.default)
    node.target = aten.tanh_.default
    return f"captured graph: {node.name} (aten.tanh_) writes to an operand"


def _module_call(made: Program) -> str:
    node = first(made.captured.graph, aten.tanh.default)
    node.op, node.target = "call_method", "tanh"
    return f"captured graph: {node.name} (call_method) is a call_method"


def _other_input(made: Program) -> str:
    node = made.captured.placeholders[0]
    node.meta["spec"] = Spec((9, 9), torch.float32)
    return f"captured graph: input {made.captured.inputs[0].name} has changed"


def _lost_output(made: Program) -> str:
    made.captured.outputs = made.captured.outputs[1:]
    return "captured graph: inputs or outputs do not match their names"


def _output_of_many(made: Program) -> str:
    node = made.captured.output_values[0]
    node.meta["spec"] = (spec_of(node),)
    return "captured graph: an output is not a tensor"


@pytest.mark.parametrize(
    "breaks", [_no_spec, _no_origin, _in_place, _module_call, _other_input, _lost_output, _output_of_many]
)
def test_a_broken_captured_graph_is_named(breaks: Callable[[Program], str]) -> None:
    made = program()
    expected = breaks(made)
    with pytest.raises(VerifyError) as error:
        verify_step(made.captured)
    assert error.value.what == expected


def test_the_error_says_where_the_node_comes_from() -> None:
    made = program()
    node = first(made.captured.graph, aten.tanh.default)
    del node.meta["spec"]
    with pytest.raises(VerifyError) as error:
        verify_step(made.captured)
    assert error.value.where == str(origin_of(node)) == "(1) [forward]"


# placed graphs


def _no_layout(made: Program) -> str:
    node = first(made.placed.graph, aten.tanh.default)
    del node.meta["layout"]
    return f"placed graph: {node.name} (aten.tanh) has no layout"


def _layout_by_text(made: Program) -> str:
    node = first(made.placed.graph, aten.tanh.default)
    node.meta["layout"] = str(node.meta["layout"])
    return f"placed graph: {node.name} (aten.tanh) has no layout"


def _unit_that_changes_nothing(made: Program) -> str:
    node = first(made.placed.graph, aten.tanh.default)
    layout = node.meta["layout"]
    node.meta["layout"] = layout.with_dim(0, replace(layout.dims[0], unit=2))
    return f"placed graph: {node.name} (aten.tanh) has a layout that is not in normal form: [{{dp}}x2, {{tp}}]"


def _other_layout(made: Program) -> str:
    """An operand is swapped for the same value in another layout."""
    node = first(made.placed.graph, aten.tanh.default)
    operand = node.args[0]
    whole = Layout.replicated(operand.meta["layout"].mesh, 2)
    with made.placed.graph.inserting_before(node):
        move = made.placed.graph.call_function(ops.move, (operand, str(whole)))
    move.meta.update(operand.meta, layout=whole)
    move.meta.pop("assignment", None)
    node.args = (move,)
    return f"placed graph: {node.name} (aten.tanh) takes {move.name} as [{{}}, {{}}] instead of [{{dp}}, {{tp}}]"


def _partial_into_tanh(made: Program) -> str:
    node = first(made.placed.graph, aten.tanh.default)
    operand, mesh = node.args[0], node.meta["layout"].mesh
    operand.meta["layout"] = Layout(mesh, (DimSharding(("dp",)), DimSharding()), (("tp", "sum"),))
    operand.meta.pop("assignment")
    return (
        f"placed graph: {node.name} (aten.tanh) takes {operand.name} as [{{dp}}, {{}}] partial(sum: tp) "
        "instead of [{dp}, {tp}]"
    )


def _moves_nothing(made: Program) -> str:
    move = first(made.placed.graph, ops.move)
    move.meta["layout"] = move.args[0].meta["layout"]
    for user in move.users:
        user.meta.pop("assignment", None)
    return f"placed graph: {move.name} (move) moves nothing"


def _replaced_elsewhere(made: Program) -> str:
    """A parameter is left in another layout than that in which the next step reads it."""
    (source, item), *_ = made.placed.sources.items()
    source.meta["layout"] = source.meta["layout"].with_dim(0, DimSharding(("dp", "tp")))
    for user in source.users:
        user.meta.pop("assignment", None)
    return f"placed graph: param {item.name} is not left as it is read"


@pytest.mark.parametrize(
    "breaks",
    [
        _no_layout,
        _layout_by_text,
        _unit_that_changes_nothing,
        _other_layout,
        _partial_into_tanh,
        _moves_nothing,
        _replaced_elsewhere,
    ],
)
def test_a_broken_placed_graph_is_named(breaks: Callable[[Program], str]) -> None:
    made = program()
    expected = breaks(made)
    with pytest.raises(VerifyError) as error:
        verify_placed(made.placed)
    assert error.value.what == expected


def test_every_result_of_an_op_with_several_needs_a_layout() -> None:
    model = nn.LayerNorm(4)
    example = {"input": torch.ones(4, 4), "y": torch.ones(4, 4)}
    spec = read_optimizer(sgd(model.parameters()), model)
    made = build_program(
        StepSource(model, mse), example, spec, Target(Mesh("dp=2"), None, AlphaBeta()), CaptureOptions()
    )
    node = next(n for n in made.placed.graph.nodes if isinstance(n.meta.get("spec"), tuple))
    node.meta["layout"] = (node.meta["layout"][0], None, *node.meta["layout"][2:])
    with pytest.raises(VerifyError) as error:
        verify_placed(made.placed)
    assert error.value.what == f"placed graph: {node.name} ({op_name(node.target)}) has no layout"


# rank graphs


def _lost_wait(made: Program) -> str:
    wait = first(made.rank.graph, WAIT)
    start = wait.args[0]
    wait.replace_all_uses_with(start)
    made.rank.graph.erase_node(wait)
    return f"rank graph: {start.name} ({op_name(start.target)}) has 0 waits and {len(start.users)} users"


def _second_wait(made: Program) -> str:
    wait = first(made.rank.graph, WAIT)
    with made.rank.graph.inserting_after(wait):
        made.rank.graph.call_function(WAIT, wait.args)
    return f"rank graph: {wait.args[0].name} ({op_name(wait.args[0].target)}) has 2 waits and 2 users"


def _reads_before_the_wait(made: Program) -> str:
    wait = first(made.rank.graph, WAIT)
    with made.rank.graph.inserting_after(wait):
        made.rank.graph.call_function(aten.neg.default, wait.args)
    return f"rank graph: {wait.args[0].name} ({op_name(wait.args[0].target)}) has 1 waits and 2 users"


def _waits_for_a_value(made: Program) -> str:
    tanh = first(made.rank.graph, aten.tanh.default)
    with made.rank.graph.inserting_after(tanh):
        wait = made.rank.graph.call_function(WAIT, (tanh,))
    return f"rank graph: {wait.name} ({op_name(WAIT)}) waits for a value that is not a collective"


def _unknown_axis(made: Program) -> str:
    start = next(n for n in made.rank.graph.nodes if n.target in STARTS)
    start.args = (*start.args[:-1], "dp,pp")
    return f"rank graph: {start.name} ({op_name(start.target)}) works over unknown axes ['pp']"


def _move_left(made: Program) -> str:
    tanh = first(made.rank.graph, aten.tanh.default)
    tanh.target = ops.move
    return f"rank graph: {tanh.name} (move) was not expanded"


def _pin_left(made: Program) -> str:
    tanh = first(made.rank.graph, aten.tanh.default)
    tanh.target = torch.ops.meshweave.pin.default
    return f"rank graph: {tanh.name} (meshweave.pin) was not expanded"


def _in_place_collective(made: Program) -> str:
    start = first(made.rank.graph, functional.all_reduce.default)
    start.target = functional.all_reduce_.default
    return f"rank graph: {start.name} (_c10d_functional.all_reduce_) writes to an operand"


@pytest.mark.parametrize(
    "breaks",
    [
        _lost_wait,
        _second_wait,
        _reads_before_the_wait,
        _waits_for_a_value,
        _unknown_axis,
        _move_left,
        _pin_left,
        _in_place_collective,
    ],
)
def test_a_broken_rank_graph_is_named(breaks: Callable[[Program], str]) -> None:
    made = program()
    expected = breaks(made)
    with pytest.raises(VerifyError) as error:
        verify_rank(made.rank)
    assert error.value.what == expected


def test_a_node_that_is_used_before_it_is_made_does_not_pass() -> None:
    made = program()
    tanh = first(made.rank.graph, aten.tanh.default)
    tanh.args[0].append(tanh)
    last = next(
        n for n in reversed(made.rank.graph.nodes) if n.op == "call_function" and n.target is not operator.getitem
    )
    last.append(tanh)
    with pytest.raises(RuntimeError, match="before it has been defined"):
        verify_rank(made.rank)


@pytest.mark.parametrize("verify", [verify_step, verify_placed])
def test_the_verifier_changes_nothing(verify: Callable[[Any], Any]) -> None:
    made = program()
    step = made.captured if verify is verify_step else made.placed
    before = step.text()
    assert verify(step).text() == before
    assert partial(verify_rank)(made.rank).text() == made.rank.text()
