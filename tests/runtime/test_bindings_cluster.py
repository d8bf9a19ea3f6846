"""The module's tensors are the step's state on a cluster: DTensors where parameters are sharded, plain where not."""

from __future__ import annotations

import copy
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.processes import Job
from tests.runtime.test_bindings import DATA, Script, Tied, adamw
from tests.training import assert_tensors, mse
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

import meshweave as mw
from meshweave.runtime.cluster import shutdown

pytestmark = pytest.mark.multiprocess


def full(x: Tensor) -> Tensor:
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def full_dict(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(value).clone() for name, value in model.state_dict().items()}


@torch.no_grad()
def average(script: Script) -> list[Tensor]:
    mean = script.extra.setdefault("mean", [p.clone() for p in script.model.parameters()])
    for m, p in zip(mean, script.model.parameters(), strict=True):
        m.lerp_(p, 0.3)
    return mean


def between(script: Script, i: int) -> None:
    """What a script does after step i, as it is written for FSDP2 and for one device."""
    mean = average(script)
    by_torch = script.extra.setdefault("torch", AveragedModel(script.model))
    by_torch.update_parameters(script.model)
    script.seen = [full(m).clone() for m in (*mean, *by_torch.module.parameters())]
    if i == 0:
        script.extra["kept"] = full_dict(script.model)
        script.extra["own"] = copy.deepcopy(script.model.state_dict())
    if i == 1:
        with torch.no_grad():
            script.model.middle.weight.mul_(0.5)
    if i == 2:
        script.model.load_state_dict(script.extra["kept"])
    if i == 3:
        for m, p in zip(mean, script.model.parameters(), strict=True):
            p.data.copy_(m)
    if i == 4:
        script.model.load_state_dict(script.extra["own"])


def job_script(pipe: Connection, mesh: str) -> dict[str, Any]:
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer = adamw(model)
    step = mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh=mesh, profile="alpha-beta")
    identities = [id(p) for p in model.parameters()]
    ours, eager = Script(model, optimizer, step), Script(twin, adamw(twin))
    for i, batch in enumerate(DATA):
        assert ours.train(batch) == pytest.approx(eager.train(batch), rel=1e-5)
        for script in (ours, eager):
            between(script, i)
        torch.testing.assert_close(ours.seen, eager.seen, rtol=1e-4, atol=1e-5)
        assert_tensors(full_dict(model), full_dict(twin), 1e-4)
    assert [id(p) for group in optimizer.param_groups for p in group["params"]] == identities
    assert [id(p) for p in model.parameters()] == identities
    assert model.again.weight is model.middle.weight
    with torch.no_grad():
        expected = float(mse(twin.eval()(DATA[0]["x"]), DATA[0]))
    assert float(step.evaluate(DATA[0])) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        assert float(mse(model.eval()(DATA[0]["x"]), DATA[0])) == pytest.approx(expected, rel=1e-5)
        with pytest.raises(RuntimeError):
            model(torch.ones(3, 99))
    assert [id(p) for p in model.parameters()] == identities  # the shards, also after an error
    for each in (model, twin):
        each.train()
    options = StateDictOptions(full_state_dict=True)
    saved = get_model_state_dict(model, options=options)
    assert_tensors({k: v.clone() for k, v in saved.items()}, dict(twin.state_dict()), 1e-4)
    halves = {k: v * 0.5 for k, v in saved.items()}
    if "tp" in mesh:  # torch 2.13 cuts no uneven dim over two axes (_StridedShard._shard_tensor)
        model.load_state_dict(halves)
    else:
        set_model_state_dict(model, halves, options=options)
    twin.load_state_dict({k: v * 0.5 for k, v in twin.state_dict().items()})
    assert ours.train(DATA[0]) == pytest.approx(eager.train(DATA[0]), rel=1e-5)
    pieces = step.session.state.pieces
    shared = {
        name
        for name, p in model.named_parameters()
        if (p.to_local() if isinstance(p, DTensor) else p).data_ptr() == pieces["param", name][0].data_ptr()
    }
    shutdown(step.session.world)
    names = {name for name, _ in model.named_parameters()}
    return {
        "whole": {name for name, p in model.named_parameters() if type(p) is nn.Parameter},
        "copies": names - shared,
        "names": names,
    }


# The 5 elements of up.bias over tp and then fsdp are in pieces that no DTensor has.
@pytest.mark.slow_rows("dp=2-2", "fsdp=2,tp=2-4")
@pytest.mark.parametrize(("mesh", "num_ranks"), [("dp=2", 2), ("fsdp=2", 2), ("fsdp=2,tp=2", 4)])
def test_scripts_for_fsdp2_see_and_change_the_weights(start: Callable[..., Job], mesh: str, num_ranks: int) -> None:
    outcomes = start("tests.runtime.test_bindings_cluster:job_script", num_ranks, mesh).finish(240)
    for outcome in outcomes:
        assert "error" not in outcome, outcome["text"]
        copies = {"up.bias"} if "tp" in mesh else set()
        assert outcome["copies"] == copies
        assert outcome["whole"] == (copies if "fsdp" in mesh else outcome["names"])


class Scaled(nn.Module):
    """Layers with a scale each: parameters without dims."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = torch.tanh(layer(x) * scale)
        return x


def job_scalars(pipe: Connection, mesh: str) -> dict[str, Any]:
    """Losses, as eager ones: with an evaluation and other sizes, and after the step was compiled again."""
    torch.manual_seed(0)
    model, data = Scaled(), {"x": torch.randn(8, 4), "y": torch.randn(8, 4)}
    smaller = {key: value[:4] for key, value in data.items()}
    twin = copy.deepcopy(model)
    eager, optimizer = adamw(twin), adamw(model)
    step = mw.compile(model, loss=mse, example=data, optimizer=optimizer, mesh=mesh, profile="alpha-beta")
    losses = []
    for batch in (data, smaller, data, smaller):
        loss = mse(twin(batch["x"]), batch)
        expected = pytest.approx(loss.item(), rel=1e-5)
        assert float(step.evaluate(batch)) == expected
        losses.append(float(step(batch)))
        assert losses[-1] == expected
        eager.zero_grad()
        loss.backward()
        eager.step()
        for either in (model, twin):  # of both stages; the step is compiled again
            either.layers[len(losses) % 2].bias.requires_grad_(len(losses) > 2)
    shutdown(step.session.world)
    return {"losses": losses}


@pytest.mark.slow_rows("pp=2")
@pytest.mark.parametrize("mesh", ["pp=2", "fsdp=2"])
def test_parameters_without_dims_that_other_ranks_have(start: Callable[..., Job], mesh: str) -> None:
    first, second = start("tests.runtime.test_bindings_cluster:job_scalars", 2, mesh).finish(240)
    assert "error" not in first, first["text"]
    assert first == second
    assert len(first["losses"]) == 4


def job_turns(pipe: Connection) -> dict[str, Any]:
    """Two steps of a model whose optimizers were both created before the first compile, as a GAN has them."""
    torch.manual_seed(0)
    model, data = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)), {"x": torch.randn(8, 4)}
    data["y"] = torch.randn(8, 4)
    twin = copy.deepcopy(model)
    eager, optimizers = ([adamw(m[0]), adamw(m[2])] for m in (twin, model))
    steps = [
        mw.compile(
            model, loss=mse, example=data, optimizer=optimizer, mesh="fsdp=2", profile="alpha-beta",
            forward=lambda m, batch: m(batch["x"]),
        )
        for optimizer in optimizers
    ]  # fmt: skip
    losses = []
    for turn in (0, 1, 0, 0, 1):
        twin.zero_grad()
        loss = mse(twin(data["x"]), data)
        loss.backward()
        eager[turn].step()
        losses.append(float(steps[turn](data)))
        assert losses[-1] == pytest.approx(loss.item(), rel=1e-5)
    assert_tensors(full_dict(model), dict(twin.state_dict()))
    shutdown(steps[0].session.world)
    return {"losses": losses}


def test_steps_with_optimizers_from_before_the_first_compile(start: Callable[..., Job]) -> None:
    first, second = start("tests.runtime.test_bindings_cluster:job_turns", 2).finish(240)
    assert "error" not in first, first["text"]
    assert first == second
