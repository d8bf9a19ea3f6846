"""Hugging Face's Trainer on compiled steps trains as the plain one; checkpoints of either continue in the other."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Job
from torch import Tensor

pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install -e '.[integrations]'")
from accelerate.utils import TorchDynamoPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import meshweave as mw
from meshweave.integrations.hf import MeshweaveTrainer
from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def model_of(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.0,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def rows(num: int = 44) -> list[dict[str, Tensor]]:
    """Rows of 12 tokens; a varying number of them has no label."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for i in range(num):
        tokens = torch.randint(0, 64, (12,), generator=generator)
        labels = tokens.clone()
        labels[: i % 5] = -100
        found.append({"input_ids": tokens, "labels": labels})
    return found


def arguments(folder: Path, **options: Any) -> TrainingArguments:
    usual = {
        "per_device_train_batch_size": 4, "num_train_epochs": 1, "learning_rate": 3e-3, "weight_decay": 0.1,
        "warmup_steps": 2, "max_grad_norm": 0.5, "logging_steps": 1, "save_steps": 3, "report_to": [], "use_cpu": True,
        "gradient_accumulation_steps": 2, "disable_tqdm": True, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(output_dir=str(folder), **(usual | options))


def history(trainer: Trainer, **options: Any) -> list[tuple[float, float, float]]:
    """Loss, gradient norm and learning rate of every step."""
    trainer.train(**options)
    return [
        (entry["loss"], entry["grad_norm"], entry["learning_rate"])
        for entry in trainer.state.log_history
        if "grad_norm" in entry
    ]


def assert_same(ours: list[tuple[float, float, float]], plain: list[tuple[float, float, float]]) -> None:
    assert len(ours) == len(plain) > 2
    for mine, its in zip(ours, plain, strict=True):
        assert mine == pytest.approx(its, abs=1e-5)


def test_trains_as_the_plain_trainer(tmp_path: Path) -> None:
    """Accumulation (the last step of fewer microbatches and rows), clip, schedule, weight decay, evaluation."""
    options = {"train_dataset": rows(), "eval_dataset": rows(8)}
    plain = Trainer(model_of(), arguments(tmp_path / "plain"), **options)
    ours = MeshweaveTrainer(
        model_of(), arguments(tmp_path / "ours"), compile_options={"mesh": "fsdp=2,tp=2"}, **options
    )
    expected = history(plain)
    assert_same(history(ours), expected)
    assert ours.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], abs=1e-5)
    mine = ours.model.state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(mine[name], value, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_of_either_continues_in_the_other(ours_first: bool, tmp_path: Path) -> None:
    def trainer(is_ours: bool, folder: str) -> Trainer:
        if is_ours:
            return MeshweaveTrainer(
                model_of(), arguments(tmp_path / folder), train_dataset=rows(), compile_options={"mesh": "fsdp=2"}
            )
        return Trainer(model_of(), arguments(tmp_path / folder), train_dataset=rows())

    whole = history(trainer(ours_first, "first"))
    resumed = history(trainer(not ours_first, "second"), resume_from_checkpoint=str(tmp_path / "first/checkpoint-3"))
    assert_same(resumed, whole)


def test_the_drop_in_compiles_a_model_of_the_plain_trainer(tmp_path: Path) -> None:
    """By `model.compile`: `torch_compile_backend=` takes names that Accelerate knows, and no other."""
    options = {"num_train_epochs": 0.3, "gradient_accumulation_steps": 1}
    plain = Trainer(model_of(), arguments(tmp_path / "plain", **options), train_dataset=rows())
    dropped = model_of()
    dropped.compile(backend=mw.backend(inner="aot_eager"))
    assert_same(
        history(Trainer(dropped, arguments(tmp_path / "ours", **options), train_dataset=rows())), history(plain)
    )
    with pytest.raises(ValueError, match="MESHWEAVE"):
        TorchDynamoPlugin(backend="meshweave")


def job_trainer(pipe: Connection, mesh: str, folder: str) -> dict[str, Any]:
    """A checkpoint in the middle, and the loss of every step."""
    trainer = MeshweaveTrainer(
        model_of(),
        arguments(Path(folder), per_device_train_batch_size=2),
        train_dataset=rows(),
        compile_options={"mesh": mesh, "profile": "alpha-beta"},
    )
    losses = history(trainer)
    shutdown(trainer.step.session.world)
    return {"losses": losses}


@pytest.mark.multiprocess
def test_processes_train_as_one_and_their_checkpoint_continues_in_one(
    tmp_path: Path, start: Callable[..., Job]
) -> None:
    """Sharded parameters and optimizer state: the checkpoint has whole tensors."""
    outcomes = start("tests.integrations.test_hf:job_trainer", 2, "fsdp=2", str(tmp_path / "job")).finish(280)
    plain = Trainer(model_of(), arguments(tmp_path / "plain", save_strategy="no"), train_dataset=rows())
    expected = history(plain)
    for outcome in outcomes:
        assert "error" not in outcome, outcome["text"]
    assert_same(outcomes[0]["losses"], expected)
    resumed = Trainer(model_of(), arguments(tmp_path / "resumed", save_strategy="no"), train_dataset=rows())
    assert_same(history(resumed, resume_from_checkpoint=str(tmp_path / "job/checkpoint-3")), expected)
