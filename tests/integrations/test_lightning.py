"""Lightning modules on compiled steps: train as plain ones do; checkpoints of either continue in the other."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.processes import Job
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

lightning = pytest.importorskip("lightning", reason="needs lightning: pip install -e '.[integrations]'")

import meshweave as mw
from meshweave.integrations.lightning import MeshweaveStrategy
from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.filterwarnings("ignore")  # of Lightning: few workers, deprecated names of torch
STEPS = 6


def loss_of(out: Tensor, batch: Any) -> Tensor:
    return nn.functional.mse_loss(out, batch[1])


class Plain(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.losses: list[float] = []
        self.validated: list[float] = []

    def configure_optimizers(self) -> dict[str, Any]:
        optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)}

    def training_step(self, batch: Any, index: int) -> Any:
        loss = loss_of(self.net(batch[0]), batch)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", loss_of(self.net(batch[0]), batch), sync_dist=True)

    def on_validation_end(self) -> None:
        self.validated.append(self.trainer.callback_metrics["val"].item())


class Compiled(Plain):
    """The recipe of docs/trainers.md."""

    def __init__(self, mesh: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.mesh = mesh

    def on_fit_start(self) -> None:
        self.step: mw.TrainStep | None = None

    def training_step(self, batch: Any, index: int) -> None:
        if self.step is None:
            self.step = mw.compile(
                self.net, loss=loss_of, example=batch, optimizer=self.optimizers().optimizer, mesh=self.mesh,
                batch="local", profile="alpha-beta",
            )  # fmt: skip
        self.losses.append(float(self.step(batch)))
        self.optimizers().step()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def validation_step(self, batch: Any, index: int) -> None:
        self.log("val", self.step.evaluate(batch))


def fitted(module: Plain, folder: Path, epochs: int, batch_size: int = 8, **options: Any) -> Plain:
    """`module` after training on 16 rows an epoch, with a checkpoint `last.ckpt` in the folder."""
    generator = torch.Generator().manual_seed(1)
    data = [(torch.randn(6, generator=generator), torch.randn(4, generator=generator)) for _ in range(16)]
    keep = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_last=True)
    usual = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    resumed = {"ckpt_path": options.pop("ckpt_path", None), "weights_only": False}
    trainer = lightning.Trainer(max_epochs=epochs, callbacks=[keep], **(usual | options))
    sampler = None
    if "strategy" in options:  # Lightning's own shuffles
        sampler = DistributedSampler(data, *mw.batch_shard("fsdp=2"), shuffle=False)
    trainer.fit(module, DataLoader(data, batch_size=batch_size, sampler=sampler), **resumed)
    # Lightning counts steps of automatic and of manual optimization apart.
    done = epochs if resumed["ckpt_path"] is None else 1
    assert trainer.global_step == done * 16 // (batch_size * trainer.world_size)
    return module


def plain(folder: Path) -> Plain:
    return fitted(Plain(), folder, 3)


def assert_same(ours: Plain, other: Plain, last: int = STEPS) -> None:
    assert len(other.losses) == STEPS
    assert ours.losses[-last:] == pytest.approx(other.losses[-last:], abs=1e-5)


def test_trains_as_the_plain_module(tmp_path: Path) -> None:
    ours, other = fitted(Compiled("fsdp=2"), tmp_path / "ours", 3), plain(tmp_path / "plain")
    assert_same(ours, other)
    for name, value in other.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_checkpoint_of_either_continues_in_the_other(ours_first: bool, tmp_path: Path) -> None:
    modules = [Compiled("fsdp=2"), Plain()] if ours_first else [Plain(), Compiled("fsdp=2")]
    fitted(modules[0], tmp_path, 2)
    resumed = fitted(modules[1], tmp_path / "resumed", 3, ckpt_path=tmp_path / "last.ckpt")
    assert len(resumed.losses) == 2
    assert_same(resumed, plain(tmp_path / "plain"), last=2)


def job_fit(pipe: Connection, folder: str) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # of Lightning
    module = Compiled("fsdp=2")
    options = {"strategy": MeshweaveStrategy(), "devices": 2, "use_distributed_sampler": False}
    fitted(module, Path(folder), 2, batch_size=4, **options)
    shutdown(module.step.session.world)
    return {"losses": module.losses}


@pytest.mark.multiprocess
def test_processes_train_as_one_and_their_checkpoint_continues_in_one(
    tmp_path: Path, start: Callable[..., Job]
) -> None:
    """Rows of a rank are every second one, which a mean over all does not see; a checkpoint has whole tensors."""
    other = plain(tmp_path / "plain")
    for outcome in start("tests.integrations.test_lightning:job_fit", 2, str(tmp_path / "job")).finish(200):
        assert "error" not in outcome, outcome["text"]
        assert outcome["losses"] == pytest.approx(other.losses[:4], abs=1e-5)
    assert_same(fitted(Plain(), tmp_path / "resumed", 3, ckpt_path=tmp_path / "job/last.ckpt"), other, last=2)


def fitted_twice(module: Plain, loader: DataLoader[Any], strategy: Callable[[], Any], **options: Any) -> Plain:
    """`module` after two calls of `fit`, each with a validation, by a trainer of its own each."""
    options |= {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    for call in ("fit", "validate") * 2:
        trainer = lightning.Trainer(strategy=strategy(), enable_checkpointing=False, max_epochs=1, **options)
        getattr(trainer, call)(module, loader)
    return module


def rows_of(rank: int, num_ranks: int) -> DataLoader[Any]:
    rows = [(torch.full((6,), i / 8), torch.ones(4)) for i in range(8)]
    return DataLoader(rows, 4 // num_ranks, sampler=DistributedSampler(rows, num_ranks, rank, shuffle=False))


def job_fit_twice(pipe: Connection) -> dict[str, Any]:
    warnings.simplefilter("ignore")  # of Lightning
    loader, options = rows_of(*mw.batch_shard("fsdp=2")[::-1]), {"devices": 2, "use_distributed_sampler": False}
    with pytest.raises(mw.StepError, match="does not sum gradients") as refused:
        fitted_twice(Plain(), loader, MeshweaveStrategy, **options)
    module = fitted_twice(Compiled("fsdp=2"), loader, MeshweaveStrategy, **options)
    shutdown(module.step.session.world)
    return {"losses": module.losses, "validated": module.validated, "hint": refused.value.hint}


class CompiledOnce(Compiled):
    """A step that outlives the optimizer of its `fit`."""

    step = None

    def on_fit_start(self) -> None:
        pass


def test_a_step_of_an_earlier_fit_is_refused() -> None:
    module = CompiledOnce("fsdp=2")
    with pytest.raises(mw.StepError, match="this optimizer trains nothing"):
        fitted_twice(module, rows_of(0, 1), MeshweaveStrategy)
    assert len(module.losses) == 3  # two of the first fit, one of the second


@pytest.mark.multiprocess
@patch.dict(os.environ)  # Lightning writes WORLD_SIZE and others
def test_processes_validate_and_fit_again_as_one_but_not_by_backward_passes_of_lightning(
    start: Callable[..., Job],
) -> None:
    """A second `fit` has an optimizer of its own: the recipe compiles again."""
    other = fitted_twice(Plain(), rows_of(0, 1), lambda: "auto")
    ours = fitted_twice(Compiled("fsdp=2"), rows_of(0, 1), MeshweaveStrategy)
    assert ours.losses == pytest.approx(other.losses, abs=1e-5)
    outcomes = start("tests.integrations.test_lightning:job_fit_twice", 2).finish(200)
    assert not [outcome for outcome in outcomes if "error" in outcome], outcomes
    for outcome in outcomes:
        assert outcome["losses"] == pytest.approx(other.losses, abs=1e-5)
        assert outcome["validated"] == pytest.approx(other.validated, abs=1e-5)
        assert "mw.compile" in outcome["hint"]
