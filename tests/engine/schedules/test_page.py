"""The page on pipeline schedules: its example runs, its table has every schedule."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import meshweave as mw
from meshweave.engine.schedules import SCHEDULES
from meshweave.engine.schedules.form import TORCH_NAMES

PAGE = (Path(__file__).parents[3] / "docs" / "pipelines.md").read_text()


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    block, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.S)
    scope: dict[str, Any] = {"mw": mw}
    exec(block, scope)
    best = scope["best"]
    assert best.bound_s <= best.times.step_s <= scope["times"].step_s
    assert mw.load_schedule("best.csv").of_role == best.schedule.of_role
    assert "longest gap: rank 1 waits" in capsys.readouterr().out


def test_the_tables_are_complete() -> None:
    rows = [set(re.findall(r"`([\w-]+)`", line.split("|")[1])) for line in PAGE.splitlines() if line.startswith("| `")]
    assert set.union(*rows) == set(SCHEDULES) | set(TORCH_NAMES)
