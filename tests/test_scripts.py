"""Ordinary training scripts give the numbers of eager PyTorch, in one process and in two."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Job
from tests.scripts import SCRIPTS, run

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of schedules, on their order of calls


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_in_one_process(name: str, tmp_path: Path) -> None:
    expected = run(name, None, tmp_path)
    assert len(expected) >= 6
    assert run(name, "fsdp=2", tmp_path) == pytest.approx(expected, abs=1e-9)


# What ranks do together, once each: a norm over all of them, a compile anew, evaluations and programs of other sizes,
# a checkpoint for another mesh.
TOGETHER = ["clip_schedule_average", "changed_settings", "validation", "resumed_elsewhere"]


def job(pipe: Connection, mesh: str, folder: str, names: str) -> dict[str, Any]:
    warnings.simplefilter("ignore", UserWarning)
    return {name: run(name, mesh, Path(folder)) for name in names.split()}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("mesh", "names"),
    [
        pytest.param("fsdp=2", TOGETHER, id="fsdp=2"),
        pytest.param("fsdp=2", [*SCRIPTS], marks=pytest.mark.slow, id="fsdp=2, all"),
        pytest.param("dp=2", [*SCRIPTS], marks=pytest.mark.slow, id="dp=2, all"),
    ],
)
def test_scripts_in_two_processes(mesh: str, names: list[str], start: Callable[..., Job], tmp_path: Path) -> None:
    expected = {name: run(name, None, tmp_path) for name in names}
    for outcome in start(f"{__name__}:job", 2, mesh, str(tmp_path), " ".join(names)).finish(200):
        assert outcome.keys() == expected.keys(), outcome
        for name, numbers in expected.items():
            assert outcome[name] == pytest.approx(numbers, abs=1e-9), name
