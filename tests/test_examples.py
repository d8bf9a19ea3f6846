"""The scripts of examples/ train as their originals for one device do (examples/before/), with six lines changed.

In float64: the gradient of a key's bias is nothing but rounding, which Adam scales to the size of a step.
"""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.stem for path in (EXAMPLES / "before").glob("*.py"))
MOST_LINES = {"lightning_gpt": 16}  # else 6; a Lightning module must say that it optimizes by itself
NEEDED = {"hf_trainer": "accelerate", "lightning_gpt": "lightning"}
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # of schedulers and of transformers


def run(script: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, *args: str) -> list[float]:
    """The last number of every line that the script prints."""
    folder.mkdir()
    monkeypatch.chdir(folder)
    spec = importlib.util.spec_from_file_location(f"example_{script.stem}", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.set_default_dtype(torch.float64)
    try:
        with patch.dict(os.environ):  # Lightning leaves LOCAL_RANK there, by which the next would be a job of its own
            module.main(*args)
    finally:
        torch.set_default_dtype(torch.float32)
    return [float(text) for text in re.findall(r"(-?\d+\.\d+)$", capsys.readouterr().out, re.M)]


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """What the script left: one file of tensors."""
    (file,) = [*folder.glob("*.pt"), *folder.glob("*/*.safetensors")]
    return load_file(file) if file.suffix == ".safetensors" else torch.load(file, weights_only=True)


def compared(name: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    if name in NEEDED:
        pytest.importorskip(NEEDED[name], reason=f"needs {NEEDED[name]}: pip install -e '.[integrations]'")
    ours = run(EXAMPLES / f"{name}.py", tmp_path / "ours", monkeypatch, capsys, mesh)
    before = run(EXAMPLES / "before" / f"{name}.py", tmp_path / "before", monkeypatch, capsys)
    assert len(before) >= 10
    assert ours == pytest.approx(before, abs=2e-6)
    mine, its = saved(tmp_path / "ours"), saved(tmp_path / "before")
    assert mine.keys() == its.keys()
    for key, value in its.items():
        torch.testing.assert_close(mine[key], value, rtol=1e-6, atol=1e-6, msg=lambda text, key=key: f"{key}: {text}")


@pytest.mark.parametrize("name", NAMES)
def test_a_script_changes_few_lines(name: str) -> None:
    before, ours = ((EXAMPLES / part / f"{name}.py").read_text().splitlines() for part in ("before", "."))
    added = [line for line in difflib.ndiff(before, ours) if line.startswith("+ ") and line.strip("+ ")]
    assert len(added) <= MOST_LINES.get(name, 6), added


@pytest.mark.slow_rows("llama-dp=2", "vit-dp=2", "resnet-dp=2")
@pytest.mark.parametrize(("name", "mesh"), [(name, "dp=2") for name in NAMES])
def test_a_script_trains_as_its_original(
    name: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    compared(name, mesh, tmp_path, monkeypatch, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", "fsdp=4", ""])
@pytest.mark.parametrize("name", NAMES)
def test_a_script_trains_as_its_original_on_other_meshes(
    name: str, mesh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    compared(name, mesh, tmp_path, monkeypatch, capsys)
