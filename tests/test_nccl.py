"""The benchmark of ranks that share a GPU (benchmarks/nccl.py), on processors."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from tests.processes import Job

ROOT = Path(__file__).parents[1]


def job(pipe: Connection, index: str, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    benchmark = importlib.import_module("nccl")
    row: dict[str, Any] = benchmark.check(replace(benchmark.CASES[2][int(index)], passes="none"), folder)
    return row


@pytest.mark.multiprocess
def test_a_case_is_right(start: Callable[..., Job], tmp_path: Path) -> None:
    for row in start(f"{__name__}:job", 2, "0", str(tmp_path)).finish(120):
        assert row["failure"] == "", row
        assert row["error"] <= 1e-6


@pytest.mark.slow
@pytest.mark.multiprocess
def test_cases_and_ways() -> None:
    command = [sys.executable, "benchmarks/nccl.py", "--device=cpu", "--quick", "--json", "--only=fsdp"]
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert table["failures"] == []
    assert {row["case"] for row in table["cases"]} >= {"fsdp=2", "fsdp=2, accumulate=2"}
    (row,) = table["rows"]
    assert row["collectives"]["FSDP2"] > 0
    assert row["collectives"]["meshweave"] > 0
