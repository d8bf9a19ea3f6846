"""Rank graphs through the scheduler: parts of a step stay in order, merges are proven, the cap holds when it runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from itertools import combinations
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from torch import Tensor, fx

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.check.completeness import check_complete
from meshweave.check.deadlock import check_deadlock
from meshweave.cost.simulate.step import simulate_roles
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.collectives import STARTS, functional
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph, copied
from meshweave.ir.values import local_values
from meshweave.ir.verify import verify_rank
from meshweave.optimize.overlap.steps import overlap_role, overlap_roles, tasks_of
from meshweave.optimize.overlap.unmerge import merged_results, unmerge_buckets
from meshweave.program import Program
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.session import SessionSettings
from meshweave.runtime.world import LocalWorld
from meshweave.train_step import CompiledStep, TrainStep

H100 = mw.load_profile("h100")
GATHER = functional.all_gather_into_tensor.default
OPTIMIZER = partial(torch.optim.AdamW, lr=1e-3)


def program(mesh: str = "fsdp=2,tp=2", uneven: bool = False, accumulate: int = 1) -> Program:
    return _program(mesh, uneven, accumulate)


@cache
def _program(mesh: str, uneven: bool, accumulate: int) -> Program:
    sizes = {"batch": 5, "heads": 3} if uneven else {"batch": 4, "heads": 4}
    model, batch, loss = hugging_face("llama", **sizes, layers=1 if uneven or mesh == "fsdp=2,tp=2" else 2)
    spec = read_optimizer(OPTIMIZER(model.parameters()), model)
    options = CaptureOptions(accumulate=accumulate)
    return build_program(StepSource(model, loss), batch, spec, Target(mw.Mesh(mesh), None, H100), options)


def scheduled(mesh: str = "fsdp=2,tp=2", uneven: bool = False, accumulate: int = 1) -> tuple[Any, Any]:
    return _scheduled(mesh, uneven, accumulate)


@cache
def _scheduled(mesh: str, uneven: bool, accumulate: int) -> tuple[Any, Any]:
    made = program(mesh, uneven, accumulate)
    ordered = overlap_roles(made.roles, H100, microbatches=accumulate)
    return ordered.roles, ordered.reports


def starts(role: RankGraph) -> list[fx.Node]:
    return [n for n in role.graph.nodes if n.target in STARTS]


def marks(role: RankGraph) -> Counter[Any]:
    """What every node of the placed graph became."""
    return Counter(n.meta["global"] for n in role.graph.nodes if "global" in n.meta)


@pytest.mark.parametrize("mesh", ["fsdp=2,tp=2", pytest.param("pp=2,fsdp=2", marks=pytest.mark.slow)])
def test_roles_are_faster_and_proven(mesh: str) -> None:
    before = program(mesh)
    roles, reports = scheduled(mesh)
    for role in roles:
        verify_rank(role)
    check_complete(before.placed, roles)
    check_deadlock(roles)
    old, new = (simulate_roles(held, H100) for held in (before.roles, roles))
    assert new.seconds < 0.8 * old.seconds
    assert new.exposed_seconds < 0.6 * old.exposed_seconds
    for report in reports:
        assert report.bound_seconds <= report.seconds < report.seconds_before
        assert report.peak_bytes <= report.cap_bytes
    if len(roles) == 1:  # alone, a role costs the scheduler what the simulator says
        assert reports[0].seconds_before == pytest.approx(old.seconds, rel=0.02)
        assert reports[0].seconds == pytest.approx(new.seconds, rel=0.13)


@pytest.mark.slow
def test_what_a_role_does_stays_and_its_input_too() -> None:
    (before,), ((after,), _) = program().roles, scheduled()
    assert starts(before) != starts(after)
    assert before.text() == program().rank.text()
    assert marks(after) == marks(before)
    assert {n.meta.get("move") for n in starts(after)} <= {n.meta.get("move") for n in starts(before)}
    assert Counter(n.target for n in starts(unmerge_buckets(after))) == Counter(n.target for n in starts(before))


def test_parts_of_the_step_stay_in_order() -> None:
    """What stands in a part is of it, or waits for what began before; only gathers of backward begin in forward."""
    ((role,), _), (old,) = scheduled(), program().roles
    parts = [[task.node for task in part] for part in compile_tasks(role, torch.device("cpu")).tasks.values()]
    expected = [{"forward", "loss"}, {"forward", "loss", "backward"}, {"backward", "update"}]
    for part, phases in zip(parts, expected, strict=True):
        assert {origin_of(n).phase for n in part} <= phases
    loss = next(n for key, n in zip(role.outputs, list(role.graph.nodes)[-1].args[0], strict=True) if key[0] == "loss")
    assert loss in parts[0]
    ahead = [n for n in parts[0] if n.target in STARTS and all(w not in parts[0] for w in n.users)]
    assert all(n.target is GATHER for n in ahead)
    updates = [n for n in old.graph.nodes if origin_of(n).phase == "update" and n.op == "call_function"]
    assert len(parts[2]) >= len(updates) > 100


@pytest.mark.slow
def test_with_several_microbatches_nothing_is_under_way_when_the_next_begins() -> None:
    (role,), _ = scheduled("fsdp=4", accumulate=2)
    parts = [{task.node for task in part} for part in compile_tasks(role, torch.device("cpu")).tasks.values()]
    begun = [n for n in starts(role) if n not in parts[2]]
    assert len(begun) > 5
    every = [n for n in begun if origin_of(n).phase != "reduce"]  # what the last microbatch alone begins may go on
    assert 5 < len(every) < len(begun)
    assert all(wait not in parts[2] for n in every for wait in n.users)


@pytest.mark.slow
def test_roles_keep_the_order_of_what_they_meet_in() -> None:
    before, (after, _) = program("pp=2,fsdp=2").roles, scheduled("pp=2,fsdp=2")

    def met(roles: tuple[RankGraph, ...]) -> list[list[tuple[Any, str]]]:
        shared = tasks_of(roles, H100).shared
        return [[(n.target, str(n.args[-1])) for n in starts(role) if n in shared] for role in roles]

    assert all(len(row) >= 3 for row in met(before))
    assert met(after) == met(before)


def test_only_what_is_alike_on_all_devices_is_merged() -> None:
    """The first device's sizes are written into merges: with pieces of several sizes the rest stays as it is."""
    made, (roles, _) = program("fsdp=4", uneven=True), scheduled("fsdp=4", uneven=True)
    check_complete(made.placed, roles)
    first, last = (local_values(roles[0], d).values for d in (0, 3))
    merged = merged_results(roles[0])
    assert merged
    for start, results in merged.items():
        for node in (start, *results):
            assert [x.shape for x in first[node]] == [x.shape for x in last[node]]


def wrong(role: RankGraph, how: str) -> None:
    """A merge that brings each part something else."""
    start, results = next((s, r) for s, r in merged_results(role).items() if len(r) > 2 and s.target is GATHER)
    pack: Any = start.args[0]
    if how == "operands swapped":
        operands = list(pack.args[0])
        pack.args = ([operands[1], operands[0], *operands[2:]], *pack.args[1:])
    elif how == "results swapped":
        place = {node: i for i, node in enumerate(role.graph.nodes)}
        found = (r for s, r in merged_results(role).items() if s.target is GATHER)
        pairs = (pair for several in found for pair in combinations(several, 2))
        a, b = next(p for p in pairs if all(place[u] > max(place[n] for n in p) for n in p for u in n.users))
        users = list(a.users), list(b.users)
        for user in users[0]:
            user.replace_input_with(a, b)
        for user in users[1]:
            user.replace_input_with(b, a)
    else:
        cut: Any = results[0]
        while cut.target is not torch.ops.aten.slice.Tensor:
            cut = cut.args[0]
        cut.args = (*cut.args[:2], cut.args[2] + 1, cut.args[3] + 1)


@pytest.mark.parametrize("how", ["operands swapped", "results swapped", "cut elsewhere"])
def test_a_wrong_merge_is_found(how: str) -> None:
    made, (roles, _) = program(), scheduled()
    role = copied(roles[0])
    wrong(role, how)
    with pytest.raises(VerifyError):
        check_complete(made.placed, (role,))


class Live:
    """A Meter of all that the first device holds: its pieces of inputs, and every storage that ops make, once."""

    def __init__(self, role: RankGraph, step: TrainStep, batch: Any) -> None:
        state = [x for pieces in step.session.state.pieces.values() for x in pieces]
        self.inputs = {x.untyped_storage().data_ptr() for x in (*state, *batch.values())}
        sources = [n for n in role.graph.nodes if n.op == "placeholder"]
        values = local_values(role).values
        self.sizes = {n: sum(x.bytes for x in values[n]) for n in sources}
        self.bytes = self.peak = sum(self.sizes.values())
        self.held: dict[fx.Node, Tensor] = {}
        self.count: Counter[int] = Counter()

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        if index or not isinstance(value, Tensor) or value.untyped_storage().data_ptr() in self.inputs:
            return
        self.held[node] = value
        pointer = value.untyped_storage().data_ptr()
        self.bytes += value.untyped_storage().nbytes() if not self.count[pointer] else 0
        self.count[pointer] += 1
        self.peak = max(self.peak, self.bytes)

    def freed(self, index: int, node: fx.Node) -> None:
        if index or (node not in self.held and node not in self.sizes):
            return
        if node in self.sizes:
            self.bytes -= self.sizes[node]
            return
        storage = self.held.pop(node).untyped_storage()
        self.count[storage.data_ptr()] -= 1
        self.bytes -= storage.nbytes() if not self.count[storage.data_ptr()] else 0


@pytest.mark.slow
def test_the_cap_holds_when_the_step_runs() -> None:
    """What a device holds is never more than the report says, and not much less."""
    model, batch, _ = hugging_face("llama", layers=1)
    made = program("fsdp=4", uneven=True)
    (role,), (report,) = scheduled("fsdp=4", uneven=True)
    ordered = replace(made, optimized=replace(made.optimized, roles=(role,)))
    step = TrainStep(
        CompiledStep(ordered, model, OPTIMIZER(model.parameters()), LocalWorld(made.mesh), SessionSettings())
    )
    meter = Live(role, step, batch)
    step.session.turns.meter = meter
    step(batch)
    assert 0.7 * report.peak_bytes < meter.peak <= report.peak_bytes


def test_a_cap_that_nothing_keeps_names_the_least_and_the_tensors() -> None:
    role = program().rank
    text = role.text()
    with pytest.raises(MeshweaveError) as error:
        overlap_role(role, H100, 1 << 10)
    assert "memory_cap_bytes=" in error.value.expected
    assert "MB" in error.value.hint
    assert role.text() == text


def test_a_tight_cap_is_kept() -> None:
    _, (roomy,) = scheduled()
    _, tight = overlap_role(program().rank, H100, roomy.peak_before)
    assert tight.peak_bytes <= roomy.peak_before
    assert tight.seconds < roomy.seconds_before


@pytest.mark.slow
def test_equal_inputs_give_equal_orders() -> None:
    role = program().rank
    before = role.text()
    texts = {overlap_role(role, H100)[0].text() for _ in range(2)}
    assert len(texts) == 1
    assert role.text() == before  # it is ordered on a copy
    assert before not in texts
