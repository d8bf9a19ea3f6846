"""Whole steps in chunks and with collectives taken apart: the same training, proven, and chosen by what it gains."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import meshweave as mw
from meshweave.check.same import check_same
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.collectives import COLLECTIVES, permute
from meshweave.ir.graph import graph_text
from meshweave.ir.rank import copied
from meshweave.passes import PASSES, Decompose, Overlap, Split
from meshweave.passes.base import MeshProgram
from meshweave.train_step import TrainStep

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
PLAN = mw.Plan.fsdp("fsdp") + mw.Plan.hf_tp("tp") + mw.Plan.sequence_parallel("tp")
# The keys of meta that rooms talk through.
LISTED = set(re.findall(r'`meta\["(\w+)"\]`', (Path(__file__).parents[2] / "docs/architecture.md").read_text()))
ALWAYS, SPLIT = Decompose(when="always"), Split(when="always")


def batch(step: int = 0) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def compiled(layers: int = 2, **how: object) -> TrainStep:
    torch.manual_seed(0)
    CONFIG.num_hidden_layers = layers
    model = LlamaForCausalLM(CONFIG).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return mw.compile(
        model, loss=lambda out, b: out.loss, example=batch(), optimizer=optimizer, mesh="fsdp=2,tp=2", plan=PLAN, **how
    )


def graphs_of(step: TrainStep) -> list[torch.fx.Graph]:
    """The graphs of a program at every stage."""
    program = step.program
    roles = (*program.expanded, *program.optimized.unscheduled, *program.roles)
    return [program.captured.graph, program.placed.graph, *(role.graph for role in roles)]


@pytest.fixture(scope="module")
def plain() -> list[float]:
    step = compiled(1)
    return [float(step(batch(i))) for i in range(3)]


@pytest.mark.slow_rows("accumulated")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"passes": [SPLIT]}, marks=pytest.mark.slow),
        pytest.param({"passes": [ALWAYS]}, marks=pytest.mark.slow),
        {"passes": [SPLIT, ALWAYS, Overlap()], "profile": "h100"},
        {"passes": [SPLIT], "accumulate": 2},
    ],
    ids=["split", "rings", "all", "accumulated"],
)
def test_training_is_the_same(how: dict[str, Any], plain: list[float]) -> None:
    """Up to rounding: parameters are float64, norms and the loss of this model float32."""
    step = compiled(1, **how)
    torch.testing.assert_close([float(step(batch(i))) for i in range(3)], plain, rtol=1e-6, atol=0)
    program = step.program.optimized
    assert {key for graph in graphs_of(step) for node in graph.nodes for key in node.meta} <= LISTED
    if SPLIT in how["passes"]:
        assert all(report.is_taken and "of batch_" in report.rows for report in program.splits)
        assert any("_chunk1" in node.name for node in program.unscheduled[0].graph.nodes)
    if ALWAYS in how["passes"]:
        assert program.rings[0].num_taken > 0
        assert any(node.target is permute for node in program.roles[0].graph.nodes)


@pytest.mark.slow
def test_what_does_not_gain_is_left() -> None:
    """Of all ways to write the program the fastest simulated one is taken; the report says what the others take."""
    step = compiled(1, passes="split,decompose,overlap", profile="h100")
    program = step.program.optimized
    names = [v.name for v in program.variants]
    assert names[0] == "as it is"
    assert "rows in 2 chunks" in names
    best = min(program.variants, key=lambda v: v.seconds)
    assert program.name == best.name
    assert program.name == "as it is"  # so small a model
    assert not any(report.is_taken for report in program.splits)
    assert all("not faster" in report.reason for report in program.splits)
    starts = [sum(n.target in COLLECTIVES for n in role.graph.nodes) for role in program.unscheduled]
    assert starts == [sum(n.target in COLLECTIVES for n in role.graph.nodes) for role in program.expanded]


def test_a_scheduler_that_changes_an_op_is_found() -> None:
    program = compiled(1, passes=[ALWAYS]).program.optimized
    (role,) = program.roles
    assert check_same(role, copied(role)) > 100
    wrong = copied(role)
    node = next(n for n in wrong.graph.nodes if n.target is permute)
    node.args = (node.args[0], node.args[1] + 1, node.args[2])
    with pytest.raises(VerifyError, match="is computed differently than"):
        check_same(role, wrong)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"passes": "split=1"}, "two or more chunks"),
        ({"passes": "split=two"}, "two or more chunks"),
        ({"passes": "split"}, "needs the costs of both"),
        ({"passes": "decompose"}, "needs the costs of both"),
    ],
)
def test_bad_input(how: dict[str, object], message: str) -> None:
    with pytest.raises(MeshweaveError, match=message):
        compiled(1, **how)


@pytest.fixture(scope="module")
def expanded() -> MeshProgram:
    program = compiled(1).program
    return MeshProgram(program.expanded)


@pytest.mark.parametrize("name", [name for name, kind in PASSES.items() if kind.stage != "captured"])
def test_a_pass_leaves_its_program_as_it_was(name: str, expanded: MeshProgram) -> None:
    """Also where it changes something: neither nodes and their order nor their meta, not even for a while."""
    has_choice = any(option.name == "when" for option in fields(PASSES[name]))
    before = [(graph_text(graph), [dict(node.meta) for node in graph.nodes]) for graph in expanded.graphs]
    changed, _ = PASSES[name](**({"when": "always"} if has_choice else {})).run(expanded, mw.load_profile("h100"))
    after = [(graph_text(graph), [dict(node.meta) for node in graph.nodes]) for graph in expanded.graphs]
    assert after == before
    assert name == "ring" or changed is not expanded  # this plan cuts no sequence of an attention
