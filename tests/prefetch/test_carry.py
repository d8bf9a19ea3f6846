"""Parameters gathered in the step before: equal to the bit, made again where they are not there, and proven."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import Made, hugging_face, mlp
from tests.processes import Job
from tests.training import Breaks
from torch import fx

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.check.completeness import check_complete
from meshweave.cost.simulate.step import SimulateOptions, simulate_roles
from meshweave.errors import MeshweaveError, StepError, VerifyError
from meshweave.ir.collectives import STARTS, functional
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph, copied
from meshweave.ir.values import local_values
from meshweave.ir.verify import verify_rank
from meshweave.optimize.overlap.steps import Scheduling, overlap_roles
from meshweave.optimize.overlap.unmerge import merged_results, unmerge_buckets
from meshweave.optimize.prefetch.carry import carriable, carry_gathers, remove_carries
from meshweave.passes import Carry, Overlap, Recompute, pipeline_of
from meshweave.program import Program
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.session import SessionSettings
from meshweave.runtime.world import LocalWorld
from meshweave.train_step import CompiledStep, TrainStep

H100 = mw.load_profile("h100")
GATHER = functional.all_gather_into_tensor.default
MLP, LLAMA = partial(mlp, batch=8), partial(hugging_face, "llama", batch=4, heads=4)


def built(
    made: Made,
    mesh: str,
    carry: int | None,
    *,
    bucket: bool = False,
    trained: bool = True,
    recompute: str = "none",
    precision: Any = None,
    **options: Any,
) -> Program:
    """The program of a step, scheduled unless `carry` is None."""
    model, batch, loss = made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduled = [] if carry is None else [Carry(carry), Overlap(bucket)]
    how = pipeline_of([Recompute(recompute), *scheduled])
    spec = read_optimizer(optimizer, model) if trained else None
    settings = CaptureOptions(precision=mw.Precision.of(precision), **options)
    return build_program(
        StepSource(model, loss), batch, spec, Target(mw.Mesh(mesh), None, H100), settings, pipeline=how
    )


# mlp has uneven pieces on four devices: its gathers are padded by sizes that differ between devices
CASES: dict[str, tuple[Callable[[], Made], str, dict[str, Any]]] = {
    "fsdp, clipped, merged": (MLP, "fsdp=4", {"clip_grad_norm": 0.1, "bucket": True}),
    "dp x fsdp, microbatches": (MLP, "dp=2,fsdp=2", {"accumulate": 2}),
    "fsdp x tp, cast": (MLP, "fsdp=2,tp=2", {"precision": torch.bfloat16}),
}
SLOW: dict[str, tuple[Callable[[], Made], str, dict[str, Any]]] = {
    "llama, pipeline": (LLAMA, "pp=2,fsdp=2", {}),
    "llama, recomputed": (
        LLAMA,
        "fsdp=2,tp=2",
        {"recompute": "full", "precision": mw.Precision(param_dtype=torch.bfloat16)},
    ),
    "llama, microbatches": (LLAMA, "dp=2,fsdp=2", {"accumulate": 2, "clip_grad_norm": 1.0}),
}
ALL = [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@cache
def made_of(case: str) -> Made:
    return {**CASES, **SLOW}[case][0]()


@cache
def program(case: str, carry: int | None) -> Program:
    _, mesh, options = {**CASES, **SLOW}[case]
    return built(made_of(case), mesh, carry, **options)


def trainee(case: str, carry: int | None) -> TrainStep:
    made, found = copy.deepcopy(made_of(case)), program(case, carry)
    optimizer = torch.optim.AdamW(made[0].parameters(), lr=1e-2)
    settings = SessionSettings(accumulate=found.options.accumulate)
    return TrainStep(CompiledStep(found, made[0], optimizer, LocalWorld(found.mesh), settings))


def pair(case: str) -> tuple[TrainStep, TrainStep]:
    """A step as it is, and one that carries two blocks over; both have been trained on a batch."""
    found = trainee(case, None), trainee(case, 2)
    for step in found:
        step(batch_of(case))
    return found


def batch_of(case: str) -> Any:
    return made_of(case)[1]


def assert_alike(one: TrainStep, other: TrainStep) -> None:
    for kind in ("param", "buffer", "state"):
        found, expected = one.session.full(kind), other.session.full(kind)
        assert found.keys() == expected.keys()
        for name, value in found.items():
            assert torch.equal(value, expected[name]), (kind, name)


class Counts:
    """A meter that counts what a prologue makes."""

    def __init__(self, step: TrainStep) -> None:
        self.num = 0
        step.session.carries._executor.meter = self

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        self.num += 1

    def freed(self, index: int, node: fx.Node) -> None:
        pass

    def take(self) -> int:
        found, self.num = self.num, 0
        return found


def keys(role: RankGraph) -> list[str]:
    return [name for kind, name in role.outputs if kind == "carry"]


# running


@pytest.mark.slow_rows("fsdp x tp, cast")
@pytest.mark.parametrize("case", ALL)
def test_values_are_the_same_to_the_bit(case: str) -> None:
    plain, ahead = trainee(case, None), trainee(case, 2)
    assert any(keys(role) for role in ahead.program.roles)
    counts = Counts(ahead)
    for _ in range(3):
        assert plain(batch_of(case)) == ahead(batch_of(case))
    assert_alike(plain, ahead)
    assert counts.take() > 0  # in the first step
    assert plain(batch_of(case)) == ahead(batch_of(case))
    assert counts.take() == 0


CASE = "fsdp, clipped, merged"


def test_what_a_step_hands_on_is_what_the_parameters_gather_to() -> None:
    _, ahead = pair(CASE)
    parameters = ahead.parameters()
    for held in ahead.session.carries.ready(ahead.session.state):
        assert sorted(held) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        for name, value in held.items():
            assert torch.equal(value, parameters[name]), name


def test_microbatches_share_what_is_carried() -> None:
    case = "dp x fsdp, microbatches"
    plain, ahead = pair(case)
    for _ in range(2):
        assert plain(batch_of(case)) == ahead(batch_of(case))
    assert_alike(plain, ahead)


def test_after_a_load_they_are_made_again(tmp_path: Path) -> None:
    plain, ahead = pair(CASE)
    ahead.save(str(tmp_path / "ahead"))
    before = plain(batch_of(CASE)), plain(batch_of(CASE))
    assert (ahead(batch_of(CASE)), ahead(batch_of(CASE))) == before
    counts = Counts(ahead)
    ahead.load(str(tmp_path / "ahead"))
    assert (ahead(batch_of(CASE)), ahead(batch_of(CASE))) == before
    assert counts.take() > 0
    assert_alike(plain, ahead)
    assert sorted(path.name for path in (tmp_path / "ahead").iterdir())  # written by a step that carries ...
    plain.load(str(tmp_path / "ahead"))  # ... read by one that does not
    assert (plain(batch_of(CASE)), plain(batch_of(CASE))) == before


@pytest.mark.parametrize("how", ["all", "one", "data"])
def test_a_write_to_the_parameters_is_seen(how: str) -> None:
    plain, ahead = pair(CASE)
    counts = Counts(ahead)
    for step in (plain, ahead):
        for (kind, name), bound in step.session.bindings.bound.items():
            if kind == "param" and how == "data":
                for piece in step.session.state.pieces[kind, name]:
                    piece.data.mul_(0.5)  # leaves the tensor's version as it was
            elif kind == "param" and (how == "all" or name == "2.weight"):
                bound.tensor.detach().mul_(0.5)
    assert plain(batch_of(CASE)) == ahead(batch_of(CASE))
    assert counts.take() > 0
    assert_alike(plain, ahead)


def test_a_step_that_fails_leaves_nothing_stale() -> None:
    plain, ahead = pair(CASE)
    x, y = batch_of(CASE)
    for step in (plain, ahead):
        with pytest.raises(StepError, match="the loss of step"):
            step((torch.full_like(x, torch.inf), y))
    assert ahead.session.carries._values is None
    assert plain((x, y)) == ahead((x, y))
    for step in (plain, ahead):
        with pytest.raises(MeshweaveError, match="differs from the example"):
            step((x[:4], y))
    assert ahead.session.carries._values is not None  # nothing had begun
    assert plain((x, y)) == ahead((x, y))
    assert_alike(plain, ahead)


def test_after_an_update_that_broke_off(tmp_path: Path) -> None:
    plain, ahead = pair(CASE)
    ahead.save(str(tmp_path / "saved"))
    ahead.session.executor.meter = Breaks(0, "update")
    with pytest.raises(StepError, match="on fire"):
        ahead(batch_of(CASE))
    ahead.session.executor.meter = None
    with pytest.raises(StepError, match="interrupted half-way"):
        ahead(batch_of(CASE))
    with pytest.raises(StepError, match="interrupted half-way"):
        ahead.trace(batch_of(CASE))
    ahead.load(str(tmp_path / "saved"))
    assert ahead(batch_of(CASE)) == plain(batch_of(CASE))
    assert_alike(plain, ahead)


def test_a_measured_step_is_one_that_another_went_before() -> None:
    step = trainee(CASE, 2)
    found = step.trace(batch_of(CASE))  # its first step
    (role,) = step.program.roles
    assert Counter(s.op for s in found.spans if s.kind == "collective") == Counter(
        s.op for s in mw.simulate(step.program, H100).spans if s.kind == "collective"
    )
    assert {s.phase for s in found.spans if s.op == "all_gather"} >= {"update"}
    inputs = sum(x.bytes for n in role.graph.nodes if n.op == "placeholder" for x in local_values(role).values[n])
    carries = sum(item.spec.num_bytes for item in role.inputs if item.kind == "carry")
    assert inputs - 400 < found.roles[0].memory[0][1] <= inputs  # but for the batch and numbers
    assert carries > 400


def test_without_an_update_nothing_is_carried() -> None:
    found = built(mlp(batch=8), "fsdp=4", None, trained=False)
    assert carriable(found.rank, found.placed) == ()
    assert keys(built(mlp(batch=8), "fsdp=2", 2, trained=False).rank) == []


def test_what_is_not_gathered_is_not_carried() -> None:
    found = built(mlp(batch=8), "dp=2", None)
    assert carriable(found.rank, found.placed) == ()


def test_frozen_parameters_are_not_carried() -> None:
    model, batch, loss = mlp(batch=8)
    model[0].requires_grad_(False)
    found = built((model, batch, loss), "fsdp=4", None)
    assert [block.name for block in carriable(found.rank, found.placed)] == ["2", "4"]


def job_train(pipe: Any, carry: str) -> dict[str, Any]:
    """What each process runs: three steps, one that fails on all ranks, a load."""
    x, y = mlp(batch=8)[1]
    model, _, loss = mlp(batch=8)
    step = mw.compile(
        model,
        loss=loss,
        example=(x, y),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        mesh="fsdp=2",
        profile="cpu-gloo",
        clip_grad_norm=1.0,
        passes=[Carry(int(carry)), Overlap(bucket=False)],
    )
    losses = [float(step((x, y))) for _ in range(3)]
    try:
        step((torch.full_like(x, torch.inf), y))
        failed = False
    except StepError:
        failed = True
    losses += [float(step((x, y))) for _ in range(2)]
    for p in model.parameters():
        if p.dim() == 1 and (pipe is None or torch.distributed.get_rank() == 0):  # whose first piece the first rank has
            (p.to_local() if hasattr(p, "to_local") else p).data[:1].mul_(0.5)
    losses.append(float(step((x, y))))
    parameters = {name: value.flatten().tolist() for name, value in step.parameters().items()}
    return {"losses": losses, "failed": failed, "parameters": parameters, "num": len(keys(step.program.rank))}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes_carry_as_one_does(start: Callable[..., Job]) -> None:
    outcomes = start("tests.prefetch.test_carry:job_train", 2, "2").finish(240)
    expected = job_train(None, "0")
    for outcome in outcomes:
        assert "error" not in outcome, outcome["text"]
        assert (outcome.pop("num"), outcome["failed"]) == (4, True)
        assert outcome == {key: value for key, value in expected.items() if key != "num"}


# the graph


@cache
def llama(carry: int, mesh: str = "fsdp=4") -> Program:
    return built(LLAMA(layers=1), mesh, carry, clip_grad_norm=1.0, bucket=True)


@pytest.mark.slow
def test_what_the_first_blocks_need_is_gathered_in_the_update() -> None:
    (role,) = llama(2).roles
    parts = [[task.node for task in part] for part in compile_tasks(role, torch.device("cpu")).tasks]
    params = [item.name for item in role.inputs if item.kind == "param"]
    names = [name for name in params if name.startswith(("model.embed_tokens", "model.layers.0."))]
    assert sorted(keys(role)) == sorted(names)
    assert (
        "gathers the parameters of model.embed_tokens.weight, model.layers.0 during its updates"
        in llama(2).overlap[0].notes[0]
    )
    forward, update = ({origin_of(n).module for n in part if n.target in STARTS} for part in (parts[0], parts[2]))
    assert not any(module.startswith(("model.embed_tokens", "model.layers.0")) for module in forward)
    assert any(module.startswith(("model.embed_tokens", "model.layers.0")) for module in update)


def test_the_role_itself_stays_and_comes_back() -> None:
    before = built(mlp(), "fsdp=4", None)
    text = before.rank.text()
    made = carry_gathers(before.rank, [g for block in carriable(before.rank, before.placed) for g in block.gathered])
    assert before.rank.text() == text
    assert carry_gathers(before.rank, ()) is before.rank
    assert remove_carries(before.rank) is before.rank
    assert made.prologue is not None
    verify_rank(made)
    verify_rank(made.prologue)
    back = remove_carries(made)
    assert (back.inputs, back.outputs, back.prologue) == (before.rank.inputs, before.rank.outputs, None)
    ops, expected = (
        Counter(n.target for n in role.graph.nodes if n.target not in SYMBOLS) for role in (back, before.rank)
    )
    assert ops == expected
    assert any(n.target in SYMBOLS for n in made.prologue.graph.nodes)  # pieces are uneven
    assert check_complete(before.placed, (made,)) == check_complete(before.placed, (before.rank,))


def test_chains_stand_behind_the_new_parameters() -> None:
    before = built(mlp(batch=8), "fsdp=2", None)
    made = carry_gathers(before.rank, carriable(before.rank, before.placed)[0].gathered)
    nodes = list(made.graph.nodes)
    returned = dict(zip(made.outputs, nodes[-1].args[0], strict=True))
    for name in keys(made):
        new, value = returned["param", name], returned["carry", name]
        (begun,) = (n for n in nodes if n.target in STARTS and n in value.all_input_nodes)
        assert nodes.index(begun) - nodes.index(new) <= 2
        assert all(n.target not in STARTS for n in nodes[nodes.index(value) :])
        assert "global" not in value.meta
    assert [item.name for item in made.inputs if item.kind == "carry"] == keys(made) == ["0.weight", "0.bias"]


def chain_of(role: RankGraph, name: str) -> list[fx.Node]:
    """The value that is carried over of a parameter, and what it is made of, back to the new parameter."""
    returned = dict(zip(role.outputs, list(role.graph.nodes)[-1].args[0], strict=True))
    found = [returned["carry", name]]
    while found[-1] is not returned["param", name]:
        found.append(found[-1].all_input_nodes[0])
    return found


def replace_output(role: RankGraph, key: tuple[str, str], node: fx.Node) -> None:
    end = list(role.graph.nodes)[-1]
    end.args = ([node if k == key else n for k, n in zip(role.outputs, end.args[0], strict=True)],)


Q, K = (f"model.layers.0.self_attn.{which}_proj.weight" for which in "qk")


def another_parameter(role: RankGraph) -> None:
    made = [chain_of(role, name)[0] for name in (Q, K)]
    replace_output(role, ("carry", Q), made[1])
    replace_output(role, ("carry", K), made[0])


def the_old_parameter(role: RankGraph) -> None:
    sources = (n for n in role.graph.nodes if n.op == "placeholder")
    old = {i.name: n for n, i in zip(sources, role.inputs, strict=True) if i.kind == "param"}
    chain_of(role, Q)[-2].args = (old[Q], *chain_of(role, Q)[-2].args[1:])


def another_op(role: RankGraph) -> None:
    (begun,) = (n for n in chain_of(role, Q) if n.target in STARTS)
    begun.args = (begun.args[0], 2, *begun.args[2:])


def no_gather(role: RankGraph) -> None:
    replace_output(role, ("carry", Q), chain_of(role, Q)[-1])


def one_more_op(role: RankGraph) -> None:
    value = chain_of(role, Q)[0]
    with role.graph.inserting_after(value):
        made = role.graph.call_function(torch.ops.aten.neg.default, (value,))
    replace_output(role, ("carry", Q), made)


def nothing_made(role: RankGraph) -> None:
    kept = [i for i, key in enumerate(role.outputs) if key != ("carry", Q)]
    end = list(role.graph.nodes)[-1]
    end.args = ([end.args[0][i] for i in kept],)
    role.outputs = tuple(role.outputs[i] for i in kept)
    role.output_layouts = tuple(role.output_layouts[i] for i in kept)


def not_used(role: RankGraph) -> None:
    sources = [n for n in role.graph.nodes if n.op == "placeholder"]
    mine, other = (sources[[(i.kind, i.name) for i in role.inputs].index(("carry", name))] for name in (Q, K))
    mine.replace_all_uses_with(other)


def used_for_another(role: RankGraph) -> None:
    sources = [n for n in role.graph.nodes if n.op == "placeholder"]
    mine, other = (sources[[(i.kind, i.name) for i in role.inputs].index(("carry", name))] for name in (Q, K))
    users = list(mine.users), list(other.users)
    for user in users[0]:
        user.replace_input_with(mine, other)
    for user in users[1]:
        user.replace_input_with(other, mine)


def wrong_alike(role: RankGraph) -> None:
    """In the prologue as in the update."""
    another_op(role)
    assert role.prologue is not None
    role.prologue = copied(role.prologue)
    values = dict(zip(role.prologue.outputs, list(role.prologue.graph.nodes)[-1].args[0], strict=True))
    begun = values["carry", Q].all_input_nodes[0]
    begun.args = (begun.args[0], 2, *begun.args[2:])


def another_layout(role: RankGraph) -> None:
    keys = [(i.kind, i.name) for i in role.inputs]
    at, stored = keys.index(("carry", Q)), role.layouts[keys.index(("param", Q))]
    role.layouts = (*role.layouts[:at], stored, *role.layouts[at + 1 :])


def no_prologue(role: RankGraph) -> None:
    role.prologue = None


WRONG: dict[Callable[[RankGraph], None], str] = {
    another_parameter: "depends on another value than its parameter",
    the_old_parameter: "depends on another value than its parameter",
    another_op: "differs from the prologue's value",
    no_gather: "differs from the prologue's value",
    one_more_op: "differs from the prologue's value",
    nothing_made: "differ from the carried outputs",
    not_used: "is not used",
    used_for_another: "another value",
    wrong_alike: "all_gather",
    another_layout: "differs from the placed graph's value",
    no_prologue: "differ from the carried outputs",
}


@pytest.mark.parametrize("change", WRONG, ids=lambda change: change.__name__)
def test_a_wrong_carry_is_found(change: Callable[[RankGraph], None]) -> None:
    role = copied(unmerge_buckets(llama(2).rank))
    change(role)
    with pytest.raises(VerifyError, match=WRONG[change]):
        check_complete(llama(2).placed, (role,))


def test_a_wrong_merge_of_what_is_carried_is_found() -> None:
    role = copied(llama(2).rank)
    check_complete(llama(2).placed, (role,))
    returned = dict(zip(role.outputs, list(role.graph.nodes)[-1].args[0], strict=True))
    merged = ([(k, n) for k, n in returned.items() if n in results] for results in merged_results(role).values())
    (a, first), (b, second) = next(found for found in merged if len(found) > 1)[:2]
    assert {a[0], b[0]} == {"carry"}
    replace_output(role, a, second)
    replace_output(role, b, first)
    with pytest.raises(VerifyError, match="depends on another value than its parameter"):
        check_complete(llama(2).placed, (role,))


# how many, and what it brings


def wide_llama(batch: int, seq: int = 1024) -> Made:
    """Two layers of a llama with a vocabulary, without values."""
    import transformers

    sizes = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 16}
    config = transformers.AutoConfig.for_model(
        "llama", num_hidden_layers=2, vocab_size=64000, use_cache=False, bos_token_id=1, eos_token_id=2, **sizes
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        ids = torch.zeros(batch, seq, dtype=torch.int64)
    return model, {"input_ids": ids, "labels": ids}, lambda out, _: out.loss


@pytest.mark.slow_rows("1")
@pytest.mark.parametrize("accumulate", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_step_is_faster_with_it(accumulate: int) -> None:
    made = wide_llama(8 * accumulate)
    found = built(
        made,
        "fsdp=8",
        None,
        accumulate=accumulate,
        precision=mw.Precision(param_dtype=torch.bfloat16),
        clip_grad_norm=1.0,
    )
    how = mw.OverlapOptions(bucket=False)
    without, carrying = (
        overlap_roles(found.roles, H100, Scheduling(how, carry=carry), accumulate, found.placed)
        for carry in (0, "auto")
    )
    (plain, (before,)), (ahead, (after,)) = ((o.roles, o.reports) for o in (without, carrying))
    seconds = [
        simulate_roles(roles, H100, SimulateOptions(microbatches=accumulate)).seconds for roles in (plain, ahead)
    ]
    assert seconds == [without.seconds, carrying.seconds]
    assert keys(plain[0]) == []
    assert keys(ahead[0])
    assert seconds[1] < 0.99 * seconds[0]
    assert after.cap_bytes == before.cap_bytes >= after.peak_bytes
    assert (after.seconds_before, after.peak_before) == (before.seconds_before, before.peak_before)
    assert ("once a step instead of once a microbatch" in after.notes[0]) == (accumulate > 1)


def test_memory_counts_what_is_carried() -> None:
    (role,), (shown,) = llama(2).roles, simulate_roles(llama(2).roles, H100).roles
    values = local_values(role).values
    sources = {n: i.kind for n, i in zip(role.graph.nodes, role.inputs, strict=False)}
    assert shown.memory[0][1] >= sum(x.bytes for n in sources for x in values[n])
    held = sum(x.bytes for n, kind in sources.items() if kind == "carry" for x in values[n])
    assert held == sum(item.spec.num_bytes for item in role.inputs if item.kind == "carry") > 0
    assert shown.memory[-1][1] >= shown.persistent_bytes + held
    assert {one.kind for one in shown.at_peak if one.name.startswith("carry_")} <= {"gathered"}


def test_caps() -> None:
    found = program("fsdp x tp, cast", None)
    how = mw.OverlapOptions(bucket=False)
    least = overlap_roles(found.roles, H100, Scheduling(how, carry=0)).reports[0].peak_before
    with pytest.raises(MeshweaveError) as error:
        overlap_roles(found.roles, H100, Scheduling(how, 1 << 10, carry=2), 1, found.placed)
    assert "memory_cap_bytes=" in error.value.expected
    automatic = Scheduling(how, least)
    (report,) = overlap_roles(found.roles, H100, automatic, 1, found.placed).reports
    assert report.peak_bytes <= report.cap_bytes == least


@pytest.mark.slow
def test_equal_inputs_give_equal_graphs() -> None:
    case = "fsdp x tp, cast"
    _, mesh, options = CASES[case]
    assert built(made_of(case), mesh, 2, **options).rank.text() == program(case, 2).rank.text()


@pytest.mark.parametrize("carry", [-1, True, "all", 1.5])
def test_bad_numbers_of_blocks(carry: Any) -> None:
    with pytest.raises(MeshweaveError, match="carry is not a number of blocks"):
        Carry(carry)
