"""Every communication of a compiled program matters to the check: broken programs are caught, without exception.

What a mutant does is seen by running it on every device by itself. One that gives other results, fails or hangs must be
caught; one that is not caught must give the same results on every device.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from tests import models
from tests.check.devices import Hang, Outputs, inputs_of, run_devices
from tests.check.mutants import BREAKS, STEP_BREAKS, Mutant, Roles, mutants
from tests.steps import DTYPES, MESHES, SHAPES, Chain, following
from tests.steps import program as stepwise
from torch import nn

from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.cost.hardware import AlphaBeta
from meshweave.errors import LayoutError, VerifyError
from meshweave.ir.collectives import STARTS
from meshweave.ir.graph import StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, members_of
from meshweave.place.plans import Plan
from meshweave.program import Program

# Values are float64, but for the norm of the gradients and what a Llama computes in float32, whose rounding is 6e-8;
# a contribution that is missing, doubled or misplaced changes a tensor by a good part of itself.
TOLERANCE = 1e-5


def program(kind: str, mesh: str, sequence: bool = False) -> Program:
    sizes: dict[str, Any] = {"batch": 5, "seq": 4, "heads": 3} if kind == "llama" else {}
    model, batch, loss = models.mlp() if kind == "mlp" else models.hugging_face(kind, **sizes)
    if kind == "mlp":
        batch = (batch[0].double(), batch[1])
    plan = Plan.hf_tp("tp") + Plan.sequence_parallel("tp") if sequence else None
    if plan is not None and "dp" in mesh:
        plan = plan + Plan.dp("dp")
    return _compiled(model.double(), batch, loss, mesh, plan)


def _compiled(model: nn.Module, batch: Any, loss: Any, mesh: str, plan: Plan | None) -> Program:
    spec = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    return build_program(
        StepSource(model, loss), batch, spec, Target(Mesh(mesh), plan, AlphaBeta()), CaptureOptions(clip_grad_norm=1.0)
    )


@dataclass(frozen=True, slots=True, eq=False)
class Case:
    """A program with inputs, and what every device makes of them."""

    placed: StepGraph
    roles: Roles
    full: dict[tuple[str, str], torch.Tensor]
    right: Outputs


@cache
def case(kind: str, mesh: str, sequence: bool = False) -> Case:
    made = program(kind, mesh, sequence)
    full = inputs_of(made.roles)
    return Case(made.placed, made.roles, full, ran(made.roles, full))


def is_caught(placed: StepGraph, roles: Sequence[RankGraph]) -> bool:
    """Whether one of the two checks refuses the program."""
    for check in (lambda: check_complete(placed, roles), lambda: check_deadlock(roles)):
        try:
            check()
        except VerifyError:
            return True
    return False


def ran(roles: Roles, full: dict[tuple[str, str], torch.Tensor]) -> Outputs:
    """What every device has at the end; of an output that is a part of a sum, the sum, however it is parted."""
    found = run_devices(roles, full)
    sums = {
        (device, key): torch.stack([found[d, key] for d in members_of(layout.mesh, layout.partial_axes, device)]).sum(0)
        for rank in roles
        for key, layout in zip(rank.outputs, rank.output_layouts, strict=True)
        for device in rank.devices
        if layout.partial
    }
    return found | sums


def effect(one: Case, broken: Mutant) -> str:
    """What a mutant does when it runs: "same" where every device gets what it should."""
    try:
        found = ran(broken.roles, one.full)
    except Hang:
        return "hangs"
    except (RuntimeError, IndexError, ValueError, TypeError, KeyError, AssertionError, ZeroDivisionError, LayoutError):
        # torch refuses the shapes that come together, a symbol the numbers, a transfer the pieces
        return "fails"
    assert found.keys() == one.right.keys()
    return "same" if all(_close(found[key], one.right[key]) for key in one.right) else "differs"


def _close(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bound = TOLERANCE * max(float(b.double().abs().max()) if b.numel() else 0.0, 1e-3)
    return bool(((a.double() - b.double()).abs() <= bound).all())


def judge(one: Case, count: int, seed: int, breaks: Iterable[str] = BREAKS) -> Counter[tuple[str, str]]:
    """(kind, effect) of every mutant that was caught; fails on one that was not, though it does harm."""
    tally: Counter[tuple[str, str]] = Counter()
    for broken in mutants(one.roles, count, seed, breaks):
        caught, does = is_caught(one.placed, broken.roles), effect(one, broken)
        assert caught or does == "same", f"{broken} {does}, and is not caught"
        tally["caught" if caught else "harmless", f"{broken.kind} {does}"] += 1
    return tally


def num_harmful(tally: Counter[tuple[str, str]]) -> int:
    return sum(n for (verdict, what), n in tally.items() if verdict == "caught" and not what.endswith("same"))


@pytest.mark.slow_rows("pp=2,tp=2")
@pytest.mark.parametrize("mesh", ["fsdp=3,tp=2", pytest.param("dp=3", marks=pytest.mark.slow), "pp=2,tp=2"])
def test_broken_programs_are_caught(mesh: str) -> None:
    tally = judge(case("mlp", mesh), 27, seed=1)
    assert tally.total() == 27
    assert num_harmful(tally) >= 15


def test_every_kind_is_there_and_does_harm() -> None:
    tally = judge(case("mlp", "fsdp=2,tp=2"), 54, seed=2)  # in which no two waits are alike
    tally += judge(case("mlp", "pp=2,tp=2"), 4, seed=2, breaks=["crossed"])
    kinds = {what.rpartition(" ")[0] for _, what in tally}
    assert kinds == set(BREAKS)
    harmful = {what.rpartition(" ")[0] for _, what in tally if not what.endswith("same")}
    assert harmful == set(BREAKS)


def test_the_devices_compute_what_the_program_says() -> None:
    """The judge is right: each device by itself gives the results of one device, put together."""
    single, several = program("mlp", ""), program("mlp", "pp=2,tp=2")
    full = inputs_of(single.roles)
    alone, made = run_devices(single.roles, full), run_devices(several.roles, full)
    for rank in several.roles:
        for key, layout in zip(rank.outputs, rank.output_layouts, strict=True):
            whole = alone[0, key]
            for device in rank.devices:
                assert _close(made[device, key], whole[layout.pieces(whole.shape)[device].slices()]), (device, key)


PROGRAMS = [
    *(("mlp", mesh, False) for mesh in ("dp=3", "tp=2", "fsdp=3", "fsdp=3,tp=2", "dp=2,fsdp=2,tp=2")),
    *(("mlp", mesh, False) for mesh in ("pp=2", "pp=3", "pp=2,dp=2", "pp=2,tp=2", "pp=2,fsdp=3")),
    *(("llama", mesh, False) for mesh in ("fsdp=2,tp=2", "fsdp=3", "pp=2,dp=2", "pp=2,tp=2")),
    ("llama", "tp=2", True),
    ("llama", "dp=2,tp=2", True),
]
HARMFUL = 35  # of 60 mutants of each of these programs, at least


def test_five_hundred_harmful_mutants_are_asked_for() -> None:
    assert HARMFUL * len(PROGRAMS) >= 500


# steps over several axes


def chain_case(seed: int) -> Case | None:
    """Up to four steps of any kind, as one move; None where nothing is communicated."""
    chance = random.Random(seed)
    mesh, dtype = MESHES[chance.choice(list(MESHES))], chance.choice(DTYPES[:2])
    chain = Chain(Layout.replicated(mesh, 3), chance.choice(SHAPES))
    for _ in range(3):
        chain = Chain(chain.then(following(chain, "sum", chance.choice)).target, chain.shape)
    for _ in range(chance.randrange(1, 5)):
        chain = chain.then(following(chain, "sum", chance.choice))
    placed, roles = stepwise(chain, dtype)
    if not any(n.target in STARTS for rank in roles for n in rank.graph.nodes):
        return None
    full = inputs_of(roles, seed)
    return Case(placed, roles, full, ran(roles, full))


def judge_chains(seeds: Iterable[int]) -> Counter[tuple[str, str]]:
    tally: Counter[tuple[str, str]] = Counter()
    for seed in seeds:
        if (one := chain_case(seed)) is not None:
            tally += judge(one, 12, seed, [*BREAKS, *STEP_BREAKS])
            tally += judge(one, 12, seed, STEP_BREAKS)
    return tally


def test_broken_steps_are_caught() -> None:
    tally = judge_chains(range(20))
    harmful = {what.rpartition(" ")[0] for _, what in tally if not what.endswith("same")}
    assert {"wrong argument", "wrong transfer", "wrong group", "wrong op"} <= harmful
    assert num_harmful(tally) >= 100


@pytest.mark.slow
@pytest.mark.parametrize("number", range(8))
def test_many_broken_steps_are_caught(number: int) -> None:
    assert num_harmful(judge_chains(range(1000 + 100 * number, 1100 + 100 * number))) >= 500


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(PROGRAMS)), ids=[" ".join(map(str, p)) for p in PROGRAMS])
def test_harmful_mutants_are_all_caught(number: int) -> None:
    tally = judge(case(*PROGRAMS[number]), 60, seed=100 + number)
    assert tally.total() == 60
    assert num_harmful(tally) >= HARMFUL, sorted(tally.items())
