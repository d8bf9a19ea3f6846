"""Hugging Face's Trainer with a compiled training step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer

from meshweave.compile import compile
from meshweave.errors import LayoutError
from meshweave.runtime.state import full_tensors
from meshweave.train_step import TrainStep

_NUM_ITEMS = "num_items_in_batch"
_NUM_MICROS = "number of microbatches"  # where Trainer adds up their losses


class MeshweaveTrainer(Trainer):
    """Trainer(...) with `compile_options=`, the arguments of `mw.compile` (mesh, plan, passes, ...).

    The model is not wrapped, and its tensors are the step's state, so that evaluation, callbacks and checkpoints are
    the Trainer's own. Loss (`compute_loss`), optimizer, schedule, gradient clip and accumulation are those of Trainer
    and its arguments. Under torchrun each process passes its own rows, and checkpoints contain whole tensors.
    """

    def __init__(self, *args: Any, compile_options: Mapping[str, Any], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compile_options = dict(compile_options)
        self.optimizer: Any
        self.step: TrainStep | None = None
        self._micros: list[dict[str, Any]] = []
        self._rows = 0  # of a microbatch on a process
        self._cuts: dict[int, tuple[int, ...]] = {}  # rows of each microbatch, by their sum
        # Accelerate does not change a model that it has prepared already: no DistributedDataParallel around it.
        self.accelerator.prepare_model(self.model, evaluation_mode=True)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Trainer's own, without microbatches that an interrupted call has left."""
        self._micros = []
        return super().train(*args, **kwargs)

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], num_items_in_batch: Tensor | int | None = None
    ) -> Tensor:
        """Loss, gradients and update of the microbatches since the last update, if an update is due."""
        model.train()
        self._micros.append(self._prepare_inputs(inputs))
        loss = torch.zeros((), device=self.args.device)
        if not self.accelerator.sync_gradients:
            return loss
        micros, self._micros = self._micros, []
        accumulate = self._accumulate([rows_of(micro) for micro in micros])
        self._rows = rows_of(micros[0]) if accumulate > 1 else sum(map(rows_of, micros))
        batch = joined(micros)
        if num_items_in_batch is not None:
            # Trainer averages the losses of processes, each of which divides by this number: all rows do so at once.
            batch[_NUM_ITEMS] = self._count(num_items_in_batch) * self.accelerator.num_processes
        if self._adds_up(num_items_in_batch):
            batch[_NUM_MICROS] = torch.tensor(float(len(micros)))
        return loss + self._step_for(batch, accumulate)(batch, accumulate=accumulate)

    def _accumulate(self, rows: list[int]) -> int:
        """The number of microbatches that the step cuts a batch into: all if they have the same number of rows. If not
        (the last of an epoch has fewer), the step runs each in turn within one forward (`_loss_of`)."""
        parts = len(rows) if len(set(rows)) == 1 else 1
        cut = tuple(rows) if parts == 1 else (rows[0],)
        if self._cuts.setdefault(sum(cut), cut) == cut:
            return parts
        raise LayoutError(
            "microbatches of a step have different numbers of rows",
            where="gradient_accumulation_steps",
            got=", ".join(map(str, rows)),
            expected="the same number, so that the mean of their losses is that of their rows",
            hint="drop the last, smaller batch (dataloader_drop_last=True), or make batches equal",
        )

    def _count(self, num_items: Tensor | int) -> Tensor:
        """The number that Trainer divides losses by. Raises LayoutError if it differs between processes."""
        count = torch.as_tensor(num_items, dtype=torch.float32, device=self.args.device)
        if not self.args.average_tokens_across_devices and self.accelerator.num_processes > 1:
            counts = self.accelerator.gather(count.reshape(1)).tolist()
            if len(set(counts)) > 1:
                raise LayoutError(
                    "processes divide their losses by different numbers of tokens",
                    where="average_tokens_across_devices=False",
                    got=", ".join(f"{each:g} on rank {rank}" for rank, each in enumerate(counts)),
                    expected="the loss of the global batch, divided by the tokens of all processes",
                    hint="TrainingArguments(average_tokens_across_devices=True), Trainer's default",
                )
        return count

    def _adds_up(self, num_items: Tensor | int | None) -> bool:
        """Whether Trainer adds up the losses of microbatches, rather than average them (`Trainer.training_step`)."""
        stated = getattr(self, "loss_is_scaled_for_ga", None)
        if stated is not None:
            return bool(stated)
        return self.compute_loss_func is not None or (self.model_accepts_loss_kwargs and num_items is not None)

    def _step_for(self, batch: dict[str, Any], accumulate: int) -> TrainStep:
        """The compiled step of the present optimizer: each call of `train` may have another."""
        optimizer = self.optimizer.optimizer
        if self.step is None or self.step.optimizer is not optimizer:
            options = {
                "batch": "local",
                "clip_grad_norm": self.args.max_grad_norm or math.inf,  # Trainer logs the norm without a clip, too
                "accumulate": accumulate,
                "forward": self._loss_of,
                **self.compile_options,
            }
            self.step = compile(self.model, loss=lambda out, batch: out, example=batch, optimizer=optimizer, **options)
        return self.step

    def _loss_of(self, model: nn.Module, batch: dict[str, Any]) -> Tensor:
        """The loss of a step's part: the mean over its microbatches of their losses (of each times the number of all,
        where Trainer adds them up)."""
        inputs = {key: value for key, value in batch.items() if key not in (_NUM_ITEMS, _NUM_MICROS)}
        count, processes = batch.get(_NUM_ITEMS), self.accelerator.num_processes
        rows = rows_of(inputs) // processes
        micros = cut_rows(inputs, self._cuts.get(rows, (rows,)), processes)
        losses = [self.compute_loss(model, micro, num_items_in_batch=count) for micro in micros]
        loss = losses[0] if len(losses) == 1 else torch.stack(losses).mean()
        # of the whole batch it is the sum already
        return loss * batch[_NUM_MICROS] if _NUM_MICROS in batch and rows == self._rows else loss

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return self.step.metrics.get("grad_norm") if self.step is not None else None

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._clip_grad_norm(model) if grad_norm is None else grad_norm

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = full_tensors(self.model.state_dict())
            first: dict[Tensor, str] = {}
            for name, parameter in self.model.named_parameters(remove_duplicate=False):  # tied weights stay tied
                state_dict[name] = state_dict[first.setdefault(parameter, name)]
        super()._save(output_dir, state_dict)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        optimizer = self.optimizer
        state = full_tensors(optimizer.state_dict())
        self.optimizer = SimpleNamespace(state_dict=lambda: state)
        try:
            super()._save_optimizer_and_scheduler(output_dir)
        finally:
            self.optimizer = optimizer


def rows_of(batch: Mapping[str, Any]) -> int:
    """Number of rows: size of dim 0 of its first tensor that has dims."""
    return next(int(value.shape[0]) for value in batch.values() if isinstance(value, Tensor) and value.dim())


def cut_rows(batch: Mapping[str, Any], sizes: tuple[int, ...], processes: int = 1) -> list[dict[str, Any]]:
    """The microbatches of a batch in which each process has `sizes` rows, the first process first; entries without
    rows are in each."""
    if len(sizes) == 1:
        return [dict(batch)]
    parts: list[dict[str, Any]] = [dict(batch) for _ in sizes]
    for key, value in batch.items():
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == sum(sizes) * processes:
            own = value.unflatten(0, (processes, sum(sizes)))
            for part, piece in zip(parts, own.split(sizes, 1), strict=True):
                part[key] = piece.flatten(0, 1)
    return parts


def joined(micros: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of several microbatches as a single batch. Raises LayoutError if their other dims differ."""
    if len(micros) == 1:
        return dict(micros[0])
    shapes = [
        {key: tuple(value.shape[1:]) for key, value in micro.items() if isinstance(value, Tensor)} for micro in micros
    ]
    if any(shape != shapes[0] for shape in shapes):
        raise LayoutError(
            "microbatches of a step have different shapes",
            where="gradient_accumulation_steps",
            got=", ".join(str(shape) for shape in shapes[:2]),
            expected="rows of equal length",
            hint="pad them to the same length (padding='max_length' in the collator)",
        )
    return {key: torch.cat([micro[key] for micro in micros]) for key in micros[0]}
