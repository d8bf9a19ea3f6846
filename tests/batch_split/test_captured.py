"""Steps with experts in chunks: each sorts, dispatches and combines its own rows; what couples rows stays whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.experts import FAMILIES, mixture, own_loss, tokens
from tests.movement.test_dispatch import MODELS, PLANS, SLOW_LINKS, Experts, Model, batches
from tests.training import assert_equals_one_device, assert_tensors, train
from torch import Tensor, nn

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.errors import MeshweaveError
from meshweave.ir.grouped import BY_ROWS
from meshweave.optimize.batch_split.split import SplitReport
from meshweave.passes import Recompute, Split

WIDTH, COUNT, TOP = 8, 4, 2
ALWAYS = {n: [Split((n,), "always")] for n in (2, 4)}


def report(step: mw.TrainStep) -> SplitReport:
    (first, *_) = step.program.optimized.splits
    return first


def num_expert_ops(step: mw.TrainStep) -> int:
    return sum(node.target in BY_ROWS for node in step.program.captured.graph.nodes)


SAMPLE = {("a sum over each token", "ep=2", 2), ("added rows", "ep=4", 2), ("an order that is sorted", "dp=2,ep=2", 2)}
CASES = [
    pytest.param(MODELS[name], mesh, count, marks=() if (name, mesh, count) in SAMPLE else pytest.mark.slow, id=name)
    for name in MODELS
    for mesh in PLANS
    for count in ALWAYS
]


@pytest.mark.slow_rows("added rows2")
@pytest.mark.parametrize(("settings", "mesh", "count"), CASES)
def test_chunks_equal_the_whole_step_in_float64(settings: dict[str, Any], mesh: str, count: int) -> None:
    data = batches(3)
    options: dict[str, Any] = {"plan": PLANS[mesh], "profile": SLOW_LINKS}
    whole, _ = train(Model(**settings).double(), data[:1], mesh, **options)
    step = assert_equals_one_device(Model(**settings).double(), data, mesh, passes=ALWAYS[count], **options)
    assert report(step).is_taken
    assert report(step).work_share == 1.0
    assert step.program.optimized.name == f"rows in {count} chunks"
    assert num_expert_ops(step) == count * num_expert_ops(whole)  # every chunk sorts and works on its own rows
    check_complete(step.program.placed, step.program.expanded)


QUICK = {"mixtral"}
KINDS = [
    pytest.param(kind, is_padded, marks=() if kind in QUICK else pytest.mark.slow)
    for kind in FAMILIES
    if kind != "llama4_text"
    for is_padded in (False, True)
]


@pytest.mark.slow_rows("mixtral-False")
@pytest.mark.parametrize(("kind", "is_padded"), KINDS)
def test_mixtures_train_as_on_one_device(kind: str, is_padded: bool) -> None:
    """Their auxiliary losses take the rows of all chunks together; that of a padded batch reshapes an expanded mask."""
    data = [tokens(batch=4, seed=s) for s in range(2)]
    if is_padded:
        data = [
            {**batch, "attention_mask": (torch.arange(8) < torch.tensor([[8], [6], [7], [5]])).long()} for batch in data
        ]
    model = mixture(kind, **({"num_hidden_layers": 1} if kind == "mixtral" else {}))
    alone, expected = train(model, data, loss=own_loss)
    step, losses = train(model, data, "ep=2", loss=own_loss, plan="ep:ep", passes=ALWAYS[2])
    assert report(step).is_taken
    assert report(step).work_share > 0.99
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
    assert_tensors(step.parameters(), alone.parameters())


def test_experts_are_recomputed_from_saved_rows_in_chunks() -> None:
    """Of a layer of experts backward recomputes the matmuls, but neither chooses, sorts nor dispatches again; so saved
    rows and recomputed matmuls belong to the same sort, and the step still comes apart into chunks."""
    model, data = mixture("mixtral"), [tokens(batch=4, seed=s) for s in range(2)]
    options: dict[str, Any] = {"loss": own_loss, "plan": "ep:ep"}
    alone, expected = train(model, data, loss=own_loss)
    whole, _ = train(model, data, "ep=2", passes="recompute=selective", **options)
    step, losses = train(model, data, "ep=2", passes=[Recompute("selective"), *ALWAYS[2]], **options)
    again = [str(n.target) for n in whole.program.captured.graph.nodes if n.name.endswith("_again")]
    assert again.count("meshweave.grouped_mm.default") == 2 * 2  # gate and up, and down, in two layers
    assert not {"aten.topk.default", "aten.sort.default", "aten.sort.stable"} & {*again}
    dispatched = [n for n in whole.program.placed.graph.nodes if n.name.endswith("_again") and "index" in str(n.target)]
    assert not [n for n in dispatched if len(n.meta["spec"].shape) == 2]  # weights of rows are looked up, not rows
    assert report(step).is_taken
    assert num_expert_ops(step) == 2 * num_expert_ops(whole)
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
    assert_tensors(step.parameters(), alone.parameters())
    check_complete(step.program.placed, step.program.expanded)


Rows = Callable[["Coupled", Tensor, Tensor, Tensor], Tensor]


class Coupled(nn.Module):
    """Experts whose rows do not come apart; `how` makes the rows of all tokens from x, the choices and the scores."""

    def __init__(self, how: Rows) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.router, self.experts = nn.Linear(WIDTH, COUNT), Experts(COUNT)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.router(x).sigmoid()
        chosen = scores.topk(TOP, -1).indices
        return x + self.how(self, x, chosen, scores)


def ends_of(experts: Tensor) -> Tensor:
    return (experts.unsqueeze(1) == torch.arange(COUNT)).sum(0).cumsum(0).to(torch.int32)


def back(rows: Tensor, order: Tensor, like: Tensor) -> Tensor:
    return torch.zeros_like(like).index_add(0, order // TOP, rows)


def capacity(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """An expert takes the first 5 rows of all tokens that chose it."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    hot = (experts.unsqueeze(1) == torch.arange(COUNT)).long()
    kept = ((hot.cumsum(0) * hot).sum(1) <= 5).to(x.dtype)
    rows = model.experts(x[order // TOP], ends_of(experts))
    return back(rows * kept.unsqueeze(1), order, x)


def fewer(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """The ends are not where the rows of experts end."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    ends = (experts.unsqueeze(1) == torch.arange(COUNT)).sum(0).clamp(max=3).cumsum(0).to(torch.int32)
    return back(model.experts(x[order // TOP], ends), order, x)


def neighbours(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """A row takes something of the one that was sorted in front of it."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    rows = x[order // TOP]
    return back(model.experts(rows + rows.roll(1, 0), ends_of(experts)), order, x)


def places(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """A row is weighed by where its token stands among all."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    rows = model.experts(x[order // TOP], ends_of(experts))
    return back(rows * (order // TOP).to(x.dtype).unsqueeze(1), order, x)


def others(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """The ends are those of other choices than the rows are sorted by."""
    order = chosen.reshape(-1).argsort(stable=True)
    ends = ends_of(scores.topk(TOP, -1, largest=False).indices.reshape(-1))
    return back(model.experts(x[order // TOP], ends), order, x)


def descending(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    experts, order = chosen.reshape(-1).sort(descending=True, stable=True)
    return back(model.experts(x[order // TOP], ends_of(experts)), order, x)


def maybe_negative(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """Rows of expert -1 would move the others where no end says so."""
    experts, order = (chosen - (scores.sum(1, keepdim=True) > 2).long()).reshape(-1).sort(stable=True)
    return back(model.experts(x[order // TOP], ends_of(experts)), order, x)


def apart(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """The rows of a token are not beside each other: choices are in the outer dim."""
    experts, order = chosen.t().reshape(-1).sort(stable=True)
    rows = model.experts(x[order % len(x)], ends_of(experts))
    return torch.zeros_like(x).index_add(0, order % len(x), rows)


def by_score(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """The tokens with the highest scores take the same weights, whoever they are: rank among all tokens."""
    rank = scores.sum(1).sort().indices.sort().indices
    experts, order = chosen.reshape(-1).sort(stable=True)
    rows = model.experts(x[order // TOP], ends_of(experts))
    return back(rows, order, x) * rank.to(x.dtype).unsqueeze(1)


def shared(model: Coupled, x: Tensor, chosen: Tensor, scores: Tensor) -> Tensor:
    """What all experts get is weighed by how many rows each has of all tokens."""
    experts, order = chosen.reshape(-1).sort(stable=True)
    ends = ends_of(experts)
    load = ends.to(x.dtype) / len(order)
    rows = model.experts(x[order // TOP], ends)
    return back(rows * load[experts].unsqueeze(1), order, x)


REFUSED: dict[Rows, str] = {
    capacity: "cumsum",
    fewer: "does not have the ends of each expert's rows",
    neighbours: "whole",
    places: "positions of rows are used as numbers",
    others: "does not have the ends of each expert's rows",
    descending: "descending",
    maybe_negative: "negative",
    apart: "positions of rows are used as numbers",
}


@pytest.mark.parametrize("how", REFUSED, ids=lambda how: how.__name__)
def test_rows_that_hang_on_others_stay_whole(how: Rows) -> None:
    data = batches(2)
    step = assert_equals_one_device(Coupled(how).double(), data, "ep=2", plan="ep:ep", passes=ALWAYS[2])
    assert not report(step).is_taken
    assert REFUSED[how] in report(step).reason


@pytest.mark.parametrize("how", [by_score, shared], ids=lambda how: how.__name__)
def test_what_needs_all_rows_beside_the_experts_is_done_on_all(how: Rows) -> None:
    data = batches(2)
    step = assert_equals_one_device(Coupled(how).double(), data, "ep=2", plan="ep:ep", passes=ALWAYS[2])
    assert report(step).is_taken
    ends = {n.args[2] for n in step.program.captured.graph.nodes if n.target in BY_ROWS}
    assert len(ends) == 2


def test_a_batch_that_does_not_come_apart_is_left_whole() -> None:
    data = batches(1, num_rows=6)
    step, _ = train(Model().double(), data, "ep=2", plan="ep:ep", passes=ALWAYS[2])
    assert not report(step).is_taken
    assert "2 equal chunks on each of 2 devices" in report(step).reason


@pytest.mark.slow
def test_chunks_are_taken_where_they_are_faster_and_both_are_named() -> None:
    model = mixture("mixtral")
    with pytest.raises(MeshweaveError, match="costs"):
        mw.compile(
            model, mesh="ep=2", plan="ep:ep", example=tokens(), loss=own_loss, passes="split=2", profile=SLOW_LINKS
        )
    step = mw.compile(
        model,
        mesh="ep=2",
        plan="ep:ep",
        example=tokens(),
        loss=own_loss,
        passes="split=2,overlap",
        profile="h100",
    )
    whole, chunks = step.program.optimized.variants[:2]
    assert (whole.name, chunks.name) == ("as it is", "rows in 2 chunks")
    assert report(step).is_taken == (chunks.seconds < whole.seconds)
    assert report(step).seconds_before == whole.seconds
