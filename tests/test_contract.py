"""docs/contract.md: what may change between steps, what is an error, and what a step does not see."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.effort import calls_of
from tests.training import assert_tensors, assert_trained_alike, batches, mse
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import meshweave as mw
from meshweave.capture.batch import Batch, call_model
from meshweave.capture.guards import Guards
from meshweave.errors import CaptureError, LayoutError, MeshweaveError, PlanError, StepError

DATA = batches(6, (4, 4), (4, 4))
SCALE = 1.0


class Model(nn.Module):
    offset = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.0)
        self.alpha, self.kind, self.flag = 1.0, "plain", True
        self.table = torch.linspace(0.0, 1.0, 4)
        self.options, self.factors = SimpleNamespace(scale=1.0), [1.0, 2.0]
        self.register_buffer("shift", torch.zeros(4))
        self.last: Tensor | None = None

    def forward(self, x: Tensor, s: float = 1.0, more: Tensor | None = None) -> Tensor:
        out = self.linear(x) * self.alpha * self.options.scale * self.factors[0] * SCALE + self.offset
        out = out if self.kind == "plain" else torch.tanh(out)
        out = self.drop(out if more is None else out * more) * s
        self.last = out.detach().mean()
        return (out if self.flag else -out) + self.shift + self.table


@dataclass
class Run:
    """A compiled step, or eager PyTorch, and what trains in it."""

    model: Any
    optimizer: torch.optim.Optimizer
    step: Any

    @staticmethod
    def of(example: Any = DATA[0], loss: Any = mse, mesh: str = "dp=2", **options: Any) -> Run:
        torch.manual_seed(0)
        model = Model()
        optimizer = adamw(model)
        step = mw.compile(model, loss=loss, example=example, optimizer=optimizer, mesh=mesh, **options)
        return Run(model, optimizer, step)

    @staticmethod
    def eager(like: Run) -> Run:
        model = copy.deepcopy(like.model)
        optimizer = adamw(model)

        def step(batch: Any) -> float:
            optimizer.zero_grad()
            value = mse(call_model(model, batch), batch)
            value.backward()
            optimizer.step()
            return value.item()

        return Run(model, optimizer, step)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def number_of_programs(run: Run) -> int:
    return len(run.step._compiled.variants.all)


# What may change: the next step is that of eager PyTorch


def set_options(run: Run) -> None:
    for group in run.optimizer.param_groups:
        group.update(lr=0.01, weight_decay=0.5)


def load(run: Run) -> None:
    run.model.load_state_dict({key: value * 0.5 for key, value in run.model.state_dict().items()})


def write(run: Run) -> None:
    with torch.no_grad():
        run.model.linear.weight.mul_(0.5)
        run.model.linear.bias.data.copy_(torch.ones(4))
        run.model.shift.add_(1)


def call(run: Run) -> None:
    """Assigns `last`, as forward does while it is traced."""
    with torch.no_grad():
        run.model(DATA[3]["x"])


# What changes -> how, and how many programs there are then.
ALLOWED: dict[str, tuple[Callable[[Run], Any], int]] = {
    "nothing": (lambda r: None, 1),
    "values of tensors": (write, 1),
    "load_state_dict": (load, 1),
    "numbers in param_groups": (set_options, 1),
    "a number": (lambda r: setattr(r.model, "alpha", 3.0), 2),
    "a text": (lambda r: setattr(r.model, "kind", "bent"), 2),
    "a bool": (lambda r: setattr(r.model, "flag", False), 2),
    "a number of a layer, without effect": (lambda r: setattr(r.model.linear, "in_features", 5), 1),
    "a number that is new": (lambda r: setattr(r.model, "epoch", 1), 1),
    "eval(), without effect": (lambda r: r.model.eval(), 1),
    "a call of the model": (call, 1),
    "zero_grad": (lambda r: r.optimizer.zero_grad(), 1),
}


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
@pytest.mark.parametrize("row", ALLOWED)
def test_the_next_step_uses_what_may_change(row: str, mesh: str) -> None:
    change, programs = ALLOWED[row]
    ours = Run.of(mesh=mesh)
    eager = Run.eager(ours)
    losses, expected = ([run.step(DATA[0])] for run in (ours, eager))
    for run, its in ((ours, losses), (eager, expected)):
        change(run)
        its += [run.step(batch) for batch in DATA[1:4]]
    assert number_of_programs(ours) == programs
    assert_trained_alike(ours.step, losses, eager.model, expected)


def test_a_number_that_goes_back_has_its_program_again(caplog: pytest.LogCaptureFixture) -> None:
    run = Run.of()
    for alpha in (1.0, 2.0, 1.0, 2.0):
        run.model.alpha = alpha
        run.step(DATA[0])
    assert number_of_programs(run) == 2
    assert len([r for r in caplog.records if "compiles for a batch" in r.message]) == 1
    assert "model.train(), model.alpha=2.0" in caplog.text


def test_a_counter_for_a_log_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    run = Run.of()
    with caplog.at_level(logging.WARNING, logger="meshweave"):
        for i in range(5):
            run.model.num_seen = i
            run.step(DATA[i])
    assert number_of_programs(run) == 1
    texts = [r.message for r in caplog.records if "makes no difference" in r.message]
    assert [text.partition(" makes")[0] for text in texts] == ["model.num_seen"]


def test_a_number_that_makes_a_difference_in_every_step_belongs_in_the_batch(caplog: pytest.LogCaptureFixture) -> None:
    run = Run.of(run=mw.RunOptions(max_programs=2))
    for alpha in (1.0, 2.0, 3.0):
        run.model.alpha = alpha
        run.step(DATA[0])
    assert number_of_programs(run) == 2
    assert "Pass a value that changes from step to step in the batch, as a tensor" in caplog.text


def test_with_a_single_program_a_number_that_counts_is_an_error() -> None:
    run = Run.of(run=mw.RunOptions(max_programs=1))
    run.model.epoch = 1
    run.step(DATA[0])
    run.model.alpha = 3.0
    with pytest.raises(StepError, match="would differ from the compiled step") as error:
        run.step(DATA[0])
    assert "where: model.alpha" in str(error.value)


# Other entries of a batch

BATCHES: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "a number": lambda b: {**b, "s": 3.0},
    "no number": lambda b: {k: v for k, v in b.items() if k != "s"},
    "a tensor for a number": lambda b: {**b, "s": torch.tensor(2.0)},
    "another tensor": lambda b: {**b, "more": torch.ones(4)},
}


@pytest.mark.parametrize("row", BATCHES)
def test_other_entries_of_a_batch_have_another_program(row: str) -> None:
    ours = Run.of({**DATA[0], "s": 2.0})
    eager = Run.eager(ours)
    data = [{**DATA[0], "s": 2.0}, BATCHES[row]({**DATA[1], "s": 2.0}), {**DATA[2], "s": 2.0}]
    losses, expected = ([run.step(batch) for batch in data] for run in (ours, eager))
    assert number_of_programs(ours) == 2
    assert_trained_alike(ours.step, losses, eager.model, expected)


def test_entries_that_nothing_reads_may_change(caplog: pytest.LogCaptureFixture) -> None:
    run = Run.of({**DATA[0], "index": 0, "texts": ["a", "b"], "parts": {"a": 1}})
    for i in range(4):
        run.step({**DATA[i], "index": i, "texts": [str(i)], "parts": {"a": 1}, "more_ids": torch.zeros(i)})
    assert number_of_programs(run) == 1
    texts = [r.message for r in caplog.records if "makes no difference" in r.message]
    assert [text.partition(" makes")[0] for text in texts] == ["the batch entry 'texts'"]  # a number costs no trace


def test_a_batch_without_a_tensor_of_the_example_is_an_error() -> None:
    run = Run.of()
    with pytest.raises(LayoutError, match="lacks entries of the example"):
        run.step({"x": DATA[0]["x"]})


# What is an error: the step can be compiled again

# What is changed -> how, and the place in the error.
ERRORS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "an attribute is assigned": (lambda r: setattr(r.model, "options", SimpleNamespace(scale=1.0)), "model.options"),
    "a number becomes a tensor": (lambda r: setattr(r.model, "alpha", torch.ones(())), "model.alpha"),
    "an attribute is added": (lambda r: setattr(r.model, "notes", ["a"]), "model.notes"),
    "an attribute is removed": (lambda r: delattr(r.model, "factors"), "model.factors"),
    "a tensor that is no buffer is written": (lambda r: r.model.table.add_(1), "model.table"),
    "a layer": (lambda r: setattr(r.model, "drop", nn.Identity()), "model.drop"),
    "layers change places": (lambda r: r.model._modules.update(linear=r.model.drop), "model.linear"),
    "a method": (lambda r: setattr(r.model, "forward", lambda x: r.model.linear(x)), "model.forward"),
    "a class": (lambda r: setattr(r.model.drop, "__class__", nn.Identity), "the class of model.drop"),
    "a parameter": (lambda r: setattr(r.model.linear, "weight", nn.Parameter(torch.ones(4, 4))), "model.linear.weight"),
    "a buffer is None": (lambda r: setattr(r.model, "shift", None), "model.shift"),
    "a forward hook": (lambda r: r.model.linear.register_forward_hook(print), "model.linear._forward_hooks"),
    "a forward pre-hook": (lambda r: r.model.register_forward_pre_hook(print), "model._forward_pre_hooks"),
    "a backward hook": (lambda r: r.model.linear.register_full_backward_hook(print), "model.linear._backward_hooks"),
    "a hook of a parameter": (
        lambda r: r.model.linear.weight.register_hook(print),
        "register_hook on the parameter 'linear.weight'",
    ),
    "a hook after accumulation": (
        lambda r: r.model.linear.weight.register_post_accumulate_grad_hook(print),
        "register_post_accumulate_grad_hook on the parameter 'linear.weight'",
    ),
}


@pytest.mark.parametrize("row", ERRORS)
def test_what_a_look_notices_is_an_error_that_names_it(row: str) -> None:
    change, place = ERRORS[row]
    run = Run.of()
    run.step(DATA[0])
    before = run.step.parameters()
    change(run)
    for _ in range(2):  # it stays an error
        with pytest.raises(StepError, match=r"step\.recompile\(\)") as error:
            run.step(DATA[1])
        assert error.value.where == place
    assert run.step.num_steps == 1
    if "parameter" not in row:
        assert_tensors(run.step.parameters(), before, 0.0)


def test_another_forward_of_a_class_and_hooks_of_all_modules_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: 2 * x)
        with pytest.raises(StepError, match=r"where: Linear\.forward"):
            run.step(DATA[0])
    handle = register_module_forward_hook(lambda m, i, o: None)
    try:
        with pytest.raises(StepError, match="the global module hooks"):
            run.step(DATA[0])
    finally:
        handle.remove()
    run.step(DATA[0])


@pytest.mark.parametrize("options", [{}, {"precision": torch.bfloat16}])
def test_autocast_around_a_step_or_compile_is_an_error(options: dict[str, Any]) -> None:
    run = Run.of(**options)
    with torch.autocast("cpu", dtype=torch.float16 if options else torch.bfloat16):
        with pytest.raises(StepError, match="ignores torch"):
            run.step(DATA[0])
        with pytest.raises(StepError, match="ignores torch"):
            Run.of(**options)
    run.step(DATA[0])
    if options:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            run.step(DATA[0])


# Hook -> how it is registered at compile, and the error.
HOOKS: dict[str, tuple[Callable[[nn.Module, torch.optim.Optimizer], Any], type[MeshweaveError]]] = {
    "the parameter 'linear.weight' has a hook": (lambda m, o: m.linear.weight.register_hook(print), CaptureError),
    "the parameter 'linear.bias' has a hook": (
        lambda m, o: m.linear.bias.register_post_accumulate_grad_hook(print),
        CaptureError,
    ),
    "register_step_pre_hook": (lambda m, o: o.register_step_pre_hook(print), PlanError),
    "register_step_post_hook": (lambda m, o: o.register_step_post_hook(print), PlanError),
    "register_optimizer_step_pre_hook": (lambda m, o: register_optimizer_step_pre_hook(print), PlanError),
    "register_optimizer_step_post_hook": (lambda m, o: register_optimizer_step_post_hook(print), PlanError),
}


@pytest.mark.parametrize("row", HOOKS)
def test_hooks_of_gradients_and_optimizers_are_errors_at_compile(row: str) -> None:
    register, kind = HOOKS[row]
    model = Model()
    optimizer = adamw(model)
    handle = register(model, optimizer)
    try:
        with pytest.raises(kind, match=row):
            mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh="dp=2")
    finally:
        handle.remove()
    mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh="dp=2")(DATA[0])


# What is not seen


def set_scale(run: Run, value: float) -> None:
    global SCALE
    SCALE = value


UNSEEN: dict[str, Callable[[Run, float], Any]] = {
    "a global": set_scale,
    "a class attribute": lambda r, value: setattr(Model, "offset", value),
    "an entry of a list": lambda r, value: r.model.factors.__setitem__(0, value),
    "an attribute of an object": lambda r, value: setattr(r.model.options, "scale", value),
}


@pytest.mark.parametrize("row", UNSEEN)
def test_after_a_change_that_is_not_seen_the_step_does_what_it_did(row: str) -> None:
    ours, control = Run.of(), Run.of()
    try:
        UNSEEN[row](ours, 3.0)
        assert [float(ours.step(b)) for b in DATA[:2]] == [float(control.step(b)) for b in DATA[:2]]
        eager = Run.eager(ours)
        ours.step.recompile()
        torch.testing.assert_close(float(ours.step(DATA[2])), eager.step(DATA[2]))
    finally:
        set_scale(ours, 1.0)
        Model.offset = 0.0


def test_a_closure_of_the_loss_is_not_seen() -> None:
    weight = 1.0
    run = Run.of(loss=lambda out, batch: weight * mse(out, batch))
    before = float(run.step.evaluate(DATA[0]))
    weight = 2.0
    assert float(run.step.evaluate(DATA[0])) == before


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = [nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Dropout(), nn.LayerNorm(2)) for _ in range(100)]
        self.layers = nn.ModuleList(parts)


def test_the_look_at_five_hundred_modules_is_few_calls() -> None:
    guards = Guards({"model": Layers()}, None)
    assert len(guards.modules) == 502
    batch = Batch.of(DATA[0])
    guards.check(batch)
    assert calls_of(lambda: guards.check(batch)) < 700  # a flag of each of 400 parameters; entries are compared in C
