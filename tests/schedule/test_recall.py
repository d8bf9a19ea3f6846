"""Orders that are kept on disk: taken up where nothing has changed, never believed, and sought anew else."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from tests.training import batches, mse
from torch import nn

import meshweave as mw
from meshweave.ir.rank import RankGraph
from meshweave.schedule import recall
from meshweave.schedule.report import OverlapReport
from meshweave.schedule.search import OrderSearch
from meshweave.schedule.steps import overlap_role


@pytest.fixture
def orders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MESHWEAVE_CACHE", str(tmp_path))
    monkeypatch.setattr(recall, "_LEAST_ITEMS", 1)
    return tmp_path / "orders"


@cache
def role() -> RankGraph:
    """A small one: it is ordered many times here."""
    model, (example, *_) = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), batches(1, (4, 8), (4, 8))
    step = mw.compile(model, loss=mse, example=example, mesh="fsdp=2", passes="none", forward=lambda m, b: m(b["x"]))
    return step.program.rank


def ordered(memory_cap_bytes: int | None = None) -> tuple[list[str], OverlapReport]:
    ordered_role, report = overlap_role(role(), mw.load_profile("h100"), memory_cap_bytes)
    return [n.name for n in ordered_role.graph.nodes], report


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How many searches were run."""
    count, run = [0], OrderSearch.run

    def counted(self: OrderSearch, known: object) -> object:
        count[0] += 1
        return run(self, known)  # type: ignore[arg-type]

    monkeypatch.setattr(OrderSearch, "run", counted)
    return lambda: count[0]


def entries(orders: Path) -> list[Path]:
    return sorted(orders.glob("*.json"))


def rewritten(path: Path, change: Callable[[dict[str, object]], None]) -> None:
    """An entry that is whole, and says something else."""
    head, key, text = path.read_text().split("\n", 2)
    value = json.loads(text)
    change(value)
    rest = f"{key}\n{json.dumps(value)}"
    path.write_text(f"# {recall.sha256(rest.encode()).hexdigest()}\n{rest}")
    assert head.startswith("# ")


def test_the_second_start_searches_nothing_and_has_the_same_order(orders: Path, searches: Callable[[], int]) -> None:
    names, report = ordered()
    assert searches() == 1
    assert len(entries(orders)) == 1
    again, other = ordered()
    assert searches() == 1
    assert again == names
    assert other.candidates == report.candidates
    assert other.notes == report.notes
    assert (other.seconds, other.peak_bytes, other.regret) == (report.seconds, report.peak_bytes, report.regret)
    assert str(other) == str(report)  # why what was not merged is searched for when somebody asks
    assert searches() == 2


def test_another_cap_is_another_problem(orders: Path, searches: Callable[[], int]) -> None:
    _, report = ordered()
    ordered(memory_cap_bytes=report.peak_bytes + 1000)
    assert searches() == 2
    assert len(entries(orders)) == 2


def test_other_code_is_another_problem(
    orders: Path, searches: Callable[[], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered()
    monkeypatch.setattr(recall, "code_digest", lambda rooms: "another version")
    ordered()
    assert searches() == 2


def _swap(value: dict[str, object]) -> None:
    order = value["order"]
    assert isinstance(order, list)
    order.reverse()


def _slower(value: dict[str, object]) -> None:
    seconds = value["seconds"]
    assert isinstance(seconds, list)
    seconds[0] *= 0.5


def _bucket(value: dict[str, object]) -> None:
    value["buckets"] = [[0, 1]]


def _infinite(value: dict[str, object]) -> None:
    value["order"] = [float("inf")]


def _without_rows(value: dict[str, object]) -> None:
    del value["rows"]


def test_what_an_entry_says_is_checked(orders: Path, searches: Callable[[], int]) -> None:
    names, _ = ordered()
    for number, change in enumerate((_swap, _slower, _bucket, _infinite, _without_rows, dict.clear)):
        rewritten(entries(orders)[0], change)
        again, report = ordered()
        assert searches() == 2 + number, change
        assert again == names
        assert any("sought anew" in note and "holds no order of this graph" in note for note in report.notes), change
        ordered()
        assert searches() == 2 + number, change  # the entry has been replaced


def test_a_damaged_entry_is_replaced(orders: Path, searches: Callable[[], int]) -> None:
    names, _ = ordered()
    path = entries(orders)[0]
    path.write_bytes(path.read_bytes()[:-100])
    again, report = ordered()
    assert (searches(), again) == (2, names)
    assert any("is damaged" in note for note in report.notes)


@pytest.mark.skipif(not Path("/proc").exists(), reason="root writes anywhere else")
def test_a_folder_that_cannot_be_written_is_said(monkeypatch: pytest.MonkeyPatch, searches: Callable[[], int]) -> None:
    monkeypatch.setenv("MESHWEAVE_CACHE", "/proc/meshweave")
    monkeypatch.setattr(recall, "_LEAST_ITEMS", 1)
    _, report = ordered()
    assert searches() == 1
    assert any("could not be" in note for note in report.notes)


def test_the_oldest_entries_go(orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recall, "_MOST_ENTRIES", 2)
    _, report = ordered()
    for k in range(3):
        ordered(memory_cap_bytes=report.peak_bytes + 1000 * (k + 1))
    assert len(entries(orders)) == 2
