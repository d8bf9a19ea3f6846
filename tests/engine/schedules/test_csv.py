"""CSV in torch's two forms, with torch's classes, reader and simulation as oracle."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.schedules.torch_schedules import CLASSES, Row, orders_of, read, text_of_orders

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules import (
    SCHEDULES,
    load_schedule,
    make_schedule,
    parse_schedule,
    pipeline_times,
    prove_schedule,
    save_schedule,
    schedule_csv,
    text_of,
    with_communication,
)
from meshweave.errors import PlanError

SIZES = [(1, 2), (2, 2), (2, 5), (3, 6), (4, 8), (4, 10)]


def compute_of(schedule: Schedule) -> list[list[str]]:
    return [[text_of(action) for action in actions] for actions in schedule.of_role]


@pytest.mark.parametrize("row", CLASSES, ids=lambda row: f"{row.name}-{row.stages_per_rank}")
def test_torch_classes_are_read_and_proven(row: Row) -> None:
    num_equal = 0
    for ranks, microbatches in SIZES:
        if not row.fits(ranks, microbatches):
            continue
        text = text_of_orders(orders_of(row, ranks, microbatches))
        schedule = parse_schedule(text)
        proof = prove_schedule(schedule, ranks * row.stages_per_rank, microbatches)
        assert len(proof.ranks) == ranks * row.stages_per_rank
        if row.ours:
            ours = make_schedule(row.ours, ranks, microbatches, row.stages_per_rank)
            reduced = parse_schedule(schedule_csv(schedule))  # torch's single-stage classes list reductions
            assert compute_of(ours) == compute_of(reduced)
            assert ours.of_role == reduced.of_role
        num_equal += 1
    assert num_equal >= 2


@pytest.mark.parametrize("row", CLASSES, ids=lambda row: f"{row.name}-{row.stages_per_rank}")
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_torch_reads_what_we_write_of_its_classes(row: Row, form: str, tmp_path: Path) -> None:
    ranks, microbatches = 4, 8
    schedule = parse_schedule(text_of_orders(orders_of(row, ranks, microbatches)))
    text = schedule_csv(schedule, form)  # type: ignore[arg-type]
    theirs = read(text, tmp_path / "schedule.csv", ranks * row.stages_per_rank, microbatches, form)
    with_messages = parse_schedule(text_of_orders(theirs.pipeline_order_with_comms))
    prove_schedule(with_messages)
    assert parse_schedule(schedule_csv(with_messages)).of_role == parse_schedule(schedule_csv(schedule)).of_role
    if form == "compute_comms":
        assert text_of_orders(theirs.pipeline_order_with_comms) == text


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 1), (4, 3), (3, 8)])
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
def test_torch_reads_our_schedules(name: str, ranks: int, microbatches: int, form: str, tmp_path: Path) -> None:
    schedule = make_schedule(name, ranks, microbatches)
    path = tmp_path / "ours.csv"
    save_schedule(schedule, path, form)  # type: ignore[arg-type]
    loaded = load_schedule(path)
    assert loaded.name == "ours.csv"
    assert parse_schedule(schedule_csv(loaded)).of_role == schedule.of_role
    read(path.read_text(), tmp_path / "theirs.csv", schedule.num_stages, microbatches, form)
    times = {"F": 2.0, "B": 1.5, "W": 1.0, "comm": 0.25}
    with_messages = with_communication(schedule, **times)
    assert pipeline_times(with_messages, **times).step_s == pytest.approx(pipeline_times(schedule, **times).step_s)


def test_text_of_both_forms() -> None:
    schedule = make_schedule("dualpipev", 1, 2)
    assert schedule_csv(schedule) == "0F0,1F0,0F1,1B0,(1F1;0B0)OVERLAP_F_B,1B1,0I1,0W1\n"
    schedule = make_schedule("1f1b", 2, 2)
    assert schedule_csv(schedule, "compute_comms") == (
        "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
        "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
    )


def test_what_a_runtime_adds_is_not_written() -> None:
    forward = Action(("unshard", "forward"))
    backward = Action(("input", "weight", "reduce"))
    schedule = Schedule("mine", ((forward, backward, Action(("report",)), Action(("update",))),))
    assert schedule_csv(schedule) == "0F0,0I0,0W0\n"
    assert schedule_csv(schedule, "compute_comms") == "0UNSHARD,0F0,0I0,0W0,0REDUCE_GRAD\n"


@pytest.mark.parametrize("cell", ["0X0", "F0", "0F", "0F0;1B0", "(0F0;)OVERLAP_F_B", "(0F0;1B0)", "-1F0", "0f0"])
def test_cells_that_are_no_action(cell: str) -> None:
    with pytest.raises(PlanError, match=r"(?s)cell .*no action.*row 2, cell 2"):
        parse_schedule(f"0F0,0B0\n1F0,{cell}\n" if "," not in cell else cell)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="cannot be read"):
        load_schedule(tmp_path / "none.csv")
    with pytest.raises(PlanError, match="unknown form"):
        schedule_csv(make_schedule("1f1b", 1, 1), "json")  # type: ignore[arg-type]
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(PlanError, match="without ranks"):
        load_schedule(tmp_path / "empty.csv")
