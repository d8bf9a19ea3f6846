"""Placement: which moves stand where, and that the placed graph computes what one device does."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tests.training import assert_equals_eager, batches, mse, sgd, train_eagerly
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import meshweave as mw
from meshweave.errors import RuleError
from meshweave.ir import ops
from meshweave.ir.graph import op_name, origin_of, spec_of, tensor_inputs
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.verify import verify_placed
from meshweave.place.operators import apply_constraint
from meshweave.place.plans import Plan
from meshweave.report.moves import MoveRow


def llama(heads: int = 4, key_heads: int = 2, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=8 * heads,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=32,
    )
    return LlamaForCausalLM(config)


TOKENS = torch.arange(32).view(4, 8)
EXAMPLE = {"input_ids": TOKENS * 5 % 64, "labels": TOKENS * 3 % 64}


def own_loss(out: Any, batch: Any) -> Tensor:
    return out.loss


def compiled(model: nn.Module, mesh: str, plan: Plan | None = None) -> mw.TrainStep:
    return mw.compile(model, loss=own_loss, example=EXAMPLE, optimizer=sgd(model.parameters()), mesh=mesh, plan=plan)


def count(rows: list[MoveRow], phase: str, module: str) -> dict[str, int]:
    """How many moves of each kind there are in the modules under `module`."""
    return dict(Counter(r.kind for r in rows if r.phase == phase and r.module.startswith(module)))


def assert_trains_alike(step: mw.TrainStep, model: nn.Module, make: Callable[..., Any] = sgd) -> None:
    _, expected = train_eagerly(model, [EXAMPLE] * 2, own_loss, make)
    torch.testing.assert_close([float(step(EXAMPLE)) for _ in range(2)], expected, rtol=2e-6, atol=0)


def test_tensor_parallel_llama_reduces_twice_per_layer_and_direction() -> None:
    model = llama()
    step = compiled(model, "tp=2")
    rows = step.explain()
    for layer in ("model.layers.0", "model.layers.1"):
        assert count(rows, "forward", layer) == {"all_reduce": 2}
        assert count(rows, "backward", layer) == {"all_reduce": 2}
    assert [(r.phase, r.kind) for r in rows if r.module in ("model.embed_tokens", "lm_head")] == [
        ("forward", "all_reduce"),
        ("backward", "all_reduce"),
    ]
    assert {r.phase for r in rows} == {"forward", "backward"}
    assert {r.value for r in rows if r.module.startswith("model.")} == {"float32[4,8,32]"}
    assert_trains_alike(step, model)


def test_vocabulary_parallel_cross_entropy_moves_no_logits() -> None:
    rows = [r for r in compiled(llama(), "tp=2").explain() if not r.module]
    assert [(r.phase, r.kind, r.value) for r in rows] == [
        ("forward", "all_reduce", "float32[32,1]"),
        ("forward", "all_reduce", "float32[32,1]"),
        ("forward", "all_reduce", "float32[32]"),
        ("backward", "all_reduce", "float32[32,1]"),
    ]


def test_fsdp_gathers_each_parameter_once_per_phase_and_scatters_its_gradient_once() -> None:
    model = llama()
    step = compiled(model, "fsdp=2")
    names = {n.replace(".", "_"): n for n, p in model.named_parameters()}
    rows = step.explain()
    gathers = Counter((r.phase, names[r.name]) for r in rows if r.kind == "all_gather")
    assert gathers == Counter({("forward", n): 1 for n in names.values()}) + Counter(
        {("backward", n): 1 for n in names.values() if n != "model.embed_tokens.weight"}
    )
    scatters = Counter(r.module for r in rows if r.kind == "reduce_scatter")
    assert scatters == Counter(n.removesuffix(".weight") for n in names.values())
    others = [(r.phase, r.kind, r.value) for r in rows if r.kind not in ("all_gather", "reduce_scatter")]
    assert others == [("forward", "all_reduce", "int64[]"), ("forward", "all_reduce", "float32[]")]
    assert_trains_alike(step, model)


def test_sequence_parallel_gathers_and_scatters_where_tensor_parallel_reduces() -> None:
    model = llama()
    step = compiled(model, "tp=2", Plan.hf_tp("tp") + Plan.sequence_parallel("tp"))
    rows = [r for r in step.explain() if r.value == "float32[4,8,32]"]
    for layer in ("model.layers.0", "model.layers.1"):
        assert count(rows, "forward", layer) == {"all_gather": 2, "reduce_scatter": 2}
    assert Counter((r.phase, r.kind) for r in rows) == {
        ("forward", "reduce_scatter"): 5,
        ("forward", "all_gather"): 5,
        ("backward", "reduce_scatter"): 5,
        ("backward", "all_gather"): 5,
    }
    assert {r.target for r in rows if r.kind == "reduce_scatter"} == {"[{}, {tp}, {}]"}
    assert {r.source for r in rows if r.kind == "all_gather"} == {"[{}, {tp}, {}]"}
    assert_trains_alike(step, model)


@pytest.mark.parametrize(("heads", "key_heads", "units"), [(3, 3, (8, 8)), (6, 3, (16, 8)), (5, 1, (40, 8))])
def test_heads_that_do_not_divide_are_cut_between_heads(heads: int, key_heads: int, units: tuple[int, int]) -> None:
    model = llama(heads, key_heads, layers=1)
    step = compiled(model, "tp=2")
    used = step.program.placement.used
    layer = "model.layers.0.self_attn."
    if key_heads > 1:
        assert str(used[f"{layer}k_proj.weight"]) == f"[{{tp}}x{units[1]}, {{}}]"
        assert str(used[f"{layer}q_proj.weight"]) == f"[{{tp}}x{units[0]}, {{}}]"
        assert str(used[f"{layer}o_proj.weight"]) == f"[{{}}, {{tp}}x{units[0]}]"
        rows = step.explain()
        assert {r.kind for r in rows} == {"all_reduce"}
        assert (
            count(rows, "forward", "model.layers.0") == count(rows, "backward", "model.layers.0") == {"all_reduce": 2}
        )
    assert_trains_alike(step, model)


@pytest.mark.slow_rows("dp=2,tp=2", "fsdp=2,tp=2")
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2,tp=2"])
def test_schemes_add_up(mesh: str) -> None:
    model = llama(layers=1)
    step = compiled(model, mesh)
    kinds = {r.kind for r in step.explain()}
    assert not any("all_to_all" in k for k in kinds)
    assert_trains_alike(step, model)


class Pointwise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        h = F.gelu(h) * torch.sigmoid(h) + h.clamp(-1, 1).exp() - F.silu(h) / (1 + h.abs())
        h = torch.where(h > 0, h, 0.1 * h.tanh())
        return self.down(F.dropout(h, 0.5))


@pytest.mark.slow_rows("tp=2", "dp=2", "dp=2,tp=2")
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2", "dp=2,tp=2", "fsdp=2", "fsdp=2,tp=3"])
def test_pointwise_ops_never_gather(mesh: str) -> None:
    model, example = Pointwise(), batches(1, (6, 6), (6, 6))[0]
    step = mw.compile(model, loss=mse, example=example, optimizer=sgd(model.parameters()), mesh=mesh)
    for node in step.program.placed.graph.nodes:
        if node.target is ops.move and any(torch.Tag.pointwise in getattr(u.target, "tags", ()) for u in node.users):
            before, after = node.args[0].meta["layout"], node.meta["layout"]
            grown = set(before.sharded_axes) - set(after.sharded_axes)
            params = {i.name for i in step.program.captured.inputs if i.kind == "param"}
            assert not grown or origin_of(node).module in params, f"{op_name(node.args[0].target)}: {before} -> {after}"


def test_an_unknown_op_is_an_error_with_op_line_and_registration() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.eye(3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.as_strided_copy(self.w + x, (2, 3), (3, 1))  # unknown

    with pytest.raises(RuleError, match=r"no sharding rule for aten\.as_strided_copy") as error:
        mw.compile(Strange(), loss=lambda out, batch: out.sum(), example={"x": torch.zeros(3, 3)}, mesh="dp=2")
    assert "test_place.py:" in error.value.where
    assert "in forward" in error.value.where
    assert "meshweave.register_rule(torch.ops.aten.as_strided_copy.default" in error.value.hint


def test_one_move_serves_all_consumers_of_a_phase() -> None:
    model, example = Pointwise(), batches(1, (6, 6), (6, 6))[0]
    step = mw.compile(model, loss=mse, example=example, optimizer=sgd(model.parameters()), mesh="fsdp=2,tp=2")
    moves = [n for n in step.program.placed.graph.nodes if n.target is ops.move]
    seen = Counter((n.args[0], str(n.meta["layout"]), origin_of(n).phase) for n in moves)
    assert set(seen.values()) == {1}
    assert all(n.users for n in moves)


def test_equal_steps_are_placed_equally() -> None:
    texts = {compiled(llama(layers=1), "fsdp=2,tp=2").program.placed.text() for _ in range(2)}
    assert len(texts) == 1


# pins


@pytest.mark.parametrize(
    ("constraint", "layout", "is_grad", "expected"),
    [
        ("tp=1", "[{dp}, {}, {}]", False, "[{dp}, {tp}, {}]"),
        ("tp=1", "[{dp}, {}, {tp}]", False, "[{dp}, {tp}, {}]"),
        ("tp=1", "[{dp}, {}, {}] partial(sum: tp)", False, "[{dp}, {tp}, {}]"),
        ("tp=1", "[{}, {dp}, {}]", False, "[{}, {dp,tp}, {}]"),
        ("tp=r", "[{dp}, {tp}, {}]", False, "[{dp}, {}, {}]"),
        ("tp=r", "[{dp}, {}, {}] partial(sum: tp)", False, "[{dp}, {}, {}]"),
        ("tp=r", "[{dp}, {}, {}] partial(sum: tp)", True, "[{dp}, {}, {}] partial(sum: tp)"),
        ("tp=1", "[{dp}, {}, {}] partial(sum: tp)", True, "[{dp}, {tp}, {}]"),
        ("dp=r;tp=0", "[{dp}, {tp}, {}]", False, "[{tp}, {}, {}]"),
        ("", "[{dp}, {}, {}] partial(max: tp)", False, "[{dp}, {}, {}] partial(max: tp)"),
    ],
)
def test_what_a_pin_makes_of_a_layout(constraint: str, layout: str, is_grad: bool, expected: str) -> None:
    mesh = Mesh("dp=2,tp=2")
    assert str(apply_constraint(constraint, Layout.parse(layout, mesh), is_grad)) == expected


# properties


class Chain(nn.Module):
    def __init__(self, widths: list[int], bias: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(a, b, bias) for a, b in itertools.pairwise(widths))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x))
        return self.layers[-1](x)


@st.composite
def plans(draw: st.DrawFn, axes: list[str], num_layers: int) -> Plan:
    plan = Plan()
    for axis in axes:
        kind = draw(st.sampled_from(["dp", "fsdp", "tp", "tp", "auto", "idle"]))
        styles = {f"layers.{i}": draw(st.sampled_from(["colwise", "rowwise", "replicate"])) for i in range(num_layers)}
        made = {
            "dp": Plan.dp(axis),
            "fsdp": Plan.fsdp(axis),
            "tp": Plan.tp(axis, styles),
            "auto": Plan.auto_tp(axis),
            "idle": Plan.replicate(axis),
        }
        plan = plan + made[kind]
    return plan


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[int], bool, int, str, Plan]:
    widths = draw(st.lists(st.integers(1, 7), min_size=2, max_size=4))
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3]), min_size=1, max_size=3))
    axes = ["a", "b", "c"][: len(sizes)]
    mesh = ",".join(f"{a}={n}" for a, n in zip(axes, sizes, strict=True))
    return widths, draw(st.booleans()), draw(st.integers(1, 6)), mesh, draw(plans(axes, len(widths) - 1))


def _integers(model: nn.Module, widths: list[int], size: int) -> dict[str, Tensor]:
    """Small integers for every parameter, each its own, and a batch of them."""
    made = torch.Generator().manual_seed(sum(widths) + size)
    for p in model.parameters():
        p.data.copy_(torch.randint(-2, 3, p.shape, generator=made))
    return {
        "x": torch.randint(-2, 3, (size, widths[0]), generator=made).float(),
        "y": torch.randint(-1, 2, (size, widths[-1]), generator=made).float(),
    }


@settings(max_examples=settings.default.max_examples // 4, suppress_health_check=[HealthCheck.too_slow])
@example(([1, 1, 1], False, 1, "a=2", Plan.fsdp("a")))
@given(cases())
def test_any_plan_on_any_mesh_computes_what_one_device_does_to_the_bit(
    case: tuple[list[int], bool, int, str, Plan],
) -> None:
    widths, bias, size, mesh, plan = case
    model = Chain(widths, bias)
    batch = _integers(model, widths, size)

    def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (out * batch["y"]).sum()

    twin = copy.deepcopy(model)
    make = lambda params: torch.optim.SGD(params, lr=0.5)  # noqa: E731  (a power of two: exact)
    eager, expected = train_eagerly(twin, [batch], loss, make)
    step = mw.compile(model, loss=loss, example=batch, optimizer=make(model.parameters()), mesh=mesh, plan=plan)
    verify_placed(step.program.placed)
    assert [step(batch)] == expected
    torch.testing.assert_close(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()}, rtol=0, atol=0)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2", "fsdp=3", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2,tp=2"])
def test_uneven_and_empty_pieces_train_like_one_device(mesh: str) -> None:
    step = assert_equals_eager(Chain([5, 7, 1, 3], True), batches(2, (5, 5), (5, 3)), mesh)
    for node in step.program.placed.graph.nodes:
        for operand in tensor_inputs(node):
            assert len(operand.meta["layout"].dims) == len(spec_of(operand).shape)
