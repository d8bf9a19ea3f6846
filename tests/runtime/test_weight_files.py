"""Weights of safetensors files stream into a state, and out of it into files that Hugging Face loads."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from tests.processes import Job
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import meshweave as mw
from meshweave.errors import CheckpointError

TOKENS = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(0))


def llama(ties: bool = False, device: str = "cpu") -> LlamaForCausalLM:
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=ties, use_cache=False,
    )  # fmt: skip
    with torch.device(device):
        return LlamaForCausalLM(config)


def loss_of(out: Any, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


def trained(
    model: LlamaForCausalLM, mesh: str, weights: str | None, steps: int = 3
) -> tuple[mw.TrainStep, list[float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(
        model, loss=loss_of, example={"input_ids": TOKENS}, optimizer=optimizer, mesh=mesh, weights=weights,
        profile="alpha-beta",
    )  # fmt: skip
    return step, [float(step({"input_ids": TOKENS})) for _ in range(steps)]


def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is read whole meanwhile: nothing but numbers may be."""
    import meshweave.runtime.weight_files as module

    whole: list[tuple[str, ...]] = []

    class Opened:
        def __init__(self, *args: Any, **options: Any) -> None:
            self.file = safe_open(*args, **options)

        def __enter__(self) -> Opened:
            return self

        def __exit__(self, *args: Any) -> None:
            pass

        def get_slice(self, name: str) -> Any:
            return self.file.get_slice(name)

        def keys(self) -> Any:
            return self.file.keys()

        def get_tensor(self, name: str) -> Tensor:
            whole.append((name,))
            return self.file.get_tensor(name)

    monkeypatch.setattr(module, "safe_open", Opened)
    return whole


@pytest.mark.slow_rows("dp=2-False", "dp=2-True", "fsdp=2,tp=2-False")
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", "dp=2"])
def test_a_model_on_the_meta_device_begins_with_them(
    mesh: str, ties: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llama(ties).save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 2
    _, expected = trained(llama(ties), mesh, None)
    whole = reads(monkeypatch)
    step, losses = trained(llama(ties, "meta"), mesh, str(tmp_path / "hf"))
    assert losses == pytest.approx(expected, abs=1e-6)
    assert not whole
    step.save_pretrained(str(tmp_path / "ours"), max_file_bytes=20_000)
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    for name, value in again.named_parameters():
        assert torch.equal(value, step.parameters()[name]), name
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, step.forward_only({"input_ids": TOKENS}).logits)
    index = json.loads((tmp_path / "ours" / "model.safetensors.index.json").read_text())
    assert {p.name for p in (tmp_path / "ours").glob("*.safetensors")} == {*index["weight_map"].values()}
    step.save_pretrained(str(tmp_path / "ours"))  # into one file, in the place of those
    assert [p.name for p in (tmp_path / "ours").glob("model*")] == ["model.safetensors"]
    _, resumed = trained(llama(ties, "meta"), "dp=2", str(tmp_path / "ours"), 1)
    assert resumed[0] < losses[-1]


def test_other_dtypes_and_scalars(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    wanted = {
        n: torch.randn_like(v) if v.is_floating_point() else torch.tensor(7) for n, v in model.state_dict().items()
    }
    save_file(
        {n: v.bfloat16() if v.is_floating_point() else v for n, v in wanted.items()}, tmp_path / "model.safetensors"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = {"input": torch.randn(8, 5)}
    step = mw.compile(
        model, loss=lambda out, batch: out.sum(), example=example, optimizer=optimizer, mesh="fsdp=4",
        weights=str(tmp_path), profile="alpha-beta",
    )  # fmt: skip
    for name, value in {**step.parameters(), **step.buffers()}.items():
        assert torch.equal(value, wanted[name].to(torch.bfloat16).to(value.dtype)), name
        assert torch.equal(model.state_dict()[name], value)


class Rotated(nn.Linear):
    """Has a complex buffer, as rotary embeddings do, which forward leaves conjugated."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(4, 4)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.arange(2.0)).to(dtype))

    def forward(self, input: Tensor) -> Tensor:
        turned = torch.view_as_complex(super().forward(input).view(-1, 2, 2)) * self.turns
        self.turns = self.turns.conj()
        return torch.view_as_real(turned.conj().resolve_conj())


def test_a_complex_buffer(tmp_path: Path) -> None:
    for dtype in (torch.complex64, torch.complex128):
        model = Rotated(dtype)
        first = model.turns.clone()
        optimizer, example = torch.optim.SGD(model.parameters(), lr=0.1), {"input": torch.randn(8, 4)}
        step = mw.compile(model, loss=lambda out, _: out.sum(), example=example, optimizer=optimizer, mesh="dp=2")
        step(example)
        assert torch.equal(model.turns, first.conj())
        if dtype == torch.complex128:
            with pytest.raises(CheckpointError, match="may lack a dtype"):
                step.save_pretrained(str(tmp_path))
            continue
        step.save_pretrained(str(tmp_path))
        with safe_open(tmp_path / "model.safetensors", framework="pt") as saved:
            assert torch.equal(saved.get_tensor("turns"), first.conj())


def test_what_is_not_there_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2))

    def compiled(path: Path) -> mw.TrainStep:
        return mw.compile(
            model, loss=lambda out, batch: out.sum(), example=torch.randn(8, 5), mesh="dp=2", weights=str(path)
        )

    with pytest.raises(CheckpointError, match=r"there are no weights here"):
        compiled(tmp_path)
    save_file({"model.0.weight": torch.ones(3, 5)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"none of the model's parameters is in these files"):
        compiled(tmp_path)
    save_file({"0.weight": torch.ones(5, 3)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"another shape(.|\n)*\[5, 3\](.|\n)*\[3, 5\]"):
        compiled(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    with pytest.raises(CheckpointError, match=r"not a file of weights"):
        compiled(tmp_path)
    save_file({"0.weight": torch.ones(3, 5), "2.bias": torch.ones(1)}, tmp_path / "model.safetensors")
    with caplog.at_level(logging.WARNING):
        step = compiled(tmp_path)
    assert "3 tensors are initialised, because they are not in it: 0.bias, 1.bias, 1.weight" in caplog.text
    assert "1 tensors are not the model's: 2.bias" in caplog.text
    assert torch.equal(step.parameters()["0.weight"], torch.ones(3, 5))


# A state of 8 devices, of which this process has one: 64 MiB of 512 MiB of weights.
PEAK = """
import resource, sys, torch
from torch import nn
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.runtime.weight_files import WeightFiles
mesh = Mesh("fsdp=8")
with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False) for _ in range(8)))
files = WeightFiles.of(sys.argv[1], model)
def anonymous():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) << 10
before, held, peak = anonymous(), [], 0
for i, (name, p) in enumerate(model.named_parameters()):
    layout = Layout.of(mesh, 2, {i % 2: ["fsdp"]})
    held += files.pieces(name, [layout.box_of(p.shape, 3)], torch.float32)
    peak = max(peak, anonymous() - before)
print(peak >> 20, sum(piece.nbytes for piece in held) >> 20)
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_process_has_its_pieces_alone_in_memory(tmp_path: Path) -> None:
    index: dict[str, str] = {}
    for i in range(8):
        save_file({f"{i}.weight": torch.full((4096, 4096), float(i))}, tmp_path / f"{i}.safetensors")
        index[f"{i}.weight"] = f"{i}.safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    shown = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True).stdout
    peak, pieces = map(int, shown.split())
    assert pieces == 64
    assert peak < 80, shown


def job(pipe: Connection, folder: str) -> dict[str, Any]:
    step, losses = trained(llama(device="meta"), "fsdp=2", f"{folder}/hf")
    step.save_pretrained(f"{folder}/ours", max_file_bytes=20_000)
    return {"losses": losses}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes(start: Callable[..., Job], tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "hf", max_shard_size="20KB")
    step, expected = trained(llama(), "fsdp=2", None)
    for outcome in start(f"{__name__}:job", 2, str(tmp_path)).finish(90):
        assert outcome.get("losses") == pytest.approx(expected, abs=1e-6), outcome
    again = LlamaForCausalLM.from_pretrained(tmp_path / "ours")
    for name, value in again.named_parameters():
        torch.testing.assert_close(value.detach(), step.parameters()[name])
