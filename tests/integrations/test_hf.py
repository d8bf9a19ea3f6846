"""Hugging Face's Trainer on compiled steps trains as the plain one; checkpoints of either continue in the other."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.processes import Job
from torch import Tensor, nn

pytest.importorskip("accelerate", reason="Trainer needs accelerate: pip install -e '.[integrations]'")
from accelerate.utils import TorchDynamoPlugin
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import meshweave as mw
from meshweave.errors import LayoutError
from meshweave.integrations.hf import MeshweaveTrainer, cut_rows
from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


def model_of(seed: int = 0, is_tied: bool = False) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, attention_dropout=0.0, tie_word_embeddings=is_tied,
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


class Classifier(nn.Module):
    """A model whose loss is a mean over the rows of a microbatch, and that normalises over them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.cross_entropy(self.layers(x), labels)}


class Lenient(Classifier):
    """As most classifiers of transformers: takes the number of items, and does not divide by it."""

    def forward(self, x: Tensor, labels: Tensor, **kwargs: Any) -> dict[str, Tensor]:
        return super().forward(x, labels)


def points(num: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [{"x": torch.randn(5, generator=generator), "labels": torch.tensor(i % 3)} for i in range(num)]


@pytest.mark.slow_rows("Classifier-15-2")
@pytest.mark.parametrize(
    ("model", "num_rows", "accumulate"), [(Classifier, 15, 2), (Classifier, 23, 4), (Lenient, 23, 4)]
)
def test_a_smaller_last_microbatch_counts_as_much_as_the_others(
    tmp_path: Path, model: type[Classifier], num_rows: int, accumulate: int
) -> None:
    """Trainer averages the losses of microbatches, or adds them up if forward takes the number of items."""
    data = points(num_rows)
    options = {"gradient_accumulation_steps": accumulate, "num_train_epochs": 2, "save_strategy": "no"}
    trained = []
    for make, more in ((Trainer, {}), (MeshweaveTrainer, {"compile_options": {"mesh": "dp=2"}})):
        torch.manual_seed(0)
        trainer = make(model(), arguments(tmp_path, **options), train_dataset=data, **more)
        trained.append((history(trainer), trainer.model.state_dict()))
    (plain, expected), (ours, found) = trained
    assert_same(ours, plain)
    for name, value in expected.items():
        assert torch.allclose(found[name], value, atol=1e-5), name


def test_the_norm_of_gradients_is_logged_without_a_clip(tmp_path: Path) -> None:
    options = {"max_grad_norm": 0.0, "save_strategy": "no"}
    trained = []
    for make, more in ((Trainer, {}), (MeshweaveTrainer, {"compile_options": {"mesh": "dp=2"}})):
        torch.manual_seed(0)
        trained.append(history(make(Lenient(), arguments(tmp_path, **options), train_dataset=points(24), **more)))
    assert_same(*trained)


def test_a_call_of_train_begins_without_the_microbatches_of_an_interrupted_call(tmp_path: Path) -> None:
    class Interrupted(Exception):
        pass

    class Interrupt(TrainerCallback):
        def on_substep_end(self, *args: Any, **kwargs: Any) -> None:
            raise Interrupted

    trained = []
    for make, more in ((Trainer, {}), (MeshweaveTrainer, {"compile_options": {"mesh": "dp=2"}})):
        torch.manual_seed(0)
        trainer = make(Classifier(), arguments(tmp_path, save_strategy="no"), train_dataset=points(24), **more)
        trainer.add_callback(Interrupt)
        with pytest.raises(Interrupted):
            trainer.train()
        trainer.remove_callback(Interrupt)
        trained.append(history(trainer))
    assert_same(*trained)


def test_processes_divide_by_the_same_number_of_tokens(tmp_path: Path) -> None:
    options = arguments(tmp_path, average_tokens_across_devices=False)
    trainer = MeshweaveTrainer(Lenient(), options, compile_options={"mesh": "dp=2"})
    counts = torch.tensor([5.0, 5.0])
    trainer.accelerator = SimpleNamespace(num_processes=2, gather=lambda mine: counts)
    assert trainer._count(5) == 5
    counts[1] = 7
    with pytest.raises(LayoutError, match=r"5 on rank 0, 7 on rank 1(.|\n)*average_tokens_across_devices=True"):
        trainer._count(5)


def test_microbatches_are_cut_from_the_rows_of_each_process() -> None:
    batch = {"x": torch.tensor([[1], [2], [3], [11], [12], [13]]), "scale": torch.ones(())}
    first, last = cut_rows(batch, (2, 1), 2)
    assert first["x"].flatten().tolist() == [1, 2, 11, 12]
    assert last["x"].flatten().tolist() == [3, 13]
    assert last["scale"] == 1


def test_microbatches_of_other_sizes_in_each_step_are_an_error(tmp_path: Path) -> None:
    trainer = MeshweaveTrainer(model_of(), arguments(tmp_path), compile_options={"mesh": "dp=2"})
    assert [trainer._accumulate(each) for each in ([4, 4], [4, 2], [4], [2])] == [2, 1, 1, 1]
    with pytest.raises(LayoutError, match="different numbers of rows"):
        trainer._accumulate([2, 4])


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
        model_of(is_tied=True),
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
    plain = Trainer(model_of(is_tied=True), arguments(tmp_path / "plain", save_strategy="no"), train_dataset=rows())
    expected = history(plain)
    for outcome in outcomes:
        assert "error" not in outcome, outcome["text"]
    assert_same(outcomes[0]["losses"], expected)
    resumed = Trainer(model_of(is_tied=True), arguments(tmp_path / "resumed", save_strategy="no"), train_dataset=rows())
    with safe_open(tmp_path / "job/checkpoint-3/model.safetensors", "pt") as file:
        assert "lm_head.weight" not in file.keys()  # noqa: SIM118
    assert_same(history(resumed, resume_from_checkpoint=str(tmp_path / "job/checkpoint-3")), expected)
