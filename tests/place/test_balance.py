"""Sequences held from head and tail: right for every mask and op, and of equal work on every device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.sequences import Shape, difference, named, plain
from torch import Tensor, fx, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.errors import PlanError
from meshweave.ir import attention as kernels
from meshweave.ir import ops
from meshweave.place.plan_text import parse_plan
from meshweave.place.plans import Plan

EXACT = 1e-10  # of float64
_OTHERS = {"dp": "dp:dp", "fsdp": "fsdp:fsdp", "tp": "auto_tp:tp"}


def plan_of(mesh: str, context: str) -> str:
    return "+".join(_OTHERS.get(axis, f"cp:{axis}:{context}") for axis in mw.Mesh.parse(mesh).axis_names)


@pytest.mark.slow_rows(
    "cp=2,tp=2-gather",
    "cp=2,tp=2-heads",
    "cp=4-gather",
    "cp=4-heads",
    "dp=2,cp=2-gather",
    "dp=2,cp=2-heads",
    "dp=2,cp=2-ring",
    "fsdp=2,cp=2-gather",
    "fsdp=2,cp=2-heads",
    "fsdp=2,cp=2-ring",
    "cp=2,tp=2-ring",
)
@pytest.mark.parametrize("way", ["gather", "ring", "heads"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "cp=2,tp=2", "dp=2,cp=2", "fsdp=2,cp=2"])
def test_gradients_are_exact(mesh: str, way: str) -> None:
    made = plain(Shape(key_heads=4, layers=2))
    error, step = difference(made, mesh, torch.float64, plan=plan_of(mesh, f"{way}:head_tail"))
    assert error < EXACT
    assert "from head and tail" in step.program.sequence
    check_complete(step.program.placed, step.program.expanded)


@pytest.mark.slow_rows(
    "cp=2,tp=2-gather", "cp=2-ring", "cp=4-gather", "cp=4-ring", "fsdp=2,cp=2-gather", "fsdp=2,cp=2-ring"
)
@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize("mesh", ["cp=2", "cp=4", "cp=2,tp=2", "fsdp=2,cp=2"])
def test_llama_has_it_by_default(mesh: str, way: str) -> None:
    """Keys and values are what is gathered, and nothing else that runs along the sequence."""
    error, step = difference(named("llama", 16), mesh, torch.float32, plan=plan_of(mesh, way))
    assert error < 1e-5
    assert "from head and tail" in step.program.sequence
    gathers = [n for n in step.program.placed.graph.nodes if n.target is ops.move and is_gather(n)]
    assert len(gathers) == 4
    assert all("attention" in str(user.target) for node in gathers for user in node.users)


def is_gather(move: fx.Node) -> bool:
    source, target = move.args[0].meta["layout"], move.meta["layout"]  # type: ignore[union-attr]
    return "cp" in source.sharded_axes and "cp" not in target.sharded_axes and len(target.dims) > 2


@pytest.mark.slow_rows("bool-gather", "documents-gather", "float-gather", "float-ring", "none-gather")
@pytest.mark.parametrize("way", ["gather", "ring"])
@pytest.mark.parametrize("mask", ["none", "bool", "float", "documents"])
def test_masks_go_by_positions(mask: str, way: str) -> None:
    made = plain(Shape(mask=mask, tokens=16))
    assert difference(made, "cp=4", torch.float64, plan=f"cp:cp:{way}:head_tail")[0] < EXACT


def test_documents_packed_in_one_sequence() -> None:
    """Hugging Face makes a mask by document of positions that begin anew: a bias, which has no balance to gain."""
    model, batch, loss = named("llama", 16)
    packed = {name: value[:1] for name, value in batch.items()}
    packed["position_ids"] = torch.cat([torch.arange(6), torch.arange(3), torch.arange(7)])[None]
    for balance in ("auto", "head_tail"):
        error, step = difference((model, packed, loss), "cp=2", torch.float32, plan=f"cp:cp:ring:{balance}")
        assert error < 1e-5
        assert ("given as a bias" in step.program.sequence) == (balance == "auto")


class Mixed(nn.Module):
    """Ops that positions cannot go through in any order, beside attention: a shift, a scan, a convolution along the
    sequence, a learned position, a lookup of one position."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.q, self.head = nn.Embedding(31, 16), nn.Linear(16, 48), nn.Linear(16, 31)
        self.positions = nn.Parameter(torch.randn(1, 8, 16))
        self.conv = nn.Conv1d(16, 16, 3, padding=1, groups=16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.positions
        x = x + 0.1 * x.cumsum(1) + F.pad(x[:, :-1], (0, 0, 1, 0)) + self.conv(x.transpose(1, 2)).transpose(1, 2)
        q, k, v = (y.unflatten(-1, (2, 8)).transpose(1, 2) for y in self.q(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x * x.softmax(1) + x[:, 5:6] + x.flip(1) + x.unflatten(1, (4, 2)).mean(2).repeat_interleave(2, 1)
        return self.head(x * torch.linspace(0, 1, 8, dtype=x.dtype)[:, None])


def mixed() -> tuple[nn.Module, dict[str, Tensor], Any]:
    torch.manual_seed(0)
    batch = {"ids": torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(1))}
    return Mixed(), batch, lambda out, batch: F.cross_entropy(out.flatten(0, 1), batch["ids"].flatten())


@pytest.mark.slow_rows("gather")
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_other_ops_along_the_sequence_get_it_as_it_is(way: str) -> None:
    assert difference(mixed(), "cp=2", torch.float64, plan=f"cp:cp:{way}:head_tail")[0] < EXACT


@pytest.mark.parametrize("accumulate", [1, 2])
def test_updates_and_outputs_are_in_order(accumulate: int) -> None:
    """Parameters along the sequence, sums of their gradients, their optimizer state, and logits that a user asks
    for."""
    model, batch, loss = mixed()
    model.double()
    eager = copy.deepcopy(model)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (model, eager)]
    options = {"mesh": "cp=2", "plan": "cp:cp:gather", "accumulate": accumulate}
    step = mw.compile(model, loss=loss, example=batch, optimizer=optimizers[0], **options)
    for _ in range(3):
        optimizers[1].zero_grad()
        loss(eager(**batch), batch).backward()
        optimizers[1].step()
        step(batch)
    for name, value in step.parameters().items():
        torch.testing.assert_close(value, eager.get_parameter(name).detach(), rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(step.forward_only(batch), eager(**batch).detach(), rtol=1e-7, atol=1e-9)


def test_random_numbers_go_by_positions() -> None:
    model, batch, loss = plain(Shape())
    model.head = nn.Sequential(nn.Dropout(0.5), model.head)  # type: ignore[assignment]
    losses = [
        mw.compile(copy.deepcopy(model), loss=loss, example=batch, mesh=mesh, plan=plan, seed=3)(batch).item()
        for mesh, plan in (("dp=1", None), ("cp=2", "cp:cp:gather:none"), ("cp=2", "cp:cp:ring:head_tail"))
    ]
    assert max(losses) - min(losses) < 1e-5


@pytest.mark.parametrize(
    ("context", "shape", "reason"),
    [  # over 4 devices where heads are to be exchanged
        ("gather", Shape(), "from head and tail: of 4 chunks"),
        ("gather:none", Shape(), "in its order: the plan asks for it"),
        ("gather", Shape(tokens=6), "in its order: 6 positions do not divide by 2 x 2"),
        ("gather", Shape(mask="none"), "in its order: no attention has a causal mask"),
        ("heads", Shape(), "in its order: devices that exchange heads have equal work already"),
        (
            "auto",
            Shape(tokens=8192, size=32, key_heads=4),
            "in its order: devices that exchange heads have equal work already",
        ),
        ("auto", Shape(tokens=512, key_heads=1), "from head and tail"),
    ],
)
def test_the_choice_is_said_with_its_reason(context: str, shape: Shape, reason: str) -> None:
    model, batch, loss = plain(shape)
    mesh = "cp=4" if shape.tokens == 8192 else "cp=2"
    step = mw.compile(model, loss=loss, example=batch, mesh=mesh, plan=f"cp:cp:{context}", profile="h100")
    assert reason in step.program.sequence
    assert any(reason in note for note in mw.simulate(step.program, "h100").notes)


def test_what_cannot_be_balanced_is_an_error_where_it_is_asked_for() -> None:
    model, batch, loss = plain(Shape(tokens=6))
    with pytest.raises(PlanError, match="6 positions do not divide by 2 x 2"):
        mw.compile(model, loss=loss, example=batch, mesh="cp=2", plan=Plan.cp("cp", balance="head_tail"))
    with pytest.raises(PlanError, match="unknown balance"):
        Plan.cp("cp", balance="zigzag")
    assert parse_plan("cp:cp:ring:none") == Plan.cp("cp", "ring", "none")


def attention_flops(context: str, num_devices: int, tokens: int = 2048) -> float:
    """Flops in attention of the device with most, times the devices."""
    model, batch, _ = plain(Shape(tokens=tokens, heads=2, key_heads=2, size=32))
    mesh, plan = (f"cp={num_devices}", f"cp:cp:{context}") if context else ("dp=1", None)
    step = mw.compile(model, loss=lambda out, _: (out**2).mean(), example=batch, mesh=mesh, plan=plan)
    spans = [span for span in mw.simulate(step.program, "h100").spans if "attention" in span.op]
    return num_devices * sum(span.flops for span in spans)


@pytest.mark.slow_rows("gather")
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_simulated_devices_have_equal_work(way: str) -> None:
    whole = attention_flops("", 1)
    assert attention_flops(f"{way}:head_tail", 4) == pytest.approx(whole, rel=0.05)
    assert attention_flops(f"{way}:none", 4) > 1.7 * whole


@pytest.mark.slow_rows("gather")
@pytest.mark.parametrize("way", ["gather", "ring"])
def test_what_a_mask_hides_is_not_computed(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs of queries and keys that kernels are called for are those of one device, a triangle counted by half."""
    pairs: list[float] = []
    kernel = kernels._block

    def counted(q: Tensor, k: Tensor, v: Tensor, scoring: kernels.Scoring) -> Any:
        rows, columns = q.shape[2], k.shape[2]
        assert not scoring.is_causal or rows == columns
        pairs.append(rows * (rows + 1) / 2 if scoring.is_causal else rows * columns)
        return kernel(q, k, v, scoring)

    monkeypatch.setattr(kernels, "_block", counted)
    difference(plain(Shape(tokens=32)), "cp=4", torch.float64, plan=f"cp:cp:{way}:head_tail")
    assert sum(pairs) == 32 * 33 / 2
