"""An own loop with Accelerate on a compiled step: loader, schedule, checkpoints and tracking stay Accelerate's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[integrations]'")

import meshweave as mw
from meshweave.errors import PlanError, StepError

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def loss_of(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.mse_loss(out, batch["y"])


def trained(is_ours: bool, steps: range, folder: Path, load: Path | None = None) -> list[float]:
    """Losses of these steps; the state after the last is saved in `folder`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
    generator = torch.Generator().manual_seed(1)
    rows = [{"input": torch.randn(6, generator=generator), "y": torch.randn(4, generator=generator)} for _ in range(48)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.7)
    accelerator = accelerate.Accelerator(cpu=True)
    model = accelerator.prepare_model(model, evaluation_mode=True)
    optimizer, loader, schedule = accelerator.prepare(optimizer, DataLoader(rows, batch_size=8), schedule)
    if load is not None:
        accelerator.load_state(str(load))
    step, losses = None, []
    for _, batch in list(zip(range(6), loader, strict=True))[steps.start : steps.stop]:
        if is_ours:
            step = step or mw.compile(
                model, loss=loss_of, example=batch, optimizer=optimizer.optimizer, mesh="fsdp=2", batch="local"
            )
            loss = step(batch)
        else:
            loss = loss_of(model(batch["input"]), batch)
            accelerator.backward(loss)
        optimizer.step()  # no parameter has a gradient after a compiled step, whose update is done
        schedule.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    accelerator.save_state(str(folder))
    return losses


@pytest.mark.parametrize("ours_first", [True, False])
def test_trains_and_continues_as_a_plain_loop(ours_first: bool, tmp_path: Path) -> None:
    expected = trained(False, range(6), tmp_path / "plain")
    first = trained(ours_first, range(3), tmp_path / "first")
    rest = trained(not ours_first, range(3, 6), tmp_path / "rest", load=tmp_path / "first")
    assert first + rest == pytest.approx(expected, abs=1e-5)


def test_accumulation_by_accelerate_is_refused() -> None:
    """It would skip the schedule and `optimizer.step()` for the microbatches that the step has updated with."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(6, 4)
    rows = [{"input": torch.randn(6), "y": torch.randn(4)} for _ in range(12)]
    optimizer, loader = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(rows, batch_size=4))
    step = mw.compile(
        model, loss=loss_of, example=rows_of(rows[:4]), optimizer=optimizer.optimizer, mesh="dp=2", batch="local"
    )
    before, outcomes = model.weight.detach().clone(), []
    for batch in loader:
        with accelerator.accumulate(model):
            outcomes.append(outcome_of(step, batch))
            optimizer.step()
    # Accelerate steps at the second microbatch, and at the third, which is the last of the epoch.
    assert outcomes[1:] == ["updated", "updated"]
    assert re.search(r"every call of a compiled step is an update(.|\n)*accumulate=n", outcomes[0])
    assert not torch.equal(step.parameters()["weight"], before)
    assert accelerator.sync_gradients


def rows_of(rows: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def outcome_of(step: mw.TrainStep, batch: dict[str, Tensor]) -> str:
    try:
        step(batch)
    except StepError as error:
        return str(error)
    return "updated"


def test_a_wrapped_optimizer_is_refused() -> None:
    accelerator = accelerate.Accelerator(cpu=True)
    model = nn.Linear(6, 4)
    optimizer = accelerator.prepare(torch.optim.SGD(model.parameters(), lr=0.1))
    example = {"input": torch.randn(4, 6), "y": torch.randn(4, 4)}
    with pytest.raises(PlanError, match=r"AcceleratedOptimizer(.|\n)*optimizer=optimizer\.optimizer"):
        mw.compile(model, loss=loss_of, example=example, optimizer=optimizer, mesh="")
