"""`optimizer.state` is the step's: state dicts go from eager PyTorch to a compiled step and back, at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.test_bindings import DATA, Script, Tied
from tests.training import assert_tensors, batches, compile_once, mse
from torch import Tensor, nn

import meshweave as mw
from meshweave.runtime.optimizer_state import replace_in_optimizer

MAKE: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=0.02, weight_decay=0.1, amsgrad=True),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}
CASES = [(make, mesh) for make in MAKE for mesh in ("", "fsdp=2,tp=2")]


def pair(make: str, mesh: str) -> tuple[Script, Script]:
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer = MAKE[make](model.parameters())
    step = compile_once((__name__, make, mesh), model, loss=mse, example=DATA[0], optimizer=optimizer, mesh=mesh)
    return Script(model, optimizer, step), Script(twin, MAKE[make](twin.parameters()))


def flat(saved: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of an optimizer's state dict, by parameter and slot."""
    return {f"{i}.{slot}": torch.as_tensor(v) for i, kept in saved["state"].items() for slot, v in kept.items()}


def states(script: Script) -> dict[str, Any]:
    return copy.deepcopy({"model": script.model.state_dict(), "optimizer": script.optimizer.state_dict()})


def load(script: Script, saved: dict[str, Any]) -> None:
    script.model.load_state_dict(saved["model"])
    script.optimizer.load_state_dict(saved["optimizer"])


def go_on(ours: Script, eager: Script) -> None:
    """Two steps of each, which agree in losses, weights and state."""
    for batch in DATA[3:5]:
        assert ours.train(batch) == pytest.approx(eager.train(batch), rel=1e-5)
    assert_tensors(dict(ours.model.state_dict()), dict(eager.model.state_dict()), 1e-4)
    assert_tensors(flat(ours.optimizer.state_dict()), flat(eager.optimizer.state_dict()), 1e-4)


@pytest.mark.parametrize(("make", "mesh"), CASES)
def test_a_state_dict_is_pytorchs_own(make: str, mesh: str) -> None:
    ours, eager = pair(make, mesh)
    assert ours.optimizer.state_dict() == eager.optimizer.state_dict()
    for batch in DATA[:3]:
        ours.train(batch)
        eager.train(batch)
    found, expected = ours.optimizer.state_dict(), eager.optimizer.state_dict()
    assert found["param_groups"] == expected["param_groups"]
    assert {i: list(kept) for i, kept in found["state"].items()} == {
        i: list(kept) for i, kept in expected["state"].items()
    }
    assert_tensors(flat(found), flat(expected), 1e-4)


@pytest.mark.slow_rows("adamw-", "sgd-fsdp=2,tp=2", "sgd-")
@pytest.mark.parametrize(("make", "mesh"), CASES)
def test_a_checkpoint_of_either_is_resumed_by_the_other(make: str, mesh: str, tmp_path: Path) -> None:
    ours, eager = pair(make, mesh)
    for batch in DATA[:3]:
        ours.train(batch)
        eager.train(batch)
    torch.save(states(ours), tmp_path / "ours.pt")
    torch.save(states(eager), tmp_path / "eager.pt")
    fresh, other = pair(make, mesh)
    load(other, torch.load(tmp_path / "ours.pt"))  # ours to eager PyTorch
    load(fresh, torch.load(tmp_path / "eager.pt"))  # and back, after compile
    go_on(fresh, other)
    model = Tied()
    before = Script(model, MAKE[make](model.parameters()))
    load(before, torch.load(tmp_path / "eager.pt"))  # before compile
    before.step = mw.compile(model, loss=mse, example=DATA[0], optimizer=before.optimizer, mesh=mesh)
    go_on(before, eager)


def test_an_optimizer_that_another_wraps_gets_the_new_parameters() -> None:
    old, new = nn.Parameter(torch.ones(2)), nn.Parameter(torch.zeros(2))
    outer: Any = torch.optim.SGD([old], lr=0.1)
    outer.inner = torch.optim.Adam([old])
    replace_in_optimizer(outer, {old: new})
    assert outer.param_groups[0]["params"][0] is outer.inner.param_groups[0]["params"][0] is new


def test_written_state_that_counts_no_steps_keeps_the_number_of_steps() -> None:
    ours, _ = pair("sgd", "")
    for i, batch in enumerate(DATA[:4]):
        if i == 3:
            ours.optimizer.state[ours.model.up.weight]["momentum_buffer"].zero_()
        ours.train(batch)
    assert ours.step.num_steps == 4


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tp=2"])
def test_state_that_is_loaded_or_cleared_between_steps_counts(mesh: str) -> None:
    ours, eager = pair("adamw", mesh)
    losses: dict[str, list[float]] = {"ours": [], "eager": []}
    for name, script in (("ours", ours), ("eager", eager)):
        for i, batch in enumerate(DATA):
            losses[name].append(script.train(batch))
            if i == 0:
                kept = states(script)
            if i == 2:
                load(script, kept)
            if i == 3:
                script.optimizer.state.clear()
            if i == 4:
                script.optimizer.state[script.model.up.weight]["exp_avg"].mul_(0.5)
                script.optimizer.state[script.model.down.weight]["exp_avg"].data.mul_(0.5)  # without a new version
    torch.testing.assert_close(losses["ours"], losses["eager"], rtol=1e-5, atol=1e-6)
    assert_tensors(flat(ours.optimizer.state_dict()), flat(eager.optimizer.state_dict()), 1e-4)


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_eager_steps_and_compiled_steps_alternate(mesh: str) -> None:
    ours, eager = pair("adamw", mesh)
    plain = Script(ours.model, ours.optimizer)
    for i, batch in enumerate(DATA):
        assert (plain if i % 2 else ours).train(batch) == pytest.approx(eager.train(batch), rel=1e-5)
    assert_tensors(flat(ours.optimizer.state_dict()), flat(eager.optimizer.state_dict()), 1e-4)


def test_one_device_holds_the_state_once() -> None:
    ours, _ = pair("adamw", "")
    ours.train(DATA[0])
    param = ours.model.up.weight
    piece = ours.step.session.state.pieces["state", "exp_avg/up.weight"][0]
    assert ours.optimizer.state[param]["exp_avg"].data_ptr() == piece.data_ptr()


@pytest.mark.slow_rows("")
@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_two_steps_of_one_optimizer_share_its_state(mesh: str) -> None:
    ours, eager = pair("adamw", mesh)
    short = {k: v[:2] for k, v in DATA[1].items()}
    other = mw.compile(ours.model, loss=mse, example=short, optimizer=ours.optimizer, mesh=mesh)
    for batch in (DATA[0], short, DATA[2], short, short, DATA[3]):
        step = ours.step if len(batch["x"]) == 4 else other
        assert step(batch) == pytest.approx(eager.train(batch), rel=1e-5)
    assert_tensors(flat(ours.optimizer.state_dict()), flat(eager.optimizer.state_dict()), 1e-4)


def test_a_run_goes_on_with_its_schedule(tmp_path: Path) -> None:
    """As one that loads optimizer.state_dict(): schedules of PyTorch compute the next rate from the present one."""
    data = batches(8, (4, 4), (4, 2))

    def rates(first: int, last: int, saved: dict[str, Any]) -> list[tuple[float, tuple[float, float], float]]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)
        example = {"input": data[0]["x"], **data[0]}
        step = mw.compile(model, loss=mse, example=example, optimizer=optimizer, mesh="fsdp=2", profile="alpha-beta")
        if first:
            step.load(str(tmp_path / "at"))
            schedule.load_state_dict(saved)
        found = []
        for batch in data[first:last]:
            group = optimizer.param_groups[0]
            found.append((group["lr"], group["betas"], step({"input": batch["x"], **batch}).item()))
            schedule.step()
        saved.update(schedule.state_dict())
        step.save(str(tmp_path / "at"))
        return found

    saved: dict[str, Any] = {}
    assert rates(0, 4, saved) + rates(4, 8, saved) == rates(0, 8, {})


def test_state_between_the_elements_of_other_state_is_its_own() -> None:
    ours, eager = pair("adamw", "")
    for script in (ours, eager):
        script.train(DATA[0])
        kept = script.optimizer.state[script.model.down.weight]
        table = torch.stack([kept["exp_avg"], kept["exp_avg_sq"]], -1)
        kept["exp_avg"], kept["exp_avg_sq"] = table.unbind(-1)
    go_on(ours, eager)
