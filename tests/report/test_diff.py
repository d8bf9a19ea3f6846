"""Two steps compared: what moved, appeared, vanished, and that the split of the time adds up."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console
from tests.report.samples import sample

from meshweave.cost.simulate.result import Simulation
from meshweave.ir.graph import fold_numbers
from meshweave.report.diff import class_errors, diff_rows, diff_table, step_split
from meshweave.report.simulation import simulation_table
from meshweave.report.spans import class_sums

ALL_REDUCE = "bfloat16[2,4096,4096]: [{}, {}, {}] partial(sum: tp) -> [{}, {}, {}]"


def printed(*tables: object) -> str:
    console = Console(width=250, file=StringIO())
    for table in tables:
        console.print(table)
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def changed(step: Simulation, **what: object) -> Simulation:
    """The forward all-reduces of `step` are something else."""
    return replace(
        step,
        spans=tuple(
            replace(s, **what) if (s.op, s.phase) == ("all_reduce", "forward") else s  # type: ignore[arg-type]
            for s in step.spans
        ),
    )


def test_a_step_is_the_same_as_itself() -> None:
    step = sample()
    rows = diff_rows(step, step)
    assert {row.kind for row in rows} == {"same"}
    assert {row.change for row in rows} == {""}
    assert sum(row.a.count for row in rows) == sum(s.kind != "compute" for s in step.spans)
    assert all(row.change == 0 for row in step_split(step, step))


def test_layers_are_folded_and_counts_bytes_and_seconds_are_sums() -> None:
    step = sample(layers=4)
    row = next(
        r
        for r in diff_rows(step, step)
        if (r.phase, r.op, r.module) == ("forward", "all_gather", "model.layers.*.mlp.gate_proj")
    )
    spans = [s for s in step.spans if s.module.endswith("gate_proj") and s.op == "all_gather" and s.phase == "forward"]
    assert row.a.count == len(spans) == 4
    assert row.a.bytes == sum(s.bytes for s in spans)
    assert row.a.seconds == pytest.approx(sum(s.seconds for s in spans))
    assert row.b.exposed_seconds == pytest.approx(sum(s.exposed_seconds for s in spans))
    assert row.as_dict()["a_count"] == 4


def test_another_group_or_op_is_a_move_and_says_so() -> None:
    step = sample()
    rows = [r for r in diff_rows(step, changed(step, group="tp2")) if r.kind != "same"]
    assert {(r.kind, r.group, r.change) for r in rows} == {("moved", "tp2", "over tp2 instead of tp")}
    target = "bfloat16[2,4096,4096]: [{}, {}, {}] partial(sum: tp) -> [{}, {tp}, {}]"
    rows = [r for r in diff_rows(step, changed(step, op="reduce_scatter", layout=target)) if r.kind != "same"]
    assert {r.kind for r in rows} == {"moved"}
    assert rows[0].change == f"reduce_scatter instead of all_reduce; {target} instead of {ALL_REDUCE}"


def test_what_appears_vanishes_or_grows() -> None:
    step = sample()
    spans = tuple(s for s in step.spans if (s.op, s.phase) != ("all_reduce", "forward"))
    without = replace(step, spans=spans)
    gone = [r for r in diff_rows(step, without) if r.kind != "same"]
    assert {(r.kind, r.b.count) for r in gone} == {("vanishes", 0)}
    assert sum(r.a.count for r in gone) == 8
    new = [r for r in diff_rows(without, step) if r.kind != "same"]
    assert {(r.kind, r.a.count) for r in new} == {("appears", 0)}
    assert new[0].change.startswith("4 appear: 256.0 MiB, ")
    grown = [r for r in diff_rows(step, changed(step, bytes=2.0**27)) if r.kind != "same"]
    assert {r.kind for r in grown} == {"changed"}
    assert {r.change for r in grown} == {"512.0 MiB instead of 256.0 MiB"}


def test_the_largest_change_of_exposed_time_stands_first() -> None:
    a, b = sample(layers=2), sample(layers=3, slow=1.2)
    changes = [abs(r.b.exposed_seconds - r.a.exposed_seconds) for r in diff_rows(a, b)]
    assert changes == sorted(changes, reverse=True)
    assert changes[0] > 0


@pytest.mark.parametrize("roles", [1, 3])
def test_the_split_adds_up_to_both_steps(roles: int) -> None:
    a, b = sample(roles=roles, layers=2), sample(roles=roles, layers=3, microbatches=2, slow=1.3)
    rows = step_split(a, b)
    assert sum(row.a for row in rows) == pytest.approx(a.seconds)
    assert sum(row.b for row in rows) == pytest.approx(b.seconds)
    assert sum(row.change for row in rows) == pytest.approx(b.seconds - a.seconds)
    assert rows[-1].part == "idle"
    assert rows[-1].a == pytest.approx(sum(r.idle_seconds for r in a.roles) / roles, rel=1e-6)
    assert ("forward", "attention") in {(row.phase, row.part) for row in rows}


def test_errors_per_class_of_a_model_that_is_a_tenth_too_fast() -> None:
    rows = {row.name: row for row in class_errors(sample(), sample(source="measured", slow=1 / 0.9))}
    assert list(rows)[:3] == ["matmul", "attention", "memory"]
    assert list(rows)[-2:] == ["exposed", "step"]
    assert rows["matmul"].modelled == pytest.approx(0.9 * rows["matmul"].measured)
    assert rows["all_gather"].modelled == pytest.approx(rows["all_gather"].measured)
    assert rows["matmul"].num_modelled == rows["matmul"].num_measured > 0


def test_the_table_of_differences_names_them() -> None:
    step = sample()
    text = printed(*diff_table(step, changed(step, group="tp2")))
    assert "over tp2 instead of tp" in text
    assert "exposed all_gather" in text
    longer = printed(*diff_table(step, changed(step, group="tp2"), num_rows=1))
    assert "and 1 more" in longer


def test_the_summary_names_totals_reasons_and_memory() -> None:
    step = sample(verdict="does not fit: role 0 needs 90 GiB [of] 79 GiB")
    text = printed(simulation_table(step))
    worst = max(step.spans, key=lambda s: s.exposed_seconds)
    for expected in (
        f"{step.seconds * 1e3:.3f} ms",
        "41.2%",
        f"{step.tokens_per_s_per_gpu:,.0f}",
        "h100 2026.1",
        fold_numbers(worst.module),
        "modeling_llama.py:",
        "dependency: aten.mm",
        "activation",
        "[of]",
    ):
        assert expected in text


def test_totals_per_class_are_all_tasks() -> None:
    step = sample(roles=2)
    totals = class_sums(step.spans)
    assert list(totals) == [
        "matmul",
        "attention",
        "memory",
        "all_gather",
        "all_reduce",
        "reduce_scatter",
        "transfer",
    ]
    assert sum(t.count for t in totals.values()) == len(step.spans)
    assert sum(t.exposed_seconds for t in totals.values()) == pytest.approx(sum(s.exposed_seconds for s in step.spans))
