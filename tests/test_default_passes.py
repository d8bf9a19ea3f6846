"""What a step goes through when nobody says: what is simulated faster, on virtual devices nothing."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from tests.processes import Job
from torch import Tensor, nn

import meshweave as mw
from meshweave.cost.hardware.schema import Links
from meshweave.cost.simulate.step import least_bytes_of_step, peak_bytes_of_step, simulate_roles
from meshweave.passes import pass_list_of
from meshweave.passes.optimize import optimize
from meshweave.runtime.cluster import shutdown
from meshweave.search import Budget
from meshweave.whatif import simulate

PROFILE = "cpu-gloo"


def compiled(mesh: str, dtype: torch.dtype = torch.float32, **options: Any) -> mw.TrainStep:
    torch.manual_seed(0)
    layers = [nn.Linear(96, 96, dtype=dtype) for _ in range(4)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return mw.compile(model, loss=loss, example=batch(dtype), optimizer=optimizer, mesh=mesh, **options)


def loss(out: Tensor, batch: Any) -> Tensor:
    return ((out - batch[1]) ** 2).mean()


def batch(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(1)
    return torch.randn(32, 96, generator=made).to(dtype), torch.randn(32, 96, generator=made).to(dtype)


def job_default(pipe: Connection, mesh: str) -> dict[str, Any]:
    """Steps as they come, and plain; the same to rounding, and simulated no slower."""
    fast, plain = compiled(mesh, profile=PROFILE), compiled(mesh, profile=PROFILE, passes="none")
    exact = compiled(mesh, profile=PROFILE, passes="exact")
    losses = {name: [float(step(batch())) for _ in range(3)] for name, step in (("fast", fast), ("plain", plain))}
    losses["exact"] = [float(exact(batch())) for _ in range(3)]
    lacking = replace(mw.load_profile(PROFILE), version="0", peak=(("float32", 1e11),))
    unpriced = compiled(mesh, torch.float64, profile=lacking)
    shutdown(fast.session.world)
    return {
        "losses": losses,
        "ran": [len(step.program.overlap) for step in (fast, plain, exact)],
        "variants": len(fast.program.optimized.variants),
        "seconds": [simulate(step.program, PROFILE).seconds for step in (fast, plain)],
        "unpriced": (unpriced.program.optimized.name, len(unpriced.program.overlap)),
    }


@pytest.mark.slow_rows("tp=2", "dp=2")
@pytest.mark.multiprocess
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_several_processes_take_what_is_simulated_faster(start: Callable[..., Job], mesh: str) -> None:
    first, second = start("tests.test_default_passes:job_default", 2, mesh).finish(240)
    assert "error" not in first, first
    assert first == second
    losses = first["losses"]
    assert losses["exact"] == losses["plain"]
    assert losses["fast"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["fast"][2] < losses["fast"][0]
    assert first["ran"] == [1, 0, 1]
    fast, plain = first["seconds"]
    assert fast <= plain
    assert re.match("as it is: .*float64", first["unpriced"][0])
    assert first["unpriced"][1] == 0


def test_what_there_is_no_time_for_is_said_and_left() -> None:
    """The first way to write the step goes through all passes, whatever the time."""
    step = compiled("tp=2", profile="h100", passes="none")
    profile, asked = mw.load_profile("h100"), []
    for seconds in (60.0, -1.0):
        budget = Budget(seconds, lambda is_late: asked.append(is_late) or (is_late,))
        pass_list = replace(pass_list_of("default"), budget=budget)
        found = optimize(step.program.placed, step.program.expanded, profile, pass_list)
        reasons = {variant.name: variant.reason for variant in found.variants}
        tried = [name for name, reason in reasons.items() if not reason]
        if seconds > 0:
            assert len(tried) == len(reasons) > 1
            assert asked
            assert not any(asked)
        else:
            assert tried == ["as it is"]
            assert set(reasons.values()) == {"", "not tried: the -1 s were used up"}
        assert len(found.overlap) == 1


def test_what_rounds_otherwise_has_to_gain_enough() -> None:
    step, profile = compiled("tp=2", profile="h100", passes="none"), mw.load_profile("h100")
    pass_list = pass_list_of("default")
    for least_gain in (1e-6, -1e3):
        found = optimize(step.program.placed, step.program.expanded, profile, replace(pass_list, least_gain=least_gain))
        (whole, *anew) = (variant.seconds for variant in found.variants)
        assert all(anew)
        assert (found.name == "as it is") == (whole <= min(anew) / (1 - least_gain))
    assert found.name != "as it is"  # a gain of less than nothing is enough


def test_what_cannot_gain_enough_is_not_tried() -> None:
    step, profile = compiled("tp=2", profile="h100", passes="none"), mw.load_profile("h100")
    pass_list = replace(pass_list_of("default"), least_gain=0.99)
    found = optimize(step.program.placed, step.program.expanded, profile, pass_list)
    assert found.name == "as it is"
    assert [variant.name for variant in found.variants] == ["as it is", "rows in 2 chunks", "collectives taken apart"]
    assert all("cannot gain 99%: compute alone takes" in variant.reason for variant in found.variants[1:])
    assert len(found.overlap) == 1


def test_rows_are_not_split_where_communication_alone_takes_too_long() -> None:
    step, h100 = compiled("tp=2", profile="h100", passes="none"), mw.load_profile("h100")
    profile = replace(h100, links=Links(replace(h100.links.node, bandwidth=1e6)), collectives=())
    pass_list = replace(pass_list_of("default"), least_gain=0.08)
    found = optimize(step.program.placed, step.program.expanded, profile, pass_list)
    reasons = {variant.name: variant.reason for variant in found.variants}
    assert reasons["rows in 2 chunks"].startswith("cannot gain 8%: communication alone takes")


def test_what_cannot_fit_is_not_searched() -> None:
    step, h100 = compiled("dp=2", profile="h100", passes="none"), mw.load_profile("h100")
    roles = step.program.expanded
    least = least_bytes_of_step(roles, h100)
    # 4 layers; of 16 rows the input, 4 outputs, the difference from the target; two factors of the mean
    assert least == 4 * (4 * (96 * 96 + 96) + 6 * 16 * 96 + 2)
    full = optimize(step.program.placed, roles, h100, pass_list_of("default"))
    for variant in (roles, full.roles):
        assert least <= simulate_roles(variant, h100).peak_bytes
    for room, is_searched in ((least, True), (least - 1, False)):
        profile = replace(h100, memory=replace(h100.memory, bytes=room, reserved_bytes=0, reserved_fraction=0.0))
        found = optimize(step.program.placed, roles, profile, pass_list_of("default"))
        assert bool(found.variants) == is_searched
        assert ("none can make the step fit" in found.note) == (not is_searched)
    assert found.roles is roles
    assert replace(step.program, optimized=found).notes[-1] == found.note
    capped = optimize(step.program.placed, roles, profile, replace(pass_list_of("default"), memory_cap_bytes=1 << 30))
    assert capped.variants  # the cap of the caller counts, not the machine's memory


def test_a_step_that_fits_still_fits_with_the_passes() -> None:
    """Rooms around the peak of the plain step: exactly there this step's best order needs 1.4% more."""
    model, example, loss = hugging_face("llama", layers=4, batch=32)
    optimizer, h100 = torch.optim.AdamW(model.parameters()), mw.load_profile("h100")
    step = mw.compile(
        model, loss=loss, example=example, mesh="fsdp=2", optimizer=optimizer, profile=h100, passes="none"
    )
    peak = peak_bytes_of_step(step.program.expanded, h100)
    assert peak == simulate_roles(step.program.expanded, h100).peak_bytes
    for room, is_left in ((peak, True), (int(1.05 * peak), False)):
        profile = replace(h100, memory=replace(h100.memory, bytes=room, reserved_bytes=0, reserved_fraction=0.0))
        taken = optimize(step.program.placed, step.program.expanded, profile, pass_list_of("default"))
        assert peak_bytes_of_step(taken.roles, h100) <= room
        assert ("because only so the step fits" in taken.note) == is_left


def test_virtual_devices_take_the_plain_step() -> None:
    assert compiled("dp=2", profile=PROFILE).program.overlap == ()
    assert compiled("dp=2").program.overlap == ()
