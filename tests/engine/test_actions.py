"""Sections of roles and the actions that run them: which there are, in which order, and that none is lost."""

from __future__ import annotations

import pytest
from tests.simulate.test_pipelines import stages

from meshweave.engine.actions import actions_of, forms_of, schedule_of, stage_numbers
from meshweave.engine.sections import KINDS, is_wait_for_send, sections_of_roles
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS


def test_orders_of_actions() -> None:
    text = lambda *args: " ".join(map(str, actions_of(*args)))  # noqa: E731
    assert text("sequential", 3) == "GF0 B0 F1 B1 F2 BR2 U2"
    assert text("sequential", 1) == "GF0 BR0 U0"
    assert text("gpipe", 2) == "GF0 F1 B0 BR1 L0 L1 U1"
    assert text("1f1b", 4, 2) == "GF0 F1 F2 B0 F3 B1 B2 BR3 L0 L1 L2 L3 U3"
    assert text("1f1b", 3, 0) == "GF0 B0 F1 B1 F2 BR2 L0 L1 L2 U2"
    assert text("1f1b", 2, 3) == "GF0 F1 B0 BR1 L0 L1 U1"


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


def test_stages_are_numbered_in_the_order_of_a_microbatch() -> None:
    sections = sections_of_roles(stages(4).roles, is_pipeline=True)
    assert stage_numbers(sections) == [0, 1, 2, 3]
    assert stage_numbers(sections[::-1]) == [3, 2, 1, 0]
    schedule = schedule_of("1f1b", sections, 2)
    assert schedule.is_pipelined
    assert str(schedule).splitlines()[3] == "F0 B0 F1 B1 L0 L1 U1"  # nothing is prepared or reduced


def test_microbatches_of_one_form_run_the_same() -> None:
    first, *middle, last = forms_of(actions_of("sequential", 4))
    kinds = lambda actions: tuple(action.kinds for action in actions)  # noqa: E731
    assert kinds(first) == (("unshard", "forward"), ("backward",))
    assert list(map(kinds, middle)) == [(("forward",), ("backward",))] * 2
    assert kinds(last) == (("forward",), ("backward", "reduce"), ("update",))
    assert [action.name for action in last] == ["forward", "backward", "update"]


def test_unknown_schedule() -> None:
    with pytest.raises(MeshweaveError, match="unknown pipeline schedule"):
        schedule_of("zb", [], 2)  # type: ignore[arg-type]
