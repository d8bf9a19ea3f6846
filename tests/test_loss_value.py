"""The loss that a step returns is used as that of eager PyTorch is."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.training import batches, mse
from torch import Tensor, nn

import meshweave as mw

DATA = batches(3, (4, 4), (4, 2))


def compiled(mesh: str = "dp=2", accumulate: int = 1, **options: bool) -> tuple[mw.TrainStep, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 2))
    example = {"input": DATA[0]["x"], **DATA[0]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = mw.compile(
        model, loss=mse, example=example, optimizer=optimizer, mesh=mesh, accumulate=accumulate, **options
    )
    return made, model


def rows(i: int) -> dict[str, Tensor]:
    return {"input": DATA[i]["x"], **DATA[i]}


def test_what_scripts_do_with_a_loss() -> None:
    step, model = compiled()
    with torch.no_grad():
        expected = mse(model(DATA[0]["x"]), DATA[0])
    loss = step(rows(0))
    torch.testing.assert_close(loss, expected)
    assert (loss.shape, loss.dtype, loss.requires_grad, loss.device.type) == ((), torch.float32, False, "cpu")
    number = loss.item()
    assert number == float(loss) == step.metrics["loss"] == pytest.approx(expected.item())
    assert f"{loss:.4f}" == f"{number:.4f}"
    assert json.dumps({"loss": loss.item()})
    assert math.isfinite(loss)
    assert torch.equal(loss.detach().cpu(), loss)
    losses = [loss, step(rows(1)), step(rows(2))]
    assert torch.stack(losses).mean().item() == pytest.approx(sum(float(x) for x in losses) / 3)
    total: Tensor | float = 0.0
    for each in losses:
        total += each
    assert float(total) == pytest.approx(sum(x.item() for x in losses))
    assert number == losses[0].item()  # later steps leave earlier losses alone


def test_a_loss_that_is_written_changes_nothing_else() -> None:
    step, _ = compiled()
    loss = step(rows(0))
    before = loss.item()
    loss += 1.0
    assert step.metrics["loss"] == before
    evaluated = step.evaluate(rows(0))
    evaluated.zero_()
    assert step.evaluate(rows(0)) > 0


def test_the_loss_of_microbatches_is_their_mean() -> None:
    whole, _ = compiled()
    parts, _ = compiled(accumulate=2)
    torch.testing.assert_close(parts(rows(0)), whole(rows(0)))


def test_a_loss_that_is_not_finite_is_an_error_before_the_update_or_let_through() -> None:
    step, _ = compiled()
    before = {n: p.clone() for n, p in step.parameters().items()}
    bad = {k: v.fill_(float("nan")) for k, v in {k: v.clone() for k, v in rows(0).items()}.items()}
    with pytest.raises(mw.StepError, match="the loss of step 1 is nan"):
        step(bad)
    assert all(torch.equal(p, before[n]) for n, p in step.parameters().items())
    assert math.isnan(compiled(run=mw.RunOptions(check_finite=False))[0](bad))
