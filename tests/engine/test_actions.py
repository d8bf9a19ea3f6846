"""Sections of roles and the actions that run them: which there are, in which order, and that none is lost."""

from __future__ import annotations

from typing import Any

import pytest
from tests.simulate.test_pipelines import stages

from meshweave.engine.actions import Action, Schedule, actions_of, forms_of
from meshweave.engine.for_roles import scheduled
from meshweave.engine.schedules.generators import make_schedule
from meshweave.engine.sections import KINDS, is_wait_for_send, sections_of_roles
from meshweave.errors import PlanError
from meshweave.ir.collectives import transfer
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS


def test_microbatches_come_one_after_the_other() -> None:
    assert " ".join(map(str, actions_of(3))) == "GF0 B0 F1 B1 F2 BR2 U2"
    assert " ".join(map(str, actions_of(1))) == "GF0 BR0 U0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((),), r'(?s)a tuple of kinds.*got: \(\).*for example \("forward",\)'),
        (("forward",), r"(?s)a tuple of kinds.*got: 'forward'"),
        ((None,), r"(?s)a tuple of kinds.*got: None"),
        ((("fwd",),), r"(?s)a tuple of kinds.*did you mean forward\?"),
        ((("W",),), r"(?s)a tuple of kinds.*did you mean weight\?"),
        ((("forward",), None, 0), r"(?s)the number of a microbatch.*Action of forward.*got: microbatch None"),
        ((("forward", "backward"), 0, "1"), r"(?s)number of a stage.*Action of forward and backward.*got: stage '1'"),
    ],
)
def test_what_is_no_action(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Action(*arguments)


@pytest.mark.parametrize("rows", [None, {0: ()}, ("0F0", "1F0"), (("0F0",), ())])
def test_what_is_no_schedule(rows: Any) -> None:
    with pytest.raises(PlanError, match=r"(?s)for each rank a tuple of actions.*schedule mine"):
        Schedule("mine", rows)


@pytest.mark.parametrize("reports", [False, True])
def test_each_node_is_in_one_section(reports: bool) -> None:
    for its in sections_of_roles(stages(4).roles, is_pipeline=reports):
        nodes = [n for n in its.role.graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]
        sends = {n for n in nodes if reports and is_wait_for_send(its.role, n) and origin_of(n).phase != "update"}
        nodes = [n for n in nodes if n not in sends]
        assert its.nodes() == nodes
        assert sum(len(its.nodes([kind])) for kind in KINDS) == len(nodes)
        assert bool(its.nodes(["report"])) == reports
        begin = its.begin("backward")
        assert begin is not None
        assert origin_of(begin).phase == "backward"
        before = nodes[: nodes.index(begin)]
        assert not any(origin_of(node).phase == "backward" for node in before)


def test_roles_get_the_actions_of_the_rank_that_has_their_stages() -> None:
    roles = stages(4).roles
    sections, schedule = scheduled(roles, make_schedule("1f1b", 4, 2), 2)
    assert [its.stage_numbers for its in sections] == [(0,), (1,), (2,), (3,)]
    assert str(schedule).splitlines()[3] == "F0 B0 F1 B1 L0 L1 N2 U2"  # nothing is prepared or reduced
    _, backwards = scheduled(roles[::-1], make_schedule("1f1b", 4, 2), 2)
    assert backwards.of_role == schedule.of_role[::-1]
    with pytest.raises(PlanError, match="the stages of the plan are not those of schedule"):
        scheduled(roles, make_schedule("1f1b", 2, 2), 2)


def test_backward_in_parts() -> None:
    """The part for the inputs is what other stages wait for; every op of backward is in one of the parts."""
    program = stages(4)
    whole = sections_of_roles(program.roles, is_pipeline=True)
    for its, before in zip(sections_of_roles(program.roles, is_pipeline=True, has_parts=True), whole, strict=True):
        inputs, weights = (set(its.nodes([kind])) for kind in ("input", "weight"))
        assert its.nodes(["backward"]) == before.nodes(["backward"])
        assert inputs | weights == set(before.nodes(["backward"]))
        assert not any(user in inputs for node in weights for user in node.users)
        sends = [n for n in inputs if n.target is transfer and n.args[0] is not None]
        assert len(sends) == (its.stage_numbers != (0,))


def test_microbatches_of_one_form_run_the_same() -> None:
    first, *middle, last = forms_of(actions_of(4))
    kinds = lambda actions: tuple(action.kinds for action in actions)  # noqa: E731
    assert kinds(first) == (("unshard", "forward"), ("backward",))
    assert list(map(kinds, middle)) == [(("forward",), ("backward",))] * 2
    assert kinds(last) == (("forward",), ("backward", "reduce"), ("update",))
    assert [action.name for action in last] == ["forward", "backward", "update"]
