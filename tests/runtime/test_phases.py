"""forward, backward and update one by one: to the bit what the whole step does, and in no other order."""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import Breaks, batches, compile_once, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.errors import LayoutError, StepError

MESHES = ["", "dp=2", "fsdp=2,tp=2", "pp=2,dp=2"]
ADAM = partial(torch.optim.AdamW, lr=0.01)


def compiled(mesh: str = "dp=2", accumulate: int = 1) -> mw.TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 4))
    optimizer, example = ADAM(model.parameters()), data(accumulate)[0]
    options = {"mesh": mesh, "accumulate": accumulate, "run": mw.RunOptions(keep_gradients=True)}
    return compile_once((__name__, mesh, accumulate), model, loss=mse, example=example, optimizer=optimizer, **options)


def data(accumulate: int = 1) -> list[dict[str, Tensor]]:
    size = 4 * accumulate
    return [{"input": b["x"], **b} for b in batches(4, (size, 4), (size, 4))]


def micros(batch: dict[str, Tensor], count: int) -> list[dict[str, Tensor]]:
    return [{k: v.chunk(count)[i] for k, v in batch.items()} for i in range(count)]


def everything(step: mw.TrainStep) -> dict[str, Tensor]:
    found = {f"param {n}": v for n, v in step.parameters().items()}
    found |= {f"state {n}": v for n, v in step.optimizer_state().items()}
    return found | {f"grad {n}": v for n, v in step.gradients().items()}


def in_parts(step: mw.TrainStep, batch: dict[str, Tensor], accumulate: int = 1) -> float:
    losses = []
    for micro in micros(batch, accumulate):
        losses.append(float(step.forward(micro)))
        step.backward()
    step.update()
    return sum(losses) / len(losses)


@pytest.mark.slow_rows("-1", "dp=2-1", "dp=2-3", "fsdp=2,tp=2-1", "pp=2,dp=2-1")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("mesh", MESHES)
def test_the_parts_are_the_whole_to_the_bit(mesh: str, accumulate: int) -> None:
    whole, parts = compiled(mesh, accumulate), compiled(mesh, accumulate)
    for batch in data(accumulate):
        assert in_parts(parts, batch, accumulate) == whole(batch) == parts.metrics["loss"]
        expected = everything(whole)
        found = everything(parts)
        assert set(found) == set(expected)
        assert all(torch.equal(found[name], value) for name, value in expected.items())
    assert parts.num_steps == whole.num_steps == 4


def refused(call: Any, what: str, got: str, expected: str) -> StepError:
    with pytest.raises(StepError) as error:
        call()
    assert (error.value.what, error.value.got, error.value.expected) == (what, got, expected)
    return error.value


def test_parts_out_of_order_say_what_comes_next() -> None:
    step, (batch, *_) = compiled(), data()
    begun = "a step that has not begun"
    refused(step.backward, "backward is out of order in this step", begun, "forward()")
    refused(step.update, "update is out of order in this step", begun, "forward()")
    step.forward(batch)
    again = partial(step.forward, batch)
    refused(again, "forward is out of order in this step", "after forward", "backward()")
    refused(step.update, "update is out of order in this step", "after forward", "backward()")
    step.backward()
    refused(step.backward, "backward is out of order in this step", "after backward", "update()")
    error = refused(again, "forward is out of order in this step", "after backward", "update()")
    assert error.hint == "a step is forward and backward, then update"
    step.update()
    assert step.num_steps == 1


def test_each_microbatch_is_counted() -> None:
    step, (batch, *_) = compiled(accumulate=3), data(3)
    first, second, third = micros(batch, 3)
    step.forward(first)
    step.backward()
    expected = "forward()"
    error = refused(step.update, "update is out of order in this step", "after backward of microbatch 1 of 3", expected)
    assert error.hint == "a step is forward and backward for each microbatch, then update"
    step.forward(second)
    refused(step.update, "update is out of order in this step", "after forward of microbatch 2 of 3", "backward()")
    step.backward()
    step.forward(third)
    step.backward()
    step.update()
    assert step.num_steps == 1


def test_nothing_else_comes_in_the_middle_of_a_step(tmp_path: Path) -> None:
    step, (batch, other, *_) = compiled("pp=2,dp=2"), data()
    expected = compiled("pp=2,dp=2")
    losses = [expected(batch), expected(other)]
    step.forward(batch)
    whole = "a whole step is not possible in the middle of a step"
    refused(partial(step, batch), whole, "after forward", "backward() first")
    place = str(tmp_path / "ckpt")
    checkpoint = "a checkpoint is not possible in the middle of a step"
    refused(partial(step.save, place), checkpoint, "after forward", "backward() first")
    step.backward()
    refused(partial(step.load, place), checkpoint, "after backward", "update() first")
    step.update()
    step.save(place)
    assert [step.metrics["loss"], step(other)] == losses


@pytest.mark.parametrize("phase", ["loss", "backward"])
def test_after_a_failure_the_step_begins_afresh(phase: str) -> None:
    (first, second, *_), expected = data(), compiled("pp=2,dp=2")
    losses = [expected(first), expected(second)]
    step = compiled("pp=2,dp=2")
    with pytest.raises(LayoutError, match="differs from the example"):
        step.forward({name: value[:2] for name, value in first.items()})
    assert step.forward(first) == losses[0]
    step.backward()
    step.update()
    step.session.executor.meter = Breaks(3, phase)
    with pytest.raises(StepError, match="on fire"):
        in_parts(step, second)
    assert step.num_steps == 1
    assert in_parts(step, second) == losses[1]
    assert all(torch.equal(v, everything(expected)[n]) for n, v in everything(step).items())


def test_a_loss_that_is_not_finite_is_told_before_the_update() -> None:
    step, (batch, *_) = compiled(), data()
    before = step.parameters()
    assert step.forward({**batch, "y": batch["y"] * float("inf")}) == float("inf")
    step.backward()
    with pytest.raises(StepError, match="the loss of step 1 is inf"):
        step.update()
    assert all(torch.equal(p, before[n]) for n, p in step.parameters().items())
    assert step(batch) < 10


WRITES: dict[str, Any] = {
    "a number of the optimizer": lambda step, p: step.optimizer.state[p]["step"].fill_(9.0),
    "a moment": lambda step, p: step.optimizer.state[p]["exp_avg"].zero_(),
    "loaded": lambda step, p: step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict())),
    "a parameter": lambda step, p: torch.nn.init.zeros_(p),
}


@pytest.mark.parametrize("mesh", ["", "dp=2"])
@pytest.mark.parametrize("row", WRITES)
def test_values_written_in_the_middle_of_a_step_are_an_error(mesh: str, row: str) -> None:
    step, batch = compiled(mesh), data()[0]
    step(batch)
    step.forward(batch)
    step.backward()
    WRITES[row](step, next(step.model.parameters()))
    with pytest.raises(StepError, match="values were written in the middle of a step"):
        step.update()
    assert step.num_steps == 1
    in_parts(step, batch)  # what was written counts in a step that begins after it


class Gaps(nn.Linear):
    """With a buffer that has NaN where there is no value."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("known", torch.tensor([1.0, torch.nan, 2.0, torch.nan]))

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + self.known.nan_to_num()


@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_a_buffer_with_nan_is_not_written(mesh: str) -> None:
    model = Gaps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = mw.compile(model, loss=mse, example=data()[0], optimizer=optimizer, mesh=mesh)
    for batch in data():
        in_parts(step, batch)
