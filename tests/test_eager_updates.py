"""Optimizers that are not in the table of updates: their own step() runs after the compiled backward pass."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.training import assert_tensors, batches, mse
from torch import Tensor, nn
from torch.optim import lr_scheduler

import meshweave as mw
from meshweave.check.runs import Eager, Recipe
from meshweave.errors import PlanError
from meshweave.runtime.cluster import shutdown

DATA = batches(6, (8, 4), (8, 4))
MESHES = ("dp=2", "fsdp=2", "fsdp=2,tp=2")


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in ((4, 8), (8, 8), (8, 8), (8, 4)))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Mixing(torch.optim.Optimizer):
    """Branches on values, and mixes tensors that it makes with those of parameters."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["largest"] = torch.zeros(p.shape[0], dtype=p.dtype)
                    state["scale"] = torch.eye(p.shape[0], dtype=p.dtype)
                state["largest"] = torch.maximum(
                    state["largest"], p.grad.abs().flatten(1).amax(1) if p.dim() > 1 else p.grad.abs()
                )
                weight = (
                    torch.linspace(0.5, 1.0, p.shape[0], dtype=p.dtype) * torch.arange(1, p.shape[0] + 1) / p.shape[0]
                )
                update = state["scale"] @ p.grad * weight.reshape(-1, *[1] * (p.dim() - 1))
                if float(state["largest"].max()) > 0.001:
                    update = update / (1 + state["largest"].max())
                p.sub_(update, alpha=group["lr"])


class Branching(torch.optim.Optimizer):
    """Branches on values of tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"], state["count"] = torch.zeros_like(p), 0
                state["count"] += 1
                state["mean"].lerp_(p.grad, 0.2)
                norm = float(state["mean"].norm())
                rate = group["lr"] / max(1.0, 10 * norm) / group["k"] ** 0.5
                p.sub_(state["mean"], alpha=rate if norm > 0.01 else 2 * rate)


class Lamb(torch.optim.Optimizer):
    """You et al., arXiv 1904.00962, with the trust ratio by Python."""

    def __init__(self, params: Any, lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "decay": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["step"], state["mean"], state["square"] = 0, torch.zeros_like(p), torch.zeros_like(p)
                state["step"] += 1
                state["mean"].mul_(beta1).add_(p.grad, alpha=1 - beta1)
                state["square"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
                mean = state["mean"] / (1 - beta1 ** state["step"])
                change = mean / ((state["square"] / (1 - beta2 ** state["step"])).sqrt() + 1e-6) + group["decay"] * p
                weight, size = p.norm(), change.norm()
                ratio = 1.0 if weight == 0 or size == 0 else (weight / size).item()
                p.add_(change, alpha=-group["lr"] * ratio)


class TensorLamb(Lamb):
    """With the trust ratio by tensors."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["mean"], state["square"] = torch.zeros_like(p), torch.zeros_like(p)
                state["mean"].lerp_(p.grad, 1 - group["betas"][0])
                state["square"].lerp_(p.grad * p.grad, 1 - group["betas"][1])
                change = state["mean"] / (state["square"].sqrt() + 1e-6) + group["decay"] * p
                weight, size = p.norm(), change.norm()
                ratio = torch.where((weight > 0) & (size > 0), weight / size, 1.0)
                p.sub_(group["lr"] * ratio * change)


class EightBit(torch.optim.Optimizer):
    """Adam whose moments are integers of 8 bits with a scale for each block of elements (Dettmers et al., arXiv
    2110.02861), made of ops of PyTorch."""

    def __init__(self, params: Any, lr: float = 0.01, block: int = 2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "block": block})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, beta1, beta2 = self.state[p], *group["betas"]
                blocks = p.grad.reshape(-1, group["block"])
                if not state:
                    state["step"] = 0
                    for slot in ("mean", "square"):
                        state[slot] = torch.zeros_like(blocks, dtype=torch.int8)
                        state[f"{slot}_scale"] = torch.zeros_like(blocks[:, :1])
                state["step"] += 1
                mean = beta1 * state["mean"] * state["mean_scale"] + (1 - beta1) * blocks
                square = beta2 * state["square"] * state["square_scale"] + (1 - beta2) * blocks * blocks
                for slot, value in (("mean", mean), ("square", square)):
                    scale = value.abs().amax(dim=1, keepdim=True) / 127 + 1e-12
                    state[slot] = (value / scale).round().to(torch.int8)
                    state[f"{slot}_scale"] = scale
                mean = mean / (1 - beta1 ** state["step"])
                change = mean / ((square / (1 - beta2 ** state["step"])).sqrt() + 1e-3)
                p.sub_(change.reshape(p.shape), alpha=group["lr"])


class Shampoo(torch.optim.Optimizer):
    """Gupta et al., arXiv 1802.09568, for matrices and vectors."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "every": 2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, grad = self.state[p], p.grad
                for dim in range(p.dim()):
                    table = grad.transpose(0, dim).reshape(p.shape[dim], -1)
                    state[f"sums{dim}"] = state.get(f"sums{dim}", 0.0) + table @ table.T
                    if state.get("step", 0) % group["every"] == 0:
                        values, vectors = torch.linalg.eigh(state[f"sums{dim}"])
                        state[f"root{dim}"] = (vectors * values.clamp(min=1e-3).pow(-0.5 / p.dim())) @ vectors.T
                    shape = [p.shape[dim], *(s for i, s in enumerate(p.shape) if i != dim)]
                    grad = (state[f"root{dim}"] @ grad.transpose(0, dim).reshape(p.shape[dim], -1)).reshape(shape)
                    grad = grad.transpose(0, dim)
                state["step"] = state.get("step", 0) + 1
                p.sub_(grad, alpha=group["lr"])


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "branching": lambda m: Branching(m.parameters()),
    "mixing": lambda m: Mixing(m.parameters()),
    "LAMB": lambda m: Lamb(m.parameters()),
    "Shampoo": lambda m: Shampoo(m.parameters()),
    "8-bit Adam": lambda m: EightBit(m.parameters()),
    "LAMB by tensors": lambda m: TensorLamb(m.parameters()),
}


def pair(kind: str, mesh: str, **options: Any) -> tuple[mw.TrainStep, torch.optim.Optimizer, Eager]:
    model = Net().double()
    twin = copy.deepcopy(model)
    ours, theirs = KINDS[kind](model), KINDS[kind](twin)
    step = mw.compile(model, loss=mse, example=doubles()[0], optimizer=ours, mesh=mesh, profile="alpha-beta", **options)
    return step, ours, Eager(twin, theirs, Recipe(loss=mse, clip_grad_norm=options.get("clip_grad_norm")))


def doubles() -> list[dict[str, Tensor]]:
    return [{k: v.double() for k, v in b.items()} for b in DATA]


def assert_equal(step: mw.TrainStep, eager: Eager) -> None:
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.parameters().items()}, 1e-12)
    found, expected = step.optimizer_state(), eager.optimizer_state()
    if "pp" in str(step.program.mesh) and step.session.world.is_distributed and step.program.eager_update:
        assert found  # of this rank's stage
        expected = {name: value for name, value in expected.items() if name in found}
    assert_tensors(found, expected, 1e-9)


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_equal_eager(kind: str, mesh: str, caplog: pytest.LogCaptureFixture) -> None:
    step, _, eager = pair(kind, mesh)
    assert caplog.text.count("step() runs eagerly: no update is registered for its class") == 1
    assert "step() runs eagerly" in " ".join(step.program.notes)
    for batch in doubles():
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-12)
    assert_equal(step, eager)
    assert step.num_steps == 6


class RunningNorm(torch.optim.Optimizer):
    """Writes values of tensors into 0-dim tensors of its own."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                norm = self.state[p].setdefault("norm", torch.zeros((), dtype=p.dtype))
                norm.mul_(0.9).add_(p.grad.norm())
                p.sub_(group["lr"] * p.grad / norm)


class Buffered(torch.optim.Optimizer):
    """Keeps numbers in lists within its group, as the first RAdam did (Liu et al., arXiv 1908.03265)."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr, "buffer": [[None, None] for _ in range(10)]})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                entry = group["buffer"][int(state["step"] % 10)]
                if entry[0] != state["step"]:
                    entry[:] = state["step"], 1 / (1 - 0.9 ** state["step"])
                p.sub_(p.grad, alpha=entry[1] * group["lr"])


class Trying(torch.optim.Optimizer):
    """Catches whatever a norm raises."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                try:
                    scale = float(p.grad.norm())
                except Exception:
                    scale = 1.0
                p.sub_(p.grad, alpha=group["lr"] * scale)


class Beginning(torch.optim.Optimizer):
    """Begins a mean in its third step."""

    def __init__(self, params: Any, lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                if state["step"] == 3:
                    state["mean"] = torch.ones_like(p)
                if "mean" in state:
                    state["mean"].lerp_(p.grad, 0.1)
                p.sub_(p.grad + state.get("mean", 0.0), alpha=group["lr"])


@pytest.mark.parametrize("make_optimizer", [RunningNorm, Buffered, Trying, Beginning])
def test_state_of_every_kind(make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
    model = Net().double()
    twin = copy.deepcopy(model)
    eager = Eager(twin, make_optimizer(twin.parameters()), Recipe(loss=mse))
    optimizer = make_optimizer(model.parameters())
    step = mw.compile(model, loss=mse, example=doubles()[0], optimizer=optimizer, mesh="fsdp=2", profile="alpha-beta")
    assert "step() runs eagerly" in " ".join(step.program.notes)
    for batch in doubles():
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-12)


class Twice(torch.optim.SGD):
    """Sharpness-aware minimization: gradients at a second point."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


def test_a_closure_that_is_needed_is_an_error_of_the_first_step() -> None:
    model = Net()
    step = mw.compile(model, loss=mse, example=DATA[0], optimizer=Twice(model.parameters()), mesh="dp=2")
    with pytest.raises(PlanError, match=r"Twice evaluates the loss several times in a step\n  where: .*in step"):
        step(DATA[0])


class Making(torch.optim.Optimizer):
    """Scales gradients by a tensor that it makes."""

    def __init__(self, params: Any, scale: Callable[[Tensor], Tensor], lr: float = 0.05) -> None:
        super().__init__(params, {"lr": lr})
        self.scale = scale

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.scale(p.grad), alpha=group["lr"])


MAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "eye": lambda g: torch.eye(g.shape[0], dtype=g.dtype) @ g * 0.5,
    "arange": lambda g: g * torch.arange(g.shape[-1], dtype=g.dtype),
    "linspace": lambda g: g * torch.linspace(0.5, 1.0, g.shape[-1], dtype=g.dtype),
    "tensor": lambda g: g * torch.tensor([0.5, 0.25])[1],
    "randint": lambda g: g * torch.randint(0, 3, (g.shape[-1],)),
    "rand_like": lambda g: g * (torch.rand_like(g) < 0.5),
}


@pytest.mark.parametrize("name", MAKES)
def test_tensors_that_an_optimizer_makes(name: str) -> None:
    model = Net().double()
    twin = copy.deepcopy(model)
    eager = Eager(twin, Making(twin.parameters(), MAKES[name]), Recipe(loss=mse))
    optimizer = Making(model.parameters(), MAKES[name])
    step = mw.compile(model, loss=mse, example=doubles()[0], optimizer=optimizer, mesh="fsdp=2", profile="alpha-beta")
    for i, batch in enumerate(doubles()[:3]):
        losses = []
        for take in (step, eager):
            torch.manual_seed(i)
            losses.append(float(take(batch)))
        assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.parameters().items()}, 1e-12)


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_clipping_accumulation_schedules_and_evaluation(mesh: str) -> None:
    step, ours, eager = pair("branching", mesh, clip_grad_norm=0.05, accumulate=2)
    schedules = [lr_scheduler.StepLR(optimizer, 2) for optimizer in (ours, eager.optimizer)]
    for batch in doubles():
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-12)
        assert step.metrics["grad_norm"] > 0.05
        assert float(step.evaluate(batch)) == pytest.approx(mse(eager.model(batch["x"]), batch).item(), rel=1e-12)
        for schedule in schedules:
            schedule.step()
    assert_equal(step, eager)


def test_a_group_that_is_added_is_trained() -> None:
    model = Net().double()
    twin = copy.deepcopy(model)
    ours, theirs = (Branching(m.layers[:2].parameters()) for m in (model, twin))
    eager = Eager(twin, theirs, Recipe(loss=mse))
    step = mw.compile(model, loss=mse, example=doubles()[0], optimizer=ours, mesh="fsdp=2", profile="alpha-beta")
    for i, batch in enumerate(doubles()):
        if i == 3:
            for optimizer, its in ((ours, model), (theirs, twin)):
                optimizer.add_param_group({"params": [*its.layers[2:].parameters()], "lr": 0.2})
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-12)


def test_values_written_between_steps_count_and_a_step_is_compiled_again() -> None:
    step, ours, eager = pair("branching", "fsdp=2")
    for i, batch in enumerate(doubles()):
        for optimizer, model in ((ours, step.model), (eager.optimizer, eager.model)):
            if i == 2:
                nn.init.constant_(model.layers[0].bias, 0.5)  # type: ignore[index, union-attr]
            if i == 3:
                next(iter(optimizer.state.values()))["mean"].mul_(2.0)
            if i == 4:
                optimizer.param_groups[0]["lr"] = 0.02
        if i == 4:
            step.recompile()
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-12)
    assert_equal(step, eager)
    assert step.num_steps == 6


@pytest.mark.parametrize("kind", ["branching", "LAMB"])
def test_checkpoints_have_the_optimizer_s_state(kind: str, tmp_path: Path) -> None:
    step, _, eager = pair(kind, "fsdp=2")
    for i, batch in enumerate(doubles()):
        step = again(step, kind, str(tmp_path / "saved")) if i == 3 else step
        assert float(step(batch)) == pytest.approx(eager(batch), rel=1e-12)
    assert_equal(step, eager)


def again(step: mw.TrainStep, kind: str, path: str) -> mw.TrainStep:
    step.save(path)
    other, _, _ = pair(kind, "" if "2" in str(step.program.mesh) else "fsdp=2")
    other(doubles()[5])
    other.load(path)
    return other


def test_one_of_several_optimizers_makes_all_eager() -> None:
    model = Net().double()
    twin = copy.deepcopy(model)
    both = []
    for m in (model, twin):
        both.append([Branching(m.layers[0].parameters()), torch.optim.AdamW(m.layers[1:].parameters())])
    step = mw.compile(model, loss=mse, example=doubles()[0], optimizer=both[0], mesh="dp=2")
    for batch in doubles():
        value = mse(twin(batch["x"]), batch)
        value.backward()
        for optimizer in both[1]:
            optimizer.step()
            optimizer.zero_grad()
        assert float(step(batch)) == pytest.approx(value.item(), rel=1e-12)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in twin.named_parameters()}, 1e-12)


class Noisy(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.grad.add_(torch.randn_like(p)).add_(torch.empty_like(p).uniform_())
        super().step()


def noisy_job(pipe: Connection) -> dict[str, Any]:
    """Weights after steps of an optimizer that adds noise, from generators that differ between ranks."""
    weights = []
    for mesh in ("dp=2", "fsdp=2"):
        model = Net()
        optimizer = Noisy(model.parameters(), 0.1)
        step = mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh=mesh, profile="alpha-beta")
        torch.manual_seed(torch.distributed.get_rank())
        for batch in DATA[:2]:
            step(batch)
        weights.append(step.parameters()["layers.0.weight"].tolist())
    drawn = torch.rand(())
    torch.manual_seed(torch.distributed.get_rank())
    is_generator_kept = bool(drawn == torch.rand(()))
    shutdown(step.session.world)
    return {"weights": weights, "is_generator_kept": is_generator_kept}


@pytest.mark.multiprocess
def test_ranks_draw_the_same_noise(start: Callable[..., Job]) -> None:
    first, second = start(f"{__name__}:noisy_job", 2).finish(60)
    assert first["is_generator_kept"], first
    assert second["is_generator_kept"], second
    assert first["weights"] == second["weights"]
    torch.testing.assert_close(*map(torch.tensor, first["weights"]))


def job(pipe: Connection, kind: str, mesh: str, folder: str) -> dict[str, Any]:
    step, _, eager = pair(kind, mesh)
    losses = []
    for i, batch in enumerate(doubles()):
        if i == 3:
            step.save(folder)
            step, _, _ = pair(kind, mesh)
            step.load(folder)
        losses.append((float(step(batch)), eager(batch)))
    assert_equal(step, eager)
    shutdown(step.session.world)
    return {"worst": max(abs(a / b - 1) for a, b in losses)}


@pytest.mark.slow_rows("branching-fsdp=2", "LAMB-fsdp=2", "Shampoo-fsdp=2")
@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "mesh"), [*((kind, "fsdp=2") for kind in KINDS), ("branching", "pp=2")])
def test_on_two_processes(kind: str, mesh: str, start: Callable[..., Job], tmp_path: Path) -> None:
    outcomes = start(f"{__name__}:job", 2, kind, mesh, str(tmp_path / "saved")).finish(120)
    assert max(outcome.get("worst", 1.0) for outcome in outcomes) < 1e-9, outcomes
