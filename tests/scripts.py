"""Ordinary training scripts, each written once: on eager PyTorch, and on a compiled step in place of its loop body."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import meshweave as mw

Batch = tuple[Tensor, ...]
Loss = Callable[[Any, Any], Tensor]
NUM_ROWS = 70


def data(batch_size: int, shuffle: bool = True, drop_last: bool = True, num_rows: int = NUM_ROWS) -> DataLoader[Any]:
    draw = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(NUM_ROWS, 12, generator=draw), torch.randint(0, 5, (NUM_ROWS,), generator=draw))
    rows = TensorDataset(*(tensor[:num_rows] for tensor in rows.tensors))
    return DataLoader(rows, batch_size, shuffle, drop_last=drop_last, generator=torch.Generator().manual_seed(3))


def cross_entropy(out: Tensor, batch: Batch) -> Tensor:
    return F.cross_entropy(out, batch[1])


class Classifier(nn.Module):
    def __init__(self, width: int = 24, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner, self.norm, self.middle = nn.Linear(12, width), nn.LayerNorm(width), nn.Linear(width, width)
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.gelu(self.middle(self.norm(F.gelu(self.inner(x)))))))


@dataclass
class Loop:
    """What trains a model: eager PyTorch without a `mesh`, else a compiled step. Numbers that scripts note are compared
    between the two."""

    mesh: str | None
    folder: Path
    noted: list[float] = field(default_factory=list)
    model: nn.Module = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    loss: Loss = field(init=False)
    clip: float | None = None
    step: mw.TrainStep | None = None

    def begin(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        example: Any,
        loss: Loss = cross_entropy,
        **options: Any,
    ) -> None:
        self.model, self.optimizer, self.loss, self.clip = model, optimizer, loss, options.get("clip_grad_norm")
        if self.mesh is not None:
            options |= {"mesh": self.mesh, "profile": "alpha-beta"}
            self.step = mw.compile(model, loss=loss, example=example, optimizer=optimizer, **options)

    def train(self, batch: Any) -> float:
        if self.step is not None:
            self.noted.append(self.step(batch).item())
            return self.noted[-1]
        loss = self.loss(self.model(batch[0] if isinstance(batch, (tuple, list)) else batch), batch)
        loss.backward()
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self.optimizer.step()
        self.model.zero_grad()  # of parameters in no group, too
        self.noted.append(loss.item())
        return self.noted[-1]

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> tuple[float, Tensor]:
        """Loss and outputs."""
        if self.step is not None:
            return self.step.evaluate(batch).item(), self.step.forward_only(batch)
        out = self.model(batch[0])
        return self.loss(out, batch).item(), out

    def save(self, schedule: Any) -> None:
        if self.step is not None:
            self.step.save(str(self.folder / "step"))
        self.kept = copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(), schedule.state_dict()])

    def load(self, schedule: Any) -> None:
        if self.step is not None:
            self.step.load(str(self.folder / "step"))
        else:
            self.model.load_state_dict(self.kept[0])
            self.optimizer.load_state_dict(self.kept[1])
        schedule.load_state_dict(self.kept[2])


def clip_schedule_average(loop: Loop) -> None:
    """OneCycleLR, which cycles betas too, made after compile; an average of weights, evaluated."""
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    loop.begin(model, optimizer, next(iter(data(8))), clip_grad_norm=0.5)
    schedule = OneCycleLR(optimizer, 1e-2, total_steps=20)
    mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for batch in [*data(8), *data(8)]:
        loop.train(batch)
        schedule.step()
        mean.update_parameters(model)
    with torch.no_grad():
        loop.noted.append(mean(next(iter(data(8)))[0]).sum().item())


def short_last_batch(loop: Loop) -> None:
    model = Classifier()
    loop.begin(model, torch.optim.Adam(model.parameters(), lr=3e-3), next(iter(data(16))))
    for _ in range(2):
        for batch in data(16, drop_last=False):  # 70 rows: the last batch has 6
            loop.train(batch)


def early_stopping(loop: Loop) -> None:
    """The best weights are kept as a state dict, and come back at the end."""
    model = Classifier()
    loop.begin(model, torch.optim.RMSprop(model.parameters(), lr=2e-2), next(iter(data(8))))
    held_out = next(iter(data(16, shuffle=False)))
    best, kept, num_worse = math.inf, {}, 0
    while num_worse < 2 and len(loop.noted) < 60:
        for batch in data(8, num_rows=40):
            loop.train(batch)
        loss, _ = loop.evaluate(held_out)
        num_worse = 0 if loss < best else num_worse + 1
        if loss < best:
            best, kept = loss, copy.deepcopy(model.state_dict())
    model.load_state_dict(kept)
    loop.noted += [loop.evaluate(held_out)[0], best]


def layerwise_rates(loop: Loop) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(3)), nn.Linear(12, 5))
    groups = [
        {"params": [p for p in model[i].parameters() if (p.dim() > 1) == decays], "lr": 1e-2 * 0.8 ** (3 - i)}
        | {"weight_decay": 0.05 * decays}
        for i in range(4)
        for decays in (True, False)
    ]
    optimizer = torch.optim.AdamW(groups)
    loop.begin(model, optimizer, next(iter(data(8))))
    schedule = LambdaLR(optimizer, lambda i: min(1, (i + 1) / 5) * 0.5 * (1 + math.cos(i / 20)))
    for batch in data(8):
        loop.train(batch)
        schedule.step()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(40, 24), nn.Linear(24, 24), nn.Linear(24, 40, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embed(tokens))).cumsum(1))


def tied_embeddings(loop: Loop) -> None:
    model = Tied()
    tokens = torch.randint(0, 40, (6, 8, 10), generator=torch.Generator().manual_seed(5))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    next_token: Loss = lambda out, batch: F.cross_entropy(out[:, :-1].flatten(0, 1), batch[:, 1:].flatten())  # noqa: E731
    loop.begin(model, optimizer, tokens[0], next_token)
    for batch in tokens:
        loop.train(batch)
    assert model.head.weight is model.embed.weight


def changed_settings(loop: Loop) -> None:
    """Options, groups and what is trained change between steps."""
    model = Classifier()
    model.norm.requires_grad_(False)
    head = {id(p) for p in model.head.parameters()}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if id(p) not in head], lr=5e-3)
    loop.begin(model, optimizer, next(iter(data(8))))
    for i, batch in enumerate(data(8)):
        if i == 2:
            optimizer.param_groups[0].update(weight_decay=0.0, betas=(0.8, 0.9))
        if i == 3:
            optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 1e-2})
        if i in (4, 6):
            model.norm.requires_grad_(i == 4)
        loop.train(batch)


def validation(loop: Loop) -> None:
    model = nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    loop.begin(model, optimizer, next(iter(data(16))))
    schedule = ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    for _ in range(3):
        model.train()
        for batch in data(16):
            loop.train(batch)
        model.eval()
        num_right, total = 0, 0.0
        for batch in data(16, shuffle=False, drop_last=False):
            loss, out = loop.evaluate(batch)
            num_right += int((out.argmax(-1) == batch[1]).sum())
            total += loss * len(batch[1])
        schedule.step(total)
        loop.noted += [num_right, total]


def resumed_elsewhere(loop: Loop) -> None:
    """The second half runs on another mesh."""
    batches = list(data(8))
    for half in range(2):
        torch.manual_seed(half)
        model = Classifier()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        schedule = CosineAnnealingLR(optimizer, 8)
        loop.begin(model, optimizer, batches[0])
        if half:
            loop.load(schedule)
        for batch in batches[4 * half : 4 * half + 4]:
            loop.train(batch)
            schedule.step()
        loop.save(schedule)
        loop.mesh = loop.mesh and ("dp=2" if loop.mesh == "fsdp=2" else "fsdp=2")


def distillation(loop: Loop) -> None:
    teacher, model = Classifier(48).eval().requires_grad_(False), Classifier(16)

    def loss_of(out: Tensor, batch: Batch) -> Tensor:
        soft = F.kl_div(F.log_softmax(out / 2, -1), F.softmax(batch[2] / 2, -1), reduction="batchmean")
        return cross_entropy(out, batch) + 4 * soft

    batches = [(x, y, teacher(x)) for x, y in data(8)]
    loop.begin(model, torch.optim.NAdam(model.parameters(), lr=5e-3), batches[0], loss_of)
    for batch in batches:
        loop.train(batch)


class Pair(nn.Module):
    """A student with its teacher, which is never in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = Classifier(16), Classifier(48, dropout=0.5).requires_grad_(False)
        self.train()

    def train(self, mode: bool = True) -> Pair:
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x), taught


def distillation_in_the_model(loop: Loop) -> None:
    model = Pair()
    optimizer = torch.optim.Adamax(model.student.parameters(), lr=5e-3)
    loss: Loss = lambda out, batch: cross_entropy(out[0], batch) + F.mse_loss(*out)  # noqa: E731
    loop.begin(model, optimizer, next(iter(data(8))), loss)
    for batch in data(8):
        loop.train(batch)


def weighted_classes(loop: Loop) -> None:
    model = Classifier()
    weight = torch.tensor([1.0, 2.0, 0.5, 1.0, 3.0])
    criterion = nn.CrossEntropyLoss(weight=weight, label_smoothing=0.1, ignore_index=4)
    optimizer = torch.optim.RAdam(model.parameters(), lr=5e-3)
    loop.begin(model, optimizer, next(iter(data(8))), lambda out, batch: criterion(out, batch[1]))
    for batch in data(8):
        loop.train(batch)


SCRIPTS: dict[str, Callable[[Loop], None]] = {
    script.__name__: script
    for script in (
        clip_schedule_average, short_last_batch, early_stopping, layerwise_rates, tied_embeddings, changed_settings,
        validation, resumed_elsewhere, distillation, distillation_in_the_model, weighted_classes,
    )
}  # fmt: skip


def run(name: str, mesh: str | None, folder: Path) -> list[float]:
    """What a script notes, in float64, in which nothing but its own mistakes shows."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        loop = Loop(mesh, folder)
        SCRIPTS[name](loop)
    finally:
        torch.set_default_dtype(before)
    return loop.noted
