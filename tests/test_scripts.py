"""Ordinary training scripts give the numbers of eager PyTorch, in one process and in two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Job
from tests.scripts import SCRIPTS, all_of, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of schedules, on their order of calls


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_in_one_process(name: str, tmp_path: Path) -> None:
    expected = run(name, None, tmp_path)
    assert len(expected) >= 6
    assert run(name, "fsdp=2", tmp_path) == pytest.approx(expected, abs=1e-9)


def job(pipe: Connection, mesh: str, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", UserWarning)
    return dict(all_of(mesh, Path(folder)))


@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["fsdp=2", pytest.param("dp=2", marks=pytest.mark.slow)])
def test_scripts_in_two_processes(mesh: str, start: Callable[..., Job], tmp_path: Path) -> None:
    expected = dict(all_of(None, tmp_path))
    for outcome in start(f"{__name__}:job", 2, mesh, str(tmp_path)).finish(200):
        assert outcome.keys() == expected.keys(), outcome
        for name, numbers in expected.items():
            assert outcome[name] == pytest.approx(numbers, abs=1e-9), name
