"""Four microbatches with uneven labels, in other projects' own loops and in a compiled step of the whole batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshweave as mw

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning and Trainer: few workers, deprecated names of torch
ROWS, MICROS, STEPS, VOCABULARY = 16, 4, 3, 11
Batch = dict[str, Tensor]


def batches() -> Iterator[Batch]:
    """Rows of 6 tokens; of four of 16 rows, all in one microbatch, none has a label."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (ROWS, 6), generator=generator)
        keep = torch.arange(6) < torch.tensor([6, 1, 2, 0, 3, 1, 1, 1, 0, 0, 0, 0, 6, 6, 5, 2])[:, None]
        yield {"input": tokens, "labels": torch.where(keep, tokens, -100)}


def micros(batch: Batch) -> list[Batch]:
    return [
        dict(zip(batch, rows, strict=True)) for rows in zip(*(x.chunk(MICROS) for x in batch.values()), strict=True)
    ]


def language_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, VOCABULARY)).double()


def mean_of_tokens(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def sum_of_tokens(logits: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def by_accelerate(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Its recipe for a number of items: accumulate divides by the microbatches, so that the loop multiplies by them."""
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=MICROS)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    wrapped = accelerator.prepare(optimizer)
    for batch in batches():
        count = (batch["labels"] != -100).sum()
        for micro in micros(batch):
            with accelerator.accumulate(model):
                accelerator.backward(sum_of_tokens(model(micro["input"]), micro) * MICROS / count)
                wrapped.step()
                wrapped.zero_grad()


def by_lightning(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Batch, index: int) -> Tensor:
            return sum_of_tokens(model(batch["input"]), batch) * MICROS / batch["count"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    data = [micro | {"count": (batch["labels"] != -100).sum()} for batch in batches() for micro in micros(batch)]
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    trainer = lightning.Trainer(accelerator="cpu", devices=1, max_epochs=1, accumulate_grad_batches=MICROS, **quiet)
    trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=None))  # type: ignore[arg-type]


def by_torchtitan(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    pytest.importorskip("triton")
    loss = pytest.importorskip("torchtitan.components.loss")
    for batch in batches():
        count = (batch["labels"] != -100).sum()
        for micro in micros(batch):
            (loss.cross_entropy_loss(model(micro["input"]), micro["labels"]) / count).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("loop", [by_accelerate, by_lightning, by_torchtitan])
def test_a_loop_of_microbatches(loop: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
    model = language_model()
    twin = copy.deepcopy(model)
    loop(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2))
    step = mw.compile(
        model,
        loss=mean_of_tokens,
        example=next(batches()),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        mesh="fsdp=2",
        accumulate=MICROS,
    )
    for batch in batches():
        step(batch)
    for name, value in step.parameters().items():
        torch.testing.assert_close(value, twin.get_parameter(name), rtol=0, atol=1e-6)


def test_trainer_with_a_number_of_items(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from meshweave.integrations.hf import MeshweaveTrainer

    rows = [
        {"input_ids": tokens, "labels": labels}
        for batch in batches()
        for tokens, labels in zip(batch["input"], batch["labels"], strict=True)
    ]
    trained = []
    for make, more in ((Trainer, {}), (MeshweaveTrainer, {"compile_options": {"mesh": "fsdp=2"}})):
        torch.manual_seed(0)
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes)).double()
        arguments = TrainingArguments(
            str(tmp_path), per_device_train_batch_size=ROWS // MICROS, gradient_accumulation_steps=MICROS,
            num_train_epochs=1, learning_rate=1e-2, logging_steps=1, save_strategy="no", report_to=[], use_cpu=True,
            disable_tqdm=True, dataloader_pin_memory=False, train_sampling_strategy="sequential",
        )  # fmt: skip
        trainer = make(model, arguments, train_dataset=rows, **more)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "grad_norm" in entry]
        trained.append((losses, model.state_dict()))
    (plain, expected), (ours, found) = trained
    assert len(ours) == STEPS
    assert ours == pytest.approx(plain, abs=1e-4)  # Trainer rounds what it logs
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
