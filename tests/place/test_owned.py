"""Rows of experts, whatever a model does with them between its matmuls: devices equal one device in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.training import train
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.functional import grouped_mm

import meshweave as mw
from meshweave.check.completeness import check_complete

WIDTH, EXPERTS, TOP = 6, 4, 2


class Routed:
    """What a body may use: `ends`, the same computed `again`, which rows have an expert, and weights of all experts
    that are `everywhere`."""

    def __init__(self, experts: Tensor, everywhere: Tensor) -> None:
        self.everywhere = everywhere
        self.is_kept = (experts < EXPERTS).unsqueeze(1)
        self.ends, self.again = (_ends(experts) for _ in range(2))


def _ends(experts: Tensor) -> Tensor:
    return (experts.unsqueeze(1) == torch.arange(EXPERTS)).sum(0).cumsum(0).to(torch.int32)


Body = Callable[["Experts", Tensor, Routed], Tensor]


class Experts(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)
        self.body = body

    def forward(self, rows: Tensor, routed: Routed) -> Tensor:
        return self.body(self, rows, routed)


class Model(nn.Module):
    """`capacity`: what an expert is given beyond it goes to no expert."""

    def __init__(self, body: Body, capacity: int = 1000) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.router, self.experts, self.capacity = nn.Linear(WIDTH, EXPERTS), Experts(body), capacity
        self.everywhere = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 2)

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(TOP, -1)
        flat = chosen.reshape(-1)
        mine = (flat.unsqueeze(1) == torch.arange(EXPERTS)).long()
        place = (mine.cumsum(0) * mine).sum(1)
        flat = torch.where(place <= self.capacity, flat, torch.full_like(flat, EXPERTS))
        experts, order = flat.sort(stable=True)
        rows = self.experts(x[order // TOP], Routed(experts, self.everywhere)) * weights.reshape(-1)[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, order // TOP, rows)


def _plain(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    return grouped_mm(grouped_mm(rows, m.up, offs=r.ends).tanh(), m.down, offs=r.ends)


def _ends_computed_twice(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    return grouped_mm(grouped_mm(rows, m.up, offs=r.ends).tanh(), m.down, offs=r.again)


def _to_and_fro(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    return grouped_mm(_ends_computed_twice(m, rows, r), m.up, offs=r.ends)


def _experts_on_every_device(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    return _plain(m, grouped_mm(rows, r.everywhere, offs=r.ends), r)


def _sorted_rows(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    return grouped_mm(grouped_mm(rows, m.up, offs=r.ends).sort(0).values, m.down, offs=r.ends)


def _attention_over_features(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    h = grouped_mm(rows, m.up, offs=r.ends).view(-1, 1, 3, 2)
    return grouped_mm(F.scaled_dot_product_attention(h, h, h).reshape(-1, WIDTH), m.down, offs=r.ends)


def _sums_over_rows(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    h = grouped_mm(rows, m.up, offs=r.ends)
    h = h / (1 + h.square().mean(0)) + h.amax(0) * h.softmax(-1)
    return grouped_mm(h, m.down, offs=r.ends) + h.cumsum(0)


def _views(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    h = grouped_mm(rows, m.up, offs=r.ends).view(-1, 3, 2).transpose(1, 2).flatten(1)
    return grouped_mm(torch.cat(h.chunk(2, 1)[::-1], 1), m.down, offs=r.ends) * h.unsqueeze(2).expand(-1, -1, 2)[..., 0]


BODIES = (
    _plain,
    _ends_computed_twice,
    _to_and_fro,
    _experts_on_every_device,
    _sorted_rows,
    _attention_over_features,
    _sums_over_rows,
    _views,
)


def _dropped_rows_pass(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    return torch.where(r.is_kept, _plain(m, rows, r), rows)


def _dropped_rows_are_filled(m: Experts, rows: Tensor, r: Routed) -> Tensor:
    return _plain(m, rows, r).masked_fill(~r.is_kept, 0.0).exp() + rows


DROPPING = (_dropped_rows_pass, _dropped_rows_are_filled)


@pytest.mark.slow_rows(
    "_attention_over_features-1000-ep=2",
    "_attention_over_features-1000-ep=4",
    "_dropped_rows_are_filled-5-ep=2",
    "_dropped_rows_are_filled-5-ep=4",
    "_ends_computed_twice-1000-ep=2",
    "_ends_computed_twice-1000-ep=4",
    "_experts_on_every_device-1000-ep=2",
    "_experts_on_every_device-1000-ep=4",
    "_sorted_rows-1000-ep=2",
    "_sorted_rows-1000-ep=4",
    "_sums_over_rows-1000-ep=2",
    "_sums_over_rows-1000-ep=4",
    "_to_and_fro-1000-ep=2",
    "_to_and_fro-1000-ep=4",
    "_views-1000-ep=2",
    "_views-1000-ep=4",
    "_dropped_rows_pass-5-ep=2",
    "_dropped_rows_pass-5-ep=4",
    "_plain-1000-ep=2",
)
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2", "ep=4"])
@pytest.mark.parametrize(("body", "capacity"), [*((body, 1000) for body in BODIES), *((body, 5) for body in DROPPING)])
def test_devices_equal_one_device(body: Body, capacity: int, mesh: str) -> None:
    generator = torch.Generator().manual_seed(1)
    data = [{n: torch.randn(16, WIDTH, generator=generator, dtype=torch.float64) for n in ("x", "y")} for _ in range(3)]
    plan = "dp:dp+ep:ep" if "dp" in mesh else "ep:ep"
    alone, expected = train(Model(body, capacity).double(), data)
    step, losses = train(Model(body, capacity).double(), data, mesh, plan=plan)
    assert losses == pytest.approx(expected, rel=1e-10)
    for name, value in alone.parameters().items():
        torch.testing.assert_close(step.parameters()[name], value, rtol=1e-9, atol=1e-11)
    check_complete(step.program.placed, step.program.optimized.roles)


def test_a_device_has_its_own_rows_alone() -> None:
    """Between the matmuls no value has the rows of all experts; what is simulated takes the load to be balanced."""
    peaks = {}
    for mesh in ("ep=2", "ep=4"):
        data = [{n: torch.randn(1024, WIDTH) for n in ("x", "y")}]
        step, _ = train(Model(_plain), data, mesh, plan="ep:ep")
        peaks[mesh] = max(role.peak_bytes for role in mw.simulate(step.program, "h100").roles)
        owned = [n for n in step.program.placed.graph.nodes if getattr(n.meta.get("layout"), "owned", ())]
        assert owned
        assert {
            n.meta["layout"].local_shape(n.meta["spec"].shape)[0] for n in owned if len(n.meta["spec"].shape) == 2
        } <= {
            1024 * TOP // int(mesh[-1]),
            WIDTH,
        }
    assert peaks["ep=4"] < peaks["ep=2"]
