"""A script of examples/ in several processes: every rank prints what the original prints on one device."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import Job
from tests.test_examples import EXAMPLES, NAMES, NEEDED, run

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning")]


def job(pipe: Connection, name: str, mesh: str, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    own = Path(folder) / str(dist.get_rank())
    own.mkdir()
    os.chdir(own)
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float64)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        module.main(mesh)
    return {"losses": [float(text) for text in re.findall(r"(-?\d+\.\d+)$", out.getvalue(), re.M)]}


@pytest.mark.parametrize(("mesh", "num_ranks"), [("dp=2", 2), ("fsdp=2", 2)])
@pytest.mark.parametrize("name", NAMES)
def test_a_script_in_several_processes_trains_as_its_original(
    name: str,
    mesh: str,
    num_ranks: int,
    start: Callable[..., Job],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: Any,
) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"needs {NEEDED[name]}: pip install -e '.[integrations]'")
    outcomes = start(f"{__name__}:job", num_ranks, name, mesh, str(tmp_path)).finish(240)
    before = run(EXAMPLES / "before" / f"{name}.py", tmp_path / "before", monkeypatch, capsys)
    assert len(before) >= 10
    for outcome in outcomes:
        assert "error" not in outcome, outcome["text"]
        assert outcome["losses"] == pytest.approx(before, abs=2e-6)
