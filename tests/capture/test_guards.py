"""What is checked before every step: what has changed since compile counts as in eager PyTorch, or is an error.

Every row of the first table is a change after which eager PyTorch trains differently from the compiled step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from tests.effort import calls_of
from tests.training import assert_equals_eager, assert_tensors, assert_trained_alike, batches, mse
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import meshweave as mw
from meshweave.capture.batch import call_model
from meshweave.capture.snapshot import Snapshot
from meshweave.errors import CaptureError, LayoutError, MeshweaveError, PlanError, StepError

SCALE = 1.0


class Model(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.drop = nn.Dropout(dropout)
        self.alpha = 1.0
        self.table, self.array = torch.linspace(0.0, 1.0, 4), numpy.zeros(4, "float32")
        self.options = SimpleNamespace(scale=1.0)
        self.factors = [1.0, 2.0]
        self.register_buffer("shift", torch.zeros(4))

    def forward(self, x: Tensor, s: float = 1.0, more: Tensor | None = None) -> Tensor:
        out = self.linear(x) * self.alpha * self.options.scale * self.factors[0] * SCALE
        return (
            self.drop(out if more is None else out * more) * s + self.shift + self.table + torch.as_tensor(self.array)
        )


@dataclass
class Run:
    """A compiled step and what it was compiled from."""

    model: Any
    optimizer: Any
    step: mw.TrainStep

    @staticmethod
    def of(model: nn.Module, example: Any, loss: Any = mse, mesh: str = "dp=2", **options: Any) -> Run:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
        return Run(
            model, optimizer, mw.compile(model, loss=loss, example=example, optimizer=optimizer, mesh=mesh, **options)
        )


DATA = [{**b, "s": 2.0} for b in batches(3, (4, 4), (4, 4))]


def set_scale(run: Run) -> None:
    global SCALE
    SCALE = 2.0


def set_option(name: str, value: Any) -> Callable[[Run], None]:
    return lambda run: run.optimizer.param_groups[0].__setitem__(name, value)


def replace_step(run: Run) -> None:
    run.optimizer.step = lambda: None


# What is changed -> how, and the error with a part of its message.
CHANGES: dict[str, tuple[Callable[[Run], Any], type[MeshweaveError], str]] = {
    "the p of a dropout": (lambda r: setattr(r.model.drop, "p", 0.1), StepError, "model.drop.p: 0.5 -> 0.1"),
    "an attribute": (lambda r: setattr(r.model, "alpha", 3.0), StepError, "model.alpha: 1.0 -> 3.0"),
    "an attribute of an object": (lambda r: setattr(r.model.options, "scale", 3), StepError, "model.options.scale"),
    "an entry of a list": (lambda r: r.model.factors.__setitem__(0, 3.0), StepError, "model.factors[0]: 1.0 -> 3.0"),
    "a submodule": (
        lambda r: setattr(r.model, "drop", nn.Identity()),
        StepError,
        "model.drop: a Dropout -> a Identity",
    ),
    "a global of forward": (set_scale, StepError, "global variable SCALE of Model.forward: 1.0 -> 2.0"),
    "a method": (lambda r: setattr(r.model, "forward", lambda x, s: r.model.linear(x)), StepError, "model.forward"),
    "a tensor that is no buffer": (lambda r: r.model.table.add_(1), StepError, "where: model.table"),
    "an element of an array": (lambda r: r.model.array.fill(1.0), StepError, "where: model.array"),
    "another such tensor": (lambda r: setattr(r.model, "table", torch.ones(4)), StepError, "where: model.table"),
    "another parameter": (
        lambda r: setattr(r.model.linear, "weight", nn.Parameter(torch.ones(4, 4))),
        StepError,
        "'linear.weight' of the model was replaced after compile",
    ),
    "a forward hook": (
        lambda r: r.model.linear.register_forward_hook(lambda m, i, o: 2 * o),
        StepError,
        "model.linear._forward_hooks",
    ),
    "a forward pre-hook": (
        lambda r: r.model.linear.register_forward_pre_hook(lambda m, i: None),
        StepError,
        "model.linear._forward_pre_hooks",
    ),
    "a backward hook": (
        lambda r: r.model.linear.register_full_backward_hook(lambda m, i, o: None),
        StepError,
        "model.linear._backward_hooks",
    ),
    "a hook of a parameter": (
        lambda r: r.model.linear.weight.register_hook(lambda g: 2 * g),
        StepError,
        "register_hook on param 'linear.weight'",
    ),
    "a hook after accumulation": (
        lambda r: r.model.linear.weight.register_post_accumulate_grad_hook(lambda p: None),
        StepError,
        "register_post_accumulate_grad_hook on param 'linear.weight'",
    ),
    "amsgrad": (set_option("amsgrad", True), CaptureError, "KeyError: 'max_exp_avg_sq'"),
    "add_param_group": (
        lambda r: r.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]}),
        PlanError,
        "a parameter that the model lacks",
    ),
    "a hook before the optimizer": (
        lambda r: r.optimizer.register_step_pre_hook(lambda *a: None),
        PlanError,
        "register_step_pre_hook",
    ),
    "a hook after the optimizer": (
        lambda r: r.optimizer.register_step_post_hook(lambda *a: None),
        PlanError,
        "register_step_post_hook",
    ),
    "another class": (
        lambda r: setattr(r.model.drop, "__class__", nn.Identity),
        StepError,
        "the class of model.drop\n  got: Identity\n  expected: Dropout",
    ),
    "another optimizer.step": (replace_step, PlanError, "optimizer.step = ..."),
}
BATCHES: dict[str, tuple[Any, type[MeshweaveError], str]] = {
    "a number": ({**DATA[0], "s": 3.0}, StepError, "the batch entry 's': 2.0 -> 3.0"),
    "no number": ({k: v for k, v in DATA[0].items() if k != "s"}, StepError, "the batch entry 's': 2.0 -> nothing"),
    "a tensor for a number": ({**DATA[0], "s": torch.tensor(2.0)}, StepError, "the batch entry 's': 2.0 -> a tensor"),
    "another tensor": ({**DATA[0], "more": torch.ones(4)}, StepError, "the batch entry 'more': nothing -> a tensor"),
    "a tensor less": ({k: v for k, v in DATA[0].items() if k != "y"}, LayoutError, "lacks entries of the example"),
}


@pytest.mark.parametrize("row", CHANGES)
def test_what_changes_the_step_is_an_error(row: str) -> None:
    global SCALE
    change, kind, detail = CHANGES[row]
    run = Run.of(Model(), DATA[0])
    before = run.step(DATA[0]), run.step.parameters()
    change(run)
    try:
        with pytest.raises(kind) as error:
            run.step(DATA[1])
    finally:
        SCALE = 1.0
    assert detail in str(error.value)
    assert run.step.num_steps == 1
    assert_tensors(run.step.parameters(), before[1], 0.0)


@pytest.mark.parametrize("row", BATCHES)
def test_what_changes_in_the_batch_is_an_error(row: str) -> None:
    batch, kind, detail = BATCHES[row]
    run = Run.of(Model(), DATA[0])
    with pytest.raises(kind) as error:
        run.step(batch)
    assert detail in str(error.value)
    run.step(DATA[1])


def test_a_loss_that_reads_what_changes_outside_is_an_error() -> None:
    weight = 1.0
    run = Run.of(Model(), DATA[0], lambda out, batch: weight * mse(out, batch))
    run.step(DATA[0])
    weight = 2.0
    with pytest.raises(StepError, match="variable weight in the closure of") as error:
        run.step(DATA[0])
    assert "1.0 -> 2.0" in str(error.value)


def test_a_hook_of_all_modules_is_an_error() -> None:
    run = Run.of(Model(), DATA[0])
    handle = register_module_forward_hook(lambda m, i, o: None)
    try:
        with pytest.raises(StepError, match="has changed since the step was compiled"):
            run.step(DATA[0])
    finally:
        handle.remove()
    run.step(DATA[0])


def test_every_way_to_run_a_step_is_guarded() -> None:
    run = Run.of(Model(), DATA[0])
    run.model.alpha = 2.0
    for way in (run.step, run.step.trace, run.step.forward):
        with pytest.raises(StepError, match="would differ from the compiled step"):
            way(DATA[0])
    run.model.alpha = 1.0
    run.step.forward(DATA[0])
    run.step.backward()
    run.optimizer.param_groups[0]["maximize"] = True
    with pytest.raises(StepError, match="another update than the compiled one"):
        run.step.update()
    run.optimizer.param_groups[0]["maximize"] = False
    run.step.update()


@pytest.mark.parametrize("options", [{}, {"precision": torch.bfloat16}])
def test_autocast_around_a_step_or_compile_is_no_silent_no(options: dict[str, Any]) -> None:
    run = Run.of(Model(), DATA[0], **options)
    other = torch.float16 if options else torch.bfloat16
    with torch.autocast("cpu", dtype=other):
        with pytest.raises(StepError, match="ignores torch"):
            run.step(DATA[0])
        with pytest.raises(StepError, match="ignores torch"):
            Run.of(Model(), DATA[0], **options)
    run.step(DATA[0])
    if options:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.step(DATA[0])


class OfDefaultDtype(Model):
    """Makes a tensor of the default dtype in forward."""

    def forward(self, x: Tensor, s: float = 1.0, more: Tensor | None = None) -> Tensor:
        return super().forward(x, s, more) + torch.zeros(1)


@pytest.mark.parametrize(("model", "is_read"), [(Model, False), (OfDefaultDtype, True)])
def test_another_default_dtype_counts_where_forward_makes_tensors_of_it(model: type[nn.Module], is_read: bool) -> None:
    run = Run.of(model(), DATA[0])
    run.step(DATA[0])
    torch.set_default_dtype(torch.float64)
    try:
        if is_read:
            with pytest.raises(StepError, match="default dtype has changed"):
                run.step(DATA[0])
        else:
            run.step(DATA[0])
    finally:
        torch.set_default_dtype(torch.float32)
    run.step(DATA[0])


# At compile


COMPILED: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], type[MeshweaveError], str]] = {
    "register_hook": (
        lambda m, o: m.linear.weight.register_hook(lambda g: 2 * g),
        CaptureError,
        "the parameter 'linear.weight' has a hook",
    ),
    "register_post_accumulate_grad_hook": (
        lambda m, o: m.linear.bias.register_post_accumulate_grad_hook(lambda p: None),
        CaptureError,
        "the parameter 'linear.bias' has a hook",
    ),
    "register_step_pre_hook": (
        lambda m, o: o.register_step_pre_hook(lambda *a: None),
        PlanError,
        "got: register_step_pre_hook",
    ),
    "register_step_post_hook": (
        lambda m, o: o.register_step_post_hook(lambda *a: None),
        PlanError,
        "got: register_step_post_hook",
    ),
    "register_optimizer_step_pre_hook": (
        lambda m, o: register_optimizer_step_pre_hook(lambda *a: None),
        PlanError,
        "torch.optim.optimizer.register_optimizer_step_pre_hook",
    ),
    "register_optimizer_step_post_hook": (
        lambda m, o: register_optimizer_step_post_hook(lambda *a: None),
        PlanError,
        "torch.optim.optimizer.register_optimizer_step_post_hook",
    ),
}


@pytest.mark.parametrize("row", COMPILED)
def test_hooks_that_would_not_run_are_errors_at_compile(row: str) -> None:
    register, kind, detail = COMPILED[row]
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = register(model, optimizer)
    try:
        with pytest.raises(kind) as error:
            mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh="dp=2")
    finally:
        handle.remove()
    assert detail in str(error.value)
    mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh="dp=2")(DATA[0])


# What may change


class Plain(Model):
    def __init__(self) -> None:
        super().__init__(dropout=0.0)
        self.num_seen = 0


class Doubles(nn.Module):
    """A module whose gradients its backward hooks double."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.down.register_full_backward_hook(lambda m, i, o: (2 * i[0],))
        self.down.register_forward_hook(lambda m, i, o: 2 * o)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def warm_up(run: Run) -> None:
    run.schedule = torch.optim.lr_scheduler.SequentialLR(
        run.optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(run.optimizer, 0.5, total_iters=2),
            torch.optim.lr_scheduler.CosineAnnealingLR(run.optimizer, 4),
        ],
        [2],
    )


def one_cycle(run: Run) -> None:
    run.schedule = torch.optim.lr_scheduler.OneCycleLR(run.optimizer, 0.1, total_steps=9)


def evaluate(run: Run, i: int) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(DATA[0]["x"])
    run.model.train()


def log(run: Run, i: int) -> None:
    run.model.epoch = i
    run.model.num_seen += 4
    run.model.linear.last_loss = float(i)
    run.model.notes = [f"step {i}"]


def set_lr(run: Run, i: int) -> None:
    for group in run.optimizer.param_groups:
        group["lr"] = 0.1 / (i + 1)
        group["name"] = f"step {i}"


def load_rate(run: Run, i: int) -> None:
    run.schedule.load_state_dict(run.schedule.state_dict())


def keep_average(run: Run, i: int) -> None:
    now = run.step.parameters() if run.step else {n: p.detach() for n, p in run.model.named_parameters()}
    run.average = {n: 0.9 * getattr(run, "average", now)[n] + 0.1 * now[n] for n in now}


def copy_back(run: Run, i: int) -> None:
    """Parameters and buffers into the model, to look at them or to evaluate; nothing to do for an eager model."""
    if run.step:
        run.model.load_state_dict({**run.step.parameters(), **run.step.buffers()})
        evaluate(run, i)


def nothing(*_: Any) -> None:
    pass


ALLOWED: dict[str, tuple[Callable[[], nn.Module], Callable[[Run], None], Callable[[Run, int], None]]] = {
    "nothing": (Plain, nothing, nothing),
    "a warm-up schedule": (Plain, warm_up, lambda r, i: r.schedule.step()),
    "one cycle without momentum": (Plain, one_cycle, lambda r, i: r.schedule.step()),
    "a schedule that was loaded": (Plain, warm_up, load_rate),
    "lr and names in groups": (Plain, nothing, set_lr),
    "attributes for logs": (Plain, nothing, log),
    "evaluation between steps": (Plain, nothing, evaluate),
    "eval() without dropout": (Plain, nothing, lambda r, i: r.model.eval()),
    "train() again": (Plain, nothing, lambda r, i: r.model.train()),
    "an average of the weights": (Plain, nothing, keep_average),
    "weights copied back": (Plain, nothing, copy_back),
    "zero_grad": (Plain, nothing, lambda r, i: r.optimizer.zero_grad()),
    "hooks of modules at compile": (Doubles, nothing, nothing),
}


@pytest.mark.parametrize("row", ALLOWED)
def test_what_does_not_count_may_change(row: str) -> None:
    make, prepare, between = ALLOWED[row]
    torch.manual_seed(0)
    data = [{k: v for k, v in b.items() if k != "s"} for b in DATA]
    ours = Run.of(make(), data[0])
    twin = copy.deepcopy(ours.model)
    eager: Any = Run(twin, torch.optim.AdamW(twin.parameters(), lr=0.1, weight_decay=0.1), None)
    losses: dict[str, list[float]] = {"ours": [], "eager": []}
    for run in (ours, eager):
        prepare(run)
    for i, batch in enumerate(data * 2):
        losses["ours"].append(ours.step(batch))
        between(ours, i)
        eager.optimizer.zero_grad()
        value = mse(call_model(twin, batch), batch)
        value.backward()
        eager.optimizer.step()
        losses["eager"].append(value.item())
        between(eager, i)
    assert_trained_alike(ours.step, losses["ours"], twin, losses["eager"])


def test_numbers_and_texts_in_the_batch_that_nothing_reads_may_change() -> None:
    example = {**DATA[0], "index": 0, "texts": ["a", "b"], "note": None}
    run = Run.of(Plain(), example)
    expected = mse(run.model(DATA[0]["x"], 2.0), DATA[0]).item()
    assert run.step({**example, "index": 1, "texts": ["c"]}) == pytest.approx(expected)
    run.step({**example, "index": 1, "texts": ["d"], "id": torch.zeros(2)})
    tries = count_tries(run)
    run.step({**example, "index": 2, "texts": [], "id": torch.zeros(4)})
    run.step({**example, "index": 3, "texts": [], "id": torch.ones(4)})
    assert not tries
    with pytest.raises(StepError, match="would differ from the compiled step"):
        run.step({**example, "index": 3, "s": 3.0})
    run.step({**example, "note": "read by nobody"})


def count_tries(run: Run) -> list[Any]:
    tries: list[Any] = []
    again = run.step.guards.contract.again
    run.step.guards.contract.again = lambda record, batch: (tries.append(batch), again(record, batch))[1]
    return tries


def test_attributes_that_nothing_reads_are_tried_once() -> None:
    run = Run.of(Plain(), DATA[0])
    tries = count_tries(run)
    for i in range(3):
        run.model.epoch = i
        run.step(DATA[0])
    assert len(tries) == 2  # forward and loss, and once more since the state may have changed
    run.model.alpha = 2.0
    with pytest.raises(StepError, match="would differ from the compiled step"):
        run.step(DATA[0])


class Asks(Plain):
    def forward(self, x: Tensor, s: float = 1.0) -> Tensor:
        return super().forward(x, s) * (2.0 if self.num_seen > 8 else 1.0)


def test_an_attribute_that_is_read_counts_when_it_makes_a_difference() -> None:
    run = Run.of(Asks(), DATA[0])
    for num in (4, 8):
        run.model.num_seen = num
        run.step(DATA[0])
    run.model.num_seen = 12
    with pytest.raises(StepError, match="would differ from the compiled step") as error:
        run.step(DATA[0])
    assert "model.num_seen: 8 -> 12" in str(error.value)


def test_another_forward_of_a_class_of_torch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(Plain(), DATA[0])
    run.step(DATA[0])
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: 2 * x)
    with pytest.raises(StepError, match=r"where: Linear\.forward"):
        run.step(DATA[1])
    monkeypatch.undo()
    run.step(DATA[1])


class Reverse(torch.autograd.Function):
    """The identity, whose gradient is turned round: its factor shows in backward alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Any) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.factor * gradient, None


class Reverses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 4)
        self.factor = 0.1

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        return self.down(Reverse.apply(self.up(x), self.factor if factor is None else factor))


@pytest.mark.parametrize("mesh", ["", "tp=2"])
def test_what_backward_alone_reads_counts(mesh: str) -> None:
    data = [{k: v for k, v in b.items() if k != "s"} for b in DATA]
    run = Run.of(Reverses(), data[0], mesh=mesh)
    run.step(data[0])
    run.model.factor = 0.2
    with pytest.raises(StepError, match="would differ from the compiled step") as error:
        run.step(data[1])
    assert "model.factor: 0.1 -> 0.2" in str(error.value)
    factors = [{**b, "factor": torch.tensor(0.1 * i)} for i, b in enumerate(data)]
    assert_equals_eager(Reverses(), factors, mesh)


def test_guards_of_five_hundred_modules_are_few_calls() -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.LayerNorm(2)) for _ in range(100)]
    model = nn.Sequential(*layers)
    snapshot = Snapshot.of({"model": model})
    assert len(list(model.modules())) == 501

    assert snapshot.is_current()
    assert calls_of(snapshot.is_current) < 20  # compared in C: 0.15 ms
