"""Mixtures of experts: every family equals eager PyTorch on every mesh, whatever the router does."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from tests.experts import FAMILIES, mixture, own_loss, tokens
from tests.processes import Job
from tests.training import assert_equals_eager, assert_tensors, batches, train, train_eagerly
from torch import Tensor, nn
from torch.nn.functional import grouped_mm

import meshweave as mw
from meshweave.check.completeness import check_complete
from meshweave.check.numerics import CHECK_LR, check_numerics
from meshweave.check.runs import Recipe, Training, in_float64
from meshweave.errors import VerifyError
from meshweave.ir import ops
from meshweave.ir.graph import origin_of, spec_of
from meshweave.ir.verify import verify_placed

PLANS = {
    "dp=2": None,
    "fsdp=2": None,
    "tp=2": None,
    "ep=2": "ep:ep",
    "ep=4": "ep:ep",
    "dp=2,ep=2": "dp:dp+ep:ep",
    "ep=2,tp=2": "ep:ep+hf_tp:tp",
    "fsdp=2,ep=2": "fsdp:fsdp+ep:ep",
}
SAMPLE = {("mixtral", "dp=2"), ("gpt_oss", "tp=2"), ("qwen3_moe", "ep=2"), ("deepseek_v3", "dp=2,ep=2")}
ALL = [
    pytest.param(kind, mesh, marks=() if (kind, mesh) in SAMPLE else pytest.mark.slow)
    for kind in FAMILIES
    for mesh in PLANS
]


@pytest.mark.slow_rows("mixtral-dp=2", "qwen3_moe-ep=2", "gpt_oss-tp=2")
@pytest.mark.parametrize(("kind", "mesh"), ALL)
def test_a_family_trains_as_in_eager_pytorch(kind: str, mesh: str) -> None:
    data = [tokens(), tokens(seed=2)]
    assert_equals_eager(mixture(kind), data, mesh, loss=own_loss, plan=PLANS[mesh])


PROVEN = {("qwen3_moe", "dp=2,ep=2"), ("gpt_oss", "ep=2")}
CHECKED = [
    pytest.param(kind, mesh, marks=() if (kind, mesh) == ("qwen3_moe", "dp=2,ep=2") else pytest.mark.slow)
    for kind in FAMILIES
    for mesh in ("ep=2", "ep=4", "dp=2,ep=2", "ep=2,tp=2", "fsdp=2,ep=2")
]


@pytest.mark.slow_rows("qwen3_moe-dp=2,ep=2")
@pytest.mark.parametrize(("kind", "mesh"), CHECKED)
def test_gradients_and_updates_equal_one_device_and_eager_pytorch(kind: str, mesh: str) -> None:
    batch = tokens()

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = mixture(kind, **({"num_hidden_layers": 1} if kind != "deepseek_v3" else {}))
        return model, torch.optim.AdamW(model.parameters(), lr=CHECK_LR)

    def build(model: torch.nn.Module, optimizer: Any, on: mw.Mesh, plan: Any) -> mw.TrainStep:
        like = in_float64(batch) if any(p.dtype == torch.float64 for p in model.parameters()) else batch
        options: dict[str, Any] = {"clip_grad_norm": 0.5, "run": mw.RunOptions(keep_gradients=True)}
        return mw.compile(model, loss=own_loss, example=like, optimizer=optimizer, mesh=on, plan=plan, **options)

    recipe = Recipe(loss=own_loss, clip_grad_norm=0.5)
    report = check_numerics(Training(fresh, lambda i: batch, recipe), mw.Mesh(mesh), PLANS[mesh], build)
    assert report.failed == ()
    assert any("gate" in e.name or "router" in e.name for e in report.errors)


def compiled(kind: str, mesh: str, **settings: Any) -> mw.TrainStep:
    model = mixture(kind, **settings)
    options: dict[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "plan": PLANS[mesh]}
    return mw.compile(model, loss=own_loss, example=tokens(), mesh=mesh, **options)


@pytest.mark.slow_rows("gpt_oss-ep=2")
@pytest.mark.parametrize(
    ("kind", "mesh"), [pytest.param(*p.values, marks=() if p.values in PROVEN else pytest.mark.slow) for p in ALL]
)
def test_every_consumer_sees_every_contribution(kind: str, mesh: str) -> None:
    program = compiled(kind, mesh).program
    assert check_complete(program.placed, program.optimized.roles).num_values > 100


def moves_of_experts(program: Any, phase: str) -> list[tuple[tuple[int, ...], str, str]]:
    """(shape, from, to) of the moves of activations in experts: what has 32 rows of tokens or 64 of their experts."""
    moves = (n for n in program.placed.graph.nodes if n.target is ops.move and origin_of(n).phase == phase)
    inside = (n for n in moves if "mlp" in origin_of(n).module and spec_of(n).num_elements >= 32 * 24)
    return [(spec_of(n).shape, str(n.args[0].meta["layout"]), str(n.meta["layout"])) for n in inside]


def test_tokens_are_gathered_and_the_sum_of_what_experts_give_is_scattered() -> None:
    program = compiled("qwen3_moe", "ep=2", num_hidden_layers=1).program
    gathered, scattered = moves_of_experts(program, "forward")
    assert gathered == ((32, 32), "[{ep}, {}]", "[{}, {}]")
    assert scattered == ((4, 8, 32), "[{}, {}, {}] partial(sum: ep)", "[{ep}, {}, {}]")
    back, scattered = moves_of_experts(program, "backward")  # tokens, not the rows of their experts
    assert back == ((32, 1, 32), "[{ep}, {}, {}]", "[{}, {}, {}]")
    assert scattered == ((32, 32), "[{}, {}] partial(sum: ep)", "[{ep}, {}]")
    owned = {str(n.meta["layout"]) for n in program.placed.graph.nodes if "silu" in n.name}
    assert owned == {"[{}, {}] owned(ep: 0 by cumsum_default_1)"}  # between the matmuls nothing moves


def test_experts_of_data_parallel_devices_work_on_a_part_of_the_rows() -> None:
    program = compiled("qwen3_moe", "dp=2,ep=2", num_hidden_layers=1).program
    layouts = {str(n.meta["layout"]) for n in program.placed.graph.nodes if "silu" in n.name}
    assert layouts == {"[{dp}, {}] owned(ep: 0 by cumsum_default)"}


def test_other_ends_under_the_same_name_are_found_out() -> None:
    placed = compiled("qwen3_moe", "ep=2").program.placed
    first, *rest = (n for n in placed.graph.nodes if n.target is torch.ops.meshweave.grouped_mm.default)
    next(n for n in rest if n.meta["key"] != first.meta["key"]).meta["key"] = first.meta["key"]
    with pytest.raises(VerifyError, match="has other ends than other ops with the key"):
        verify_placed(placed)


@pytest.mark.parametrize("implementation", ["batched_mm"])
def test_other_implementations_of_experts(implementation: str) -> None:
    model = mixture("mixtral", implementation=implementation, num_hidden_layers=1)
    assert_equals_eager(model, [tokens()], "ep=2", loss=own_loss, plan="ep:ep")


def biased(model: torch.nn.Module, experts: dict[int, float]) -> torch.nn.Module:
    """The model with a router that prefers some experts over all others, whatever the token."""
    for layer in model.model.layers:
        bias = layer.mlp.gate.e_score_correction_bias
        for expert, value in experts.items():
            bias[expert] += value
    return model


@pytest.mark.slow_rows("last", "an empty one")
@pytest.mark.parametrize("experts", [{0: 9.0}, {3: 9.0}, {2: -9.0}], ids=["all to the first", "last", "an empty one"])
def test_experts_without_tokens_and_with_all_of_them(experts: dict[int, float]) -> None:
    num_chosen = 1 if 9.0 in experts.values() else 2
    plain = {"first_k_dense_replace": 0, "n_group": 1, "num_experts_per_tok": num_chosen, "num_hidden_layers": 1}
    model = biased(mixture("deepseek_v3", **plain), experts)
    assert_equals_eager(model, [tokens(), tokens(seed=2)], "ep=4", loss=own_loss, plan="ep:ep")


@pytest.mark.slow
def test_experts_that_do_not_divide_evenly() -> None:
    model = mixture("qwen3_moe", num_experts=5, num_hidden_layers=1)
    assert_equals_eager(model, [tokens()], "ep=4", loss=own_loss, plan="ep:ep")


def test_experts_are_cut_over_an_axis_of_the_batch_or_of_tensor_parallelism() -> None:
    for mesh, plan in (("dp=2", "dp:dp+experts:dp"), ("fsdp=2", "fsdp:fsdp+experts:fsdp"), ("tp=2", "experts:tp")):
        step = assert_equals_eager(mixture("mixtral", num_hidden_layers=1), [tokens()], mesh, loss=own_loss, plan=plan)
        axis = mesh.partition("=")[0]
        layouts = [v for (kind, n), v in step.program.placement.stored.items() if kind == "param" and "experts" in n]
        assert layouts
        assert all(layout.dims[0].axes == (axis,) for layout in layouts)


def test_a_router_that_yields_nan_is_an_error_and_updates_nothing() -> None:
    model = mixture("mixtral", num_hidden_layers=1)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight.fill_(float("nan"))
    with pytest.raises(mw.StepError, match="the loss of step 1 is nan"):
        train(model, [tokens()], "ep=2", loss=own_loss, plan="ep:ep")


def test_a_model_in_bfloat16() -> None:
    model = mixture("qwen3_moe", num_hidden_layers=1).to(torch.bfloat16)
    one, expected = train(model, [tokens()], "", loss=own_loss)
    two, losses = train(model, [tokens()], "ep=2", loss=own_loss, plan="ep:ep")
    torch.testing.assert_close(losses, expected, rtol=2e-2, atol=2e-2)
    assert {t.dtype for t in two.parameters().values()} == {torch.bfloat16}
    targets = {str(n.target) for n in one.program.captured.graph.nodes if origin_of(n).phase == "backward"}
    assert "meshweave.grouped_outer.default" in targets


class Experts(nn.Module):
    """Stacked matrices of experts, as torchtitan and others write them."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(count, width, 2 * width) / 4)
        self.down = nn.Parameter(torch.randn(count, 2 * width, width) / 4)

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(torch.tanh(grouped_mm(rows, self.up, offs=ends)), self.down, offs=ends)


class Mixture(nn.Module):
    """A mixture by hand: sigmoid scores, a bias that balances the load without a loss, a shared expert, a z-loss."""

    def __init__(self, count: int = 5, width: int = 8, top: int = 2) -> None:
        super().__init__()
        self.count, self.top = count, top
        self.router, self.shared = nn.Linear(width, count), nn.Linear(width, width)
        self.experts = Experts(count, width)
        self.register_buffer("bias", torch.zeros(count))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.router(x)
        scores = logits.sigmoid()
        chosen = (scores + self.bias).topk(self.top, -1).indices
        experts, order = chosen.reshape(-1).sort(stable=True)
        load = (experts.unsqueeze(1) == torch.arange(self.count)).sum(0)
        rows = self.experts(x[order // self.top], load.cumsum(0).to(torch.int32))
        rows = rows * scores.gather(1, chosen).reshape(-1)[order].unsqueeze(1)
        self.bias += 0.01 * (load.float().mean() - load).sign()
        mixed = torch.zeros_like(x).index_add(0, order // self.top, rows)
        return mixed + self.shared(x), logits.logsumexp(-1).square().mean()


def with_z_loss(out: tuple[Tensor, Tensor], batch: dict[str, Tensor]) -> Tensor:
    return ((out[0] - batch["y"]) ** 2).mean() + 0.1 * out[1]


@pytest.mark.parametrize(("mesh", "plan"), [("ep=4", "ep:ep"), ("dp=2,ep=2", "dp:dp+ep:ep")])
def test_a_mixture_by_hand_equals_one_device_in_float64(mesh: str, plan: str) -> None:
    torch.manual_seed(0)
    model = Mixture().double()
    data = [{k: t.double() for k, t in b.items()} for b in batches(3, (12, 8), (12, 8))]
    alone, expected = train(model, data, "", loss=with_z_loss)
    step, losses = train(model, data, mesh, loss=with_z_loss, plan=plan)
    torch.testing.assert_close(losses, expected, rtol=1e-10, atol=1e-10)
    assert_tensors(step.parameters(), alone.parameters(), 1e-10)
    assert_tensors(step.buffers(), alone.buffers(), 1e-10)
    assert bool(alone.buffers()["bias"].any())
    eager, first = train_eagerly(model.float(), [{k: t.float() for k, t in b.items()} for b in data], with_z_loss)
    torch.testing.assert_close(losses, first, rtol=1e-5, atol=1e-6)
    assert_tensors({"bias": step.buffers()["bias"].float()}, dict(eager.named_buffers()))


def job(pipe: Connection, kind: str, mesh: str) -> dict[str, Any]:
    data = [tokens(), tokens(seed=2)]
    model = mixture(kind, **({"num_hidden_layers": 1} if kind == "mixtral" else {}))
    eager, expected = train_eagerly(model, data, own_loss)
    step, losses = train(model, data, mesh, loss=own_loss, plan=PLANS[mesh], profile="alpha-beta")
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()})
    return {"worst": max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))}


ON_A_CLUSTER = [
    pytest.param(kind, mesh, marks=() if (kind, mesh) == ("mixtral", "ep=2") else pytest.mark.slow)
    for kind in FAMILIES
    for mesh in PLANS
    if "ep" in mesh
]


@pytest.mark.multiprocess
@pytest.mark.parametrize(("kind", "mesh"), ON_A_CLUSTER)
def test_on_a_cluster(start: Callable[..., Job], kind: str, mesh: str) -> None:
    for outcome in start(f"{__name__}:job", mw.Mesh(mesh).num_devices, kind, mesh).finish(240):
        assert outcome.get("worst", 1.0) < 2e-6, outcome


def test_what_a_step_costs_is_simulated() -> None:
    program = compiled("mixtral", "ep=2", num_hidden_layers=1).program
    simulated = mw.simulate(program, "h100")
    assert simulated.seconds > 0
    other = mw.simulate(compiled("mixtral", "dp=2", num_hidden_layers=1).program, "h100")
    assert simulated.flops == pytest.approx(other.flops, rel=0.02)  # what the model does is no matter of the mesh


def test_a_model_without_experts_has_no_expert_plan() -> None:
    with pytest.raises(mw.PlanError, match="stacked over experts were found"):
        train(torch.nn.Linear(4, 4), [{"x": torch.zeros(2, 4), "y": torch.zeros(2, 4)}], "ep=2", plan="ep:ep")
