"""Checkpoints of FSDP2 continue in a compiled step and back, by PyTorch's own tools."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.processes import Job
from tests.runtime.test_bindings import DATA, Script, adamw
from tests.training import assert_tensors, mse
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.multiprocess


class Net(nn.Module):
    """Uneven sizes, a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.middle, self.again = nn.Linear(8, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.again.weight = self.middle.weight
        self.down = nn.Linear(5, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.again(torch.tanh(self.middle(self.up(x)))))


def compiled(mesh: str) -> Script:
    model = Net()
    optimizer = adamw(model)
    return Script(
        model,
        optimizer,
        mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh=mesh, profile="alpha-beta"),
    )


class FullySharded(Script):
    """A script of FSDP2: each rank hands in its rows."""

    def train(self, batch: dict[str, Tensor]) -> float:
        rank, size = dist.get_rank(), dist.get_world_size()
        value = torch.tensor(super().train({k: v.chunk(size)[rank] for k, v in batch.items()}))
        dist.all_reduce(value)
        return value.item() / size


def fully_sharded() -> Script:
    model = fully_shard(Net(), mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return FullySharded(model, adamw(model))


def save(script: Script, path: str) -> None:
    model, optimizer = get_state_dict(script.model, script.optimizer)
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=path)


def load(script: Script, path: str) -> None:
    model, optimizer = get_state_dict(script.model, script.optimizer)
    saved = {"model": model, "optimizer": optimizer}
    dcp.load(saved, checkpoint_id=path)
    set_state_dict(
        script.model,
        script.optimizer,
        model_state_dict=saved["model"],
        optim_state_dict=saved["optimizer"],
        options=StateDictOptions(strict=True),
    )


def full(script: Script) -> dict[str, Tensor]:
    """Parameters and the optimizer's tensors."""
    values: dict[str, Any] = dict(script.model.named_parameters())
    values |= {f"{slot}/{n}": v for n, p in values.items() for slot, v in script.optimizer.state[p].items()}
    return {n: (v.full_tensor() if isinstance(v, DTensor) else v).detach().clone() for n, v in values.items()}


def go_on(one: Script, other: Script) -> None:
    for batch in DATA[3:]:
        assert one.train(batch) == pytest.approx(other.train(batch), rel=1e-6)
    assert_tensors(full(one), full(other), 1e-5)


def job_fsdp2(pipe: Connection, folder: str) -> dict[str, Any]:
    ours, theirs = compiled("fsdp=2"), fully_sharded()
    for batch in DATA[:3]:
        assert ours.train(batch) == pytest.approx(theirs.train(batch), rel=1e-6)
    save(ours, f"{folder}/ours")
    save(theirs, f"{folder}/theirs")
    other, fresh = fully_sharded(), compiled("fsdp=2")
    load(other, f"{folder}/ours")
    load(fresh, f"{folder}/theirs")
    assert full(fresh).keys() == full(theirs).keys()
    go_on(fresh, other)
    go_on(ours, theirs)
    state = ours.optimizer.state[ours.model.up.weight]["exp_avg"]
    piece = ours.step.session.state.pieces["state", "exp_avg/up.weight"][0]
    shared = isinstance(state, DTensor) and state.to_local().data_ptr() == piece.data_ptr()
    shutdown(ours.step.session.world)
    return {"shared": shared}


def test_a_checkpoint_of_fsdp2_goes_on_here_and_back(start: Callable[..., Job], tmp_path: Path) -> None:
    for outcome in start("tests.runtime.test_optimizer_state_cluster:job_fsdp2", 2, str(tmp_path)).finish(240):
        assert "error" not in outcome, outcome["text"]
        assert outcome == {"shared": True}
