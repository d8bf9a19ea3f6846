"""Float16: the loss is scaled as by torch.amp.GradScaler, and a step whose gradients overflow is skipped."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.test_eager_updates import Branching
from tests.training import assert_tensors, batches, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import CaptureError, PlanError, StepError

DATA = batches(9, (8, 4), (8, 4))
# Overflows in the first steps, then every time that it has grown: gradients are about 0.1, and float16 ends at 65504.
SCALE = {"init_scale": 2.0**19, "growth_interval": 2}
HALF = mw.Precision(autocast=torch.float16, loss_scale=mw.LossScale(**SCALE))
Make = Callable[[Any], torch.optim.Optimizer]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8)
        self.down = nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.norm(self.up(x.to(self.up.weight.dtype)))))


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


class Eager:
    """Eager PyTorch under autocast, with a GradScaler."""

    def __init__(self, model: nn.Module, make: Make = sgd, clip: float | None = None, parts: int = 1) -> None:
        self.model, self.clip, self.parts = copy.deepcopy(model), clip, parts
        self.optimizer = make(self.model.parameters())
        self.scaler = torch.amp.GradScaler("cpu", **SCALE)

    def __call__(self, batch: dict[str, Tensor]) -> dict[str, float]:
        self.optimizer.zero_grad()
        losses = []
        for i in range(self.parts):
            micro = {name: x.chunk(self.parts)[i] for name, x in batch.items()}
            with torch.autocast("cpu", torch.float16):
                loss = mse(self.model(micro["x"]), micro)
            self.scaler.scale(loss / self.parts).backward()
            losses.append(loss.item())
        self.scaler.unscale_(self.optimizer)
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or math.inf).item()
        if self.clip is None:  # a factor of 1, but of NaN for a norm that is infinite
            norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters()]).item()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return {"loss": sum(losses) / self.parts, "grad_norm": norm, "loss_scale": self.scaler.get_scale()}


def compiled(model: nn.Module, mesh: str = "", make: Make = sgd, **options: Any) -> mw.TrainStep:
    options = {"precision": HALF, "profile": "alpha-beta", **options}
    return mw.compile(model, loss=mse, example=DATA[0], optimizer=make(model.parameters()), mesh=mesh, **options)


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def assert_alike(step: mw.TrainStep, eager: Eager, tolerance: float) -> None:
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.model.named_parameters()}, tolerance)
    assert_tensors(step.buffers(), dict(eager.model.named_buffers()), tolerance)


def follow(step: mw.TrainStep, eager: Eager, data: list[dict[str, Tensor]], tolerance: float) -> list[bool]:
    """Take the same steps. Returns which were skipped."""
    skipped = []
    for batch in data:
        before, scale = step.metrics.get("skipped_steps", 0.0), eager.scaler.get_scale()
        step(batch)
        expected = eager(batch)
        skipped.append(expected["loss_scale"] < scale)
        assert step.metrics.pop("skipped_steps") - before == skipped[-1]
        found = {name: step.metrics[name] for name in expected}
        if skipped[-1]:
            assert not math.isfinite(found.pop("grad_norm"))
            del expected["grad_norm"]
        assert found == pytest.approx(expected, rel=tolerance)
        assert_alike(step, eager, tolerance)
    return skipped


@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2", "tp=2"])
def test_steps_are_those_of_a_grad_scaler(mesh: str) -> None:
    model = net()
    eager, step = Eager(model), compiled(model, mesh)
    skipped = follow(step, eager, DATA, 1e-6 if not mesh else 5e-3)
    assert skipped[:2] == [True, True]
    assert 2 < sum(skipped) < 7  # it has grown in between
    assert step.num_steps == 9


def test_microbatches_stages_clipping_and_counts_of_the_optimizer() -> None:
    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=1e-3)

    model = net()
    eager = Eager(model, adam, clip=0.05, parts=2)
    plan = mw.Plan.on({"down": "pp=1"}) + mw.Plan.dp("dp")
    step = compiled(model, "pp=2,dp=2", adam, clip_grad_norm=0.05, accumulate=2, plan=plan)
    skipped = follow(step, eager, DATA[:6], 5e-3)
    counts = {int(kept["step"]) for kept in step.optimizer.state.values()}
    assert counts == {int(kept["step"]) for kept in eager.optimizer.state.values()} == {6 - sum(skipped)}


def test_a_batch_that_overflows_forward_is_skipped() -> None:
    model = net()
    eager, step = Eager(model), compiled(model, "dp=2")
    huge = {"x": DATA[0]["x"], "y": DATA[0]["y"] * 1e30}
    step(huge)
    assert eager(huge)["loss"] == step.metrics["loss"] == math.inf
    assert step.metrics["loss_scale"] == eager.scaler.get_scale() == 2.0**18
    assert_alike(step, eager, 5e-3)
    keeping = compiled(net(), run=mw.RunOptions(keep_gradients=True))
    keeping(huge)
    with pytest.raises(StepError, match="the last step was skipped"):
        keeping.gradients()


def test_an_endless_overflow_is_an_error() -> None:
    step = compiled(net(), precision=mw.Precision(autocast=torch.float16, loss_scale=mw.LossScale(init_scale=2**-24)))
    huge = {"x": DATA[0]["x"], "y": DATA[0]["y"] * 1e30}
    step(huge)
    with pytest.raises(StepError, match="not finite in float16, whatever the scale"):
        step(huge)
    assert step.num_steps == 1


def test_gradients_are_unscaled_and_an_eager_update_is_skipped() -> None:
    model = net()
    eager = Eager(model, lambda params: Branching(params))
    run = mw.RunOptions(keep_gradients=True)
    step = compiled(model, "fsdp=2", lambda params: Branching(params), run=run)
    assert step.program.eager_update
    skipped = follow(step, eager, DATA[:4], 5e-3)
    assert True in skipped
    assert not skipped[-1]
    assert_tensors(step.gradients(), {n: p.grad for n, p in eager.model.named_parameters()}, 2e-2)


def test_two_optimizers_skip_together() -> None:
    model = net()
    both = [
        torch.optim.SGD(model.up.parameters(), lr=0.1),
        torch.optim.Adam(model.down.parameters(), lr=0.1),
    ]
    step = mw.compile(model, loss=mse, example=DATA[0], optimizer=both, mesh="", precision=HALF)
    before = {name: p.clone() for name, p in step.parameters().items()}
    step(DATA[0])
    assert step.metrics["skipped_steps"] == 1
    assert all(torch.equal(p, before[name]) for name, p in step.parameters().items())
    assert not any(kept for optimizer in both for kept in optimizer.state.values())


def test_a_checkpoint_continues_the_scale_on_another_mesh_and_recompile_keeps_it(tmp_path: Path) -> None:
    model = net()
    eager, step = Eager(model), compiled(model, "dp=2")
    follow(step, eager, DATA[:6], 5e-3)
    step.save(str(tmp_path / "at"))
    torch.manual_seed(1)
    other = compiled(Net(), "fsdp=2")
    other.load(str(tmp_path / "at"))
    assert vars_of(other) == vars_of(step)
    other.recompile()
    assert vars_of(other) == vars_of(step)
    other.metrics.clear()
    other(DATA[6])
    assert other.metrics["loss_scale"] == eager(DATA[6])["loss_scale"]
    assert_alike(other, eager, 5e-3)


def vars_of(step: mw.TrainStep) -> dict[str, float]:
    return step.session.state.scaler.numbers()


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_norm_that_is_not_finite_stops_before_the_update(precision: torch.dtype | None) -> None:
    def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return mse(out, batch) + (out.float() * batch["x"][0, 0]).square().sum().sqrt()  # of 0: 0, with gradient NaN

    def step_with(**options: Any) -> mw.TrainStep:
        model = net()
        return mw.compile(
            model, loss=loss, example=DATA[0], optimizer=sgd(model.parameters()), mesh="dp=2", clip_grad_norm=1.0,
            precision=precision, profile="alpha-beta", **options,
        )  # fmt: skip

    step, bad = step_with(), {**DATA[1], "x": DATA[1]["x"].clone()}
    bad["x"][0, 0] = 0.0
    step(DATA[0])
    before = {name: x.clone() for name, x in {**step.parameters(), **step.buffers()}.items()}
    with pytest.raises(StepError, match="the norm of the gradients of step 2 is nan"):
        step(bad)
    assert all(torch.equal(x, before[name]) for name, x in {**step.parameters(), **step.buffers()}.items())
    assert step.num_steps == 1
    assert math.isfinite(step(DATA[1]))
    through = step_with(run=mw.RunOptions(check_finite=False))
    through(bad)
    assert math.isnan(through.metrics["grad_norm"])


class InnerHalf(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.float16):
            return super().forward(x)


def is_scaled(model: nn.Module, precision: Any) -> bool:
    step = compiled(model, precision=precision)
    step(DATA[0])
    return "loss_scale" in step.metrics


def test_which_steps_scale_their_loss() -> None:
    assert is_scaled(net(), torch.float16)
    assert is_scaled(net(), mw.Precision(param_dtype=torch.float16))
    assert is_scaled(InnerHalf(), None)
    assert not is_scaled(net(), torch.bfloat16)
    assert not is_scaled(net(), mw.Precision(autocast=torch.float16, loss_scale=None))
    assert is_scaled(net(), mw.Precision(loss_scale=mw.LossScale(init_scale=2.0)))
    with pytest.raises(PlanError, match="invalid loss scale"):
        mw.LossScale(backoff_factor=2.0)
    with pytest.raises(PlanError, match="not a loss scale"):
        mw.Precision(loss_scale=1024.0)  # type: ignore[arg-type]


def test_float16_parameters_train() -> None:
    model, half = net(), lambda batch: {name: x.half() for name, x in batch.items()}
    model.norm = nn.Identity()
    optimizer = sgd(model.half().parameters())
    step = mw.compile(
        model, loss=lambda out, b: mse(out.float(), b), example=half(DATA[0]), optimizer=optimizer, mesh="dp=2"
    )
    losses = [float(step(half(DATA[0]))) for _ in range(20)]
    assert step.metrics["loss_scale"] <= 2.0**16
    assert losses[-1] < losses[0] / 1.2


def test_a_grad_scaler_in_the_loss_is_an_error() -> None:
    scaler, model = torch.amp.GradScaler("cpu"), net()
    with pytest.raises(CaptureError, match="GradScaler, but the step does so by itself"):
        mw.compile(model, loss=lambda out, b: scaler.scale(mse(out, b)), example=DATA[0], optimizer=None, mesh="")


def test_a_traced_step_may_be_skipped() -> None:
    assert compiled(net(), "dp=2").trace(DATA[0]).seconds > 0


def job_scaled(pipe: Connection) -> dict[str, Any]:
    step = compiled(net(), "fsdp=2")
    scales = []
    for batch in DATA[:6]:
        step(batch)
        scales.append(step.metrics["loss_scale"])
    return {"scales": scales, "params": {name: p.tolist() for name, p in step.parameters().items()}}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_ranks_scale_alike(start: Callable[..., Job]) -> None:
    first, second = start("tests.test_loss_scale:job_scaled", 2).finish(240)
    alone = compiled(net(), "fsdp=2")
    scales = []
    for batch in DATA[:6]:
        alone(batch)
        scales.append(alone.metrics["loss_scale"])
    assert first["scales"] == second["scales"] == scales, (first, second)
    assert_tensors({name: torch.tensor(p) for name, p in first["params"].items()}, alone.parameters(), 1e-5)
