"""compile(passes="overlap"): equal to the bit, never slower, under the cap; and what is refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Made, cnn, hugging_face, make, mlp
from typer.testing import CliRunner

import meshweave as mw
from meshweave.cli import app
from meshweave.cli.job import parse_bytes
from meshweave.errors import MeshweaveError
from meshweave.passes import Overlap

TINY = "hf:llama?hidden_size=16&num_hidden_layers=2&num_attention_heads=2&intermediate_size=32&vocab_size=64"


def compiled(made: Made, mesh: str, **options: Any) -> mw.TrainStep:
    model = copy.deepcopy(made[0])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    settings = {"profile": "h100", **options}
    return mw.compile(model, loss=made[2], example=made[1], optimizer=optimizer, mesh=mesh, **settings)


def tensors(step: mw.TrainStep) -> dict[str, torch.Tensor]:
    return {**step.parameters(), **step.buffers(), **step.optimizer_state()}


LLAMA = partial(hugging_face, "llama", batch=4, heads=4)
ONCE = {"passes": "overlap"}
CASES: dict[str, tuple[Callable[[], Made], str, dict[str, Any]]] = {
    "dp": (mlp, "dp=2", {}),
    "fsdp, clipped, on a CPU cluster": (
        partial(mlp, batch=8),
        "fsdp=4",
        {"clip_grad_norm": 0.1, "profile": "cpu-gloo"},
    ),
    "fsdp x tp, cast": (
        partial(mlp, batch=8),
        "fsdp=2,tp=2",
        {"precision": mw.Precision(autocast=torch.bfloat16, reduce_after_cast=True), **ONCE},
    ),
    "pp x fsdp": (partial(mlp, batch=8), "pp=2,fsdp=2", {"passes": "overlap"}),
    "microbatches": (partial(mlp, batch=8), "fsdp=2", {"accumulate": 2, **ONCE}),
    "buffers": (partial(cnn, batch=4), "dp=2", ONCE),
}
SLOW: dict[str, tuple[Callable[[], Made], str, dict[str, Any]]] = {
    f"{name} {mesh}": (partial(make, name), mesh, options)
    for name in ("llama", "gpt2", "mlp")
    for mesh, options in (
        ("dp=2,fsdp=2,tp=2", {"accumulate": 1}),
        ("fsdp=4", {"clip_grad_norm": 1.0}),
        ("pp=2,fsdp=2", {}),
    )
    if (name, mesh) != ("mlp", "pp=2,fsdp=2")
} | {
    "dp of llama": (LLAMA, "dp=2", {}),
    "tp of llama": (LLAMA, "tp=2", {}),
    "fsdp x tp of llama, cast": (LLAMA, "fsdp=2,tp=2", {"precision": torch.bfloat16}),
    "fsdp x tp of llama, reduced after the cast": (
        LLAMA,
        "fsdp=2,tp=2",
        {"precision": mw.Precision(autocast=torch.bfloat16, reduce_after_cast=True), **ONCE},
    ),
    "pp x fsdp of llama": (LLAMA, "pp=2,fsdp=2", {}),
    "recompute, prefetch": (LLAMA, "fsdp=2", {"passes": "recompute=full,prefetch=1,overlap"}),
    "fsdp of llama, on a CPU cluster": (LLAMA, "fsdp=4", {"profile": "cpu-gloo"}),
}
ALL = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.slow_rows(
    "dp", "fsdp x tp, cast", "buffers", "fsdp, clipped, on a CPU cluster", "pp x fsdp", "microbatches"
)
@pytest.mark.parametrize("case", ALL)
def test_values_are_the_same_to_the_bit(case: str) -> None:
    build, mesh, options = {**CASES, **SLOW}[case]
    made = build()
    asked = options.get("passes", "overlap")
    others = ",".join(text for text in asked.split(",") if text != "overlap") or "none"
    plain, ordered = (compiled(made, mesh, **{**options, "passes": passes}) for passes in (others, asked))
    assert plain.program.overlap == ()
    assert plain.program.roles == plain.program.expanded
    assert len(ordered.program.overlap) == len(ordered.program.expanded) == len(ordered.program.roles)
    before, after = (mw.simulate(step.program, options.get("profile", "h100")) for step in (plain, ordered))
    assert after.seconds <= before.seconds
    assert any(a.text() != b.text() for a, b in zip(ordered.program.roles, plain.program.roles, strict=True))
    for _ in range(2):
        assert plain(made[1]) == ordered(made[1])
    expected = tensors(plain)
    assert expected.keys() == tensors(ordered).keys()
    for name, value in tensors(ordered).items():
        assert torch.equal(value, expected[name]), name


@pytest.mark.slow
def test_gradients_and_checkpoints(tmp_path: Path) -> None:
    made = mlp(batch=8)
    plain, ordered = (compiled(made, "fsdp=2", **how, run=mw.RunOptions(keep_gradients=True)) for how in ({}, ONCE))
    for _ in range(2):
        assert plain(made[1]) == ordered(made[1])
    for name, value in ordered.gradients().items():
        assert torch.equal(value, plain.gradients()[name]), name
    ordered.save(str(tmp_path / "ckpt"))
    other = compiled(made, "tp=2", **ONCE)
    other.load(str(tmp_path / "ckpt"))
    assert other(made[1]) == pytest.approx(plain(made[1]).item(), rel=1e-5)


def test_a_measured_step_shows_every_communication() -> None:
    made = mlp(batch=8)
    step = compiled(made, "fsdp=2", **ONCE)
    found = step.trace(made[1])
    modelled = mw.simulate(step.program, "h100")
    kinds = [[s.op for s in one.spans if s.kind != "compute"] for one in (found, modelled)]
    assert sorted(set(kinds[0])) == sorted(set(kinds[1]))
    assert len(kinds[0]) >= len(kinds[1]) > 0


def test_memory_cap() -> None:
    made = mlp(batch=8)
    simple = [Overlap(bucket=False)]
    free = compiled(made, "fsdp=2", passes=simple).program.overlap[0]
    capped = compiled(made, "fsdp=2", passes=simple, memory_cap_bytes=free.peak_before).program.overlap[0]
    assert capped.cap_bytes == free.peak_before
    assert capped.peak_bytes <= free.peak_before
    with pytest.raises(MeshweaveError) as error:
        compiled(made, "fsdp=2", memory_cap_bytes=100)
    assert "memory_cap_bytes=" in str(error.value)
    assert "the largest tensors" in str(error.value)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"passes": "overlap", "profile": None}, "AlphaBeta"),
        ({"memory_cap_bytes": 1 << 30, "profile": mw.AlphaBeta()}, "machine profile"),
        ({"memory_cap_bytes": 0}, "not a size"),
    ],
)
def test_bad_input(options: dict[str, Any], word: str) -> None:
    with pytest.raises(MeshweaveError) as error:
        compiled(mlp(batch=8), "fsdp=2", **options)
    assert word in str(error.value)


# the command line


NET = """
import torch
from torch import nn

def net(batch: int = 16):
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    return model, lambda i: (torch.full((batch, 64), i + 1.0) + torch.arange(64),), lambda out, _: (out * out).mean()
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "net.py"
    path.write_text(NET)
    return f"{path}:net"


def answer(*arguments: str) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_simulate_shows_before_and_after(net: str) -> None:
    plain = answer("simulate", net, "--mesh", "fsdp=8", "--passes", "none")
    found = answer("simulate", net, "--mesh", "fsdp=8", "--passes", "overlap")
    (gain,) = found["overlap"]
    assert gain["seconds_before"] == plain["seconds"]
    assert gain["seconds"] == found["seconds"] < plain["seconds"]
    assert gain["roles"][0]["num_merged"] > 2
    shown = CliRunner().invoke(app, ["simulate", net, "--mesh", "fsdp=8", "--passes", "overlap", "-v"]).output
    assert "overlap: step" in shown
    assert "merged into" in shown


@pytest.mark.slow
def test_explain_finds_the_parts_of_what_was_merged(net: str) -> None:
    """On 8 devices a layer weighs 16 KiB, next to nothing beside a latency: whatever the order, some is merged."""
    explain = ("explain", net, "--mesh", "fsdp=8", "--passes", "overlap")
    merged = [row["merged"] for row in answer(*explain)["communications"] if "merged" in row]
    assert merged
    named = answer(*explain, "--why", merged[0][-1])["communications"]
    assert merged[0] in [row["merged"] for row in named if "merged" in row]


@pytest.mark.slow
def test_run_and_check(net: str) -> None:
    run = ("run", net, "--mesh", "fsdp=2", "--steps", "2")
    costs = ("--profile", "h100")
    assert (
        answer(*run, *costs)["losses"] == answer(*run, *costs, "--passes", "overlap", "--memory-cap", "40GB")["losses"]
    )
    found = answer("check", net, "--mesh", "fsdp=2", "--passes", "overlap", "--profile", "h100", "--steps", "1")
    assert found["ok"]
    assert CliRunner().invoke(app, [*run, "--passes", "overlap"]).exit_code == 2  # no costs of compute


def test_sizes() -> None:
    sizes = {"40GB": 40 * 10**9, "37.5GiB": int(37.5 * 2**30), "1e9": 10**9, "512 mib": 2**29, "7": 7}
    assert {text: parse_bytes(text) for text in sizes} == sizes
    for text in ("", "GB", "4 lightyears", "1.2.3GB", "-4GB"):
        with pytest.raises(MeshweaveError, match="not a size"):
            parse_bytes(text)
