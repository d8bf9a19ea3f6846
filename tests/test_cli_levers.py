"""What `meshweave simulate` advises for a step that does not fit: followed to the letter, the step fits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshweave.cli import app

MODEL = (
    "hf:llama?num_hidden_layers=2&hidden_size=64&intermediate_size=128&num_attention_heads=4&num_key_value_heads=4"
    "&vocab_size=512"
)
NET = """
import torch
from torch import nn

def net(batch: int = 4096):
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    return model, (torch.zeros(batch, 64),), lambda out, _: (out * out).mean()
"""
RESERVED = 2 * 10**9  # bytes of an H100 that the profile leaves to the system


def simulated(model: str, *options: str, mesh: str = "") -> dict[str, Any]:
    words = ("simulate", model, *(("--mesh", mesh) if mesh else ()), *options, "--json")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found | {"shown": result.stderr}


def peak(model: str, *options: str, mesh: str) -> int:
    return int(simulated(model, *options, "--passes", "none", mesh=mesh)["peak_bytes"])


def followed(model: str, mesh: str, room: float, *options: str) -> list[str]:
    """The options of the levers; each lever was run and fits."""
    scale = ("--scale", f"memory_bytes={RESERVED + room}")
    first = simulated(model, *options, *scale, mesh=mesh)
    assert not first["fits"]
    assert first["mfu"] is None
    levers = []
    for line in first["advice"]:
        lever, _, needs = line.rpartition(": ")
        words = lever.split()
        kept = [] if "--local-batch" in words else [*options]
        second = simulated(model, *kept, *words, *scale, mesh="" if "--mesh" in words else mesh)
        assert second["fits"], (line, second["verdict"])
        assert batch(second) == batch(first), line
        assert float(needs.split()[0]) > 0
        levers.append(lever)
    return levers


def batch(found: dict[str, Any]) -> str:
    """The number of rows that all microbatches have together, as the command says it."""
    assumed = found["shown"].partition("global batch ")[2].partition(";")[0].replace("\n", " ")
    rows, times = assumed.partition("[")[2].partition(",")[0], assumed.partition("in each of ")[2].split()[:1]
    return str(int(rows) * int(times[0] if times else 1))


def test_activations_that_do_not_fit() -> None:
    options = ("--batch", "16", "--seq", "128")
    model = MODEL.replace("vocab_size=512", "vocab_size=128")  # most of the memory is activations of layers
    levers = followed(model, "fsdp=2", 0.7 * peak(model, *options, mesh="fsdp=2"), *options)
    assert [words.split()[0] for words in levers] == ["--passes", "--accumulate", "--mesh"]
    assert levers[2].startswith("--mesh fsdp=")


@pytest.mark.slow
def test_the_batch_is_named_where_the_mesh_decided_it() -> None:
    room = 0.6 * peak(MODEL, "--seq", "256", mesh="fsdp=2")
    levers = followed(MODEL, "fsdp=2", room, "--seq", "256")
    assert levers
    assert all("--batch 2" in lever for lever in levers)


@pytest.mark.slow
def test_a_batch_per_device_stays_the_global_batch() -> None:
    options = ("--local-batch", "8", "--seq", "128")
    room = 0.45 * peak(MODEL, *options, mesh="fsdp=2")
    found = simulated(MODEL, *options, "--scale", f"memory_bytes={RESERVED + room}", mesh="fsdp=2")
    (lever,) = [line.rpartition(": ")[0] for line in found["advice"] if "--accumulate" in line]
    local, times = (int(lever.split()[lever.split().index(name) + 1]) for name in ("--local-batch", "--accumulate"))
    assert local * times == 8


@pytest.mark.slow
def test_parameters_that_do_not_fit_are_sharded() -> None:
    model = MODEL.replace("vocab_size=512", "vocab_size=60000")
    options = ("--batch", "8", "--seq", "16")
    persistent = 3 * 4 * 60000 * 64 * 2
    levers = followed(model, "dp=8", 0.8 * persistent, *options)
    assert levers[0] == "--mesh fsdp=8"


def test_a_factory_s_own_batch_is_accumulated(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    model = f"{tmp_path}/net.py:net"
    levers = followed(model, "fsdp=2", 0.6 * peak(model, mesh="fsdp=2"))
    assert any(lever.startswith("--accumulate ") for lever in levers)


def test_what_nothing_makes_fit_says_how_much_it_needs() -> None:
    found = simulated(MODEL, "--batch", "2", "--seq", "16", "--scale", "memory_bytes=2.00001e9", mesh="fsdp=2")
    assert len(found["advice"]) == 1
    assert "the least is" in found["advice"][0]


def test_no_mesh_is_best_if_none_fits() -> None:
    words = ("simulate", MODEL, "--mesh", "fsdp=2", "--mesh", "dp=2", "--seq", "16", "--scale", "memory_bytes=2.0e9")
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "best" not in result.output
