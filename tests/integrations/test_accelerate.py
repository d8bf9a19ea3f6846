"""An own loop with Accelerate on a compiled step: loader, schedule, checkpoints and tracking stay Accelerate's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

accelerate = pytest.importorskip("accelerate", reason="needs accelerate: pip install -e '.[integrations]'")

import meshweave as mw

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
