"""Kernels: what is fused, that the order stays right, and that no work is lost."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from tests.effort import calls_of
from tests.models import hugging_face
from tests.sequences import Shape, plain
from torch import nn

import meshweave as mw
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.classify import known_kind, work_of
from meshweave.cost.simulate.kernels import Fusion, Kernel, kernels_of
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import op_name
from meshweave.ir.rank import RankGraph, copied
from meshweave.ir.traits import base_name
from meshweave.ir.values import Local, Value, local_values
from meshweave.ir.work import Attention, Matmul, MemoryWork
from meshweave.ops.registry import TABLE


def program(model: nn.Module, batch: object, loss: object, mesh: str = "") -> RankGraph:
    step = mw.compile(
        model,
        loss=loss,  # type: ignore[arg-type]
        example=batch,
        optimizer=torch.optim.AdamW(model.parameters()),
        mesh=mesh,
    )
    return step.program.rank


@pytest.fixture(scope="module")
def llama() -> RankGraph:
    return program(*hugging_face("llama", batch=4, heads=4), mesh="fsdp=2,tp=2")


def test_what_an_op_returns_is_evaluated_once_for_all_forms_of_a_program(llama: RankGraph) -> None:
    local_values(llama)
    again = copied(llama)
    assert calls_of(lambda: local_values(again)) < 75 * len(again.graph.nodes)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 64, bias=False), nn.Linear(64, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        return self.second(torch.sigmoid(y) * y + 1.0)


def names(kernels: list[Kernel], phase: str) -> list[str]:
    return [
        "+".join(op_name(n.target).removeprefix("aten.") for n in k.nodes)
        for k in kernels
        if k.node.meta["origin"].phase == phase
    ]


def test_a_chain_of_pointwise_ops_is_one_kernel_when_compiled() -> None:
    rank = program(Small(), (torch.randn(8, 16),), lambda out, batch: out.square().sum())
    compiled, _ = kernels_of(rank, local_values(rank), "compiled")
    assert names(compiled, "forward") == ["mm", "sigmoid+mul.Tensor+add.Tensor", "mm"]
    ops, _ = kernels_of(rank, local_values(rank), "ops")
    assert names(ops, "forward") == ["mm", "sigmoid", "mul.Tensor", "add.Tensor", "mm"]


def test_a_bias_is_added_by_the_matmul_in_eager_mode() -> None:
    model = nn.Sequential(nn.Linear(16, 64), nn.Sigmoid(), nn.Linear(64, 16))
    rank = program(model, (torch.randn(2, 8, 16),), lambda out, batch: out.square().sum())
    values = local_values(rank)
    alone, _ = kernels_of(rank, values, "ops")
    eager, _ = kernels_of(rank, values, "eager")
    assert names(alone, "forward") == ["mm", "add.Tensor", "sigmoid", "mm", "add.Tensor"]
    assert names(eager, "forward") == ["mm+add.Tensor", "sigmoid", "mm+add.Tensor"]
    products = [k.works for k in alone if isinstance(k.works[0], Matmul)]
    assert [k.works for k in eager if len(k.nodes) == 2] == products[:2]


def test_what_a_fused_kernel_reads_and_writes() -> None:
    """The chain reads y once and writes its result, and the sigmoid for backward; a matmul reads and writes its own."""
    rank = program(Small(), (torch.randn(8, 16),), lambda out, batch: out.square().sum())
    kernels, _ = kernels_of(rank, local_values(rank), "compiled")
    first, chain, _ = [k.works[0] for k in kernels if k.node.meta["origin"].phase == "forward"]
    assert first == Matmul(8, 64, 16, 1, torch.float32, 4 * (8 * 16 + 16 * 64 + 8 * 64))
    assert chain == MemoryWork("pointwise", 4 * 3 * 8 * 64, 8 * 64, torch.float32)


def test_of_an_op_with_several_results_a_kernel_reads_what_it_takes() -> None:
    """The backward pass of layer_norm reads its mean and deviation; nothing reads its result after the sum."""
    model = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64))
    rank = program(model, (torch.randn(8, 16),), lambda out, batch: out.sum())
    values = local_values(rank)
    for fusion in ("ops", "eager"):
        kernels, _ = kernels_of(rank, values, fusion)  # type: ignore[arg-type]
        (norm,) = [k for k in kernels if "native_layer_norm" in op_name(k.node.target) and names([k], "forward")]
        result, *statistics = (x.storage for x in values.values[norm.node])
        backward = [k for k in kernels if k.node.meta["origin"].phase == "backward"]
        read = {x.storage for k in backward for n in k.reads for x in values.values.get(n, ())}
        assert read >= set(statistics)
        assert result not in read


@pytest.mark.parametrize("fusion", ["eager", "blocks", "compiled"])
def test_an_update_by_foreach_kernels_goes_over_memory_op_by_op(fusion: Fusion) -> None:
    """Fused AdamW moves a parameter, its gradient and two moments to registers and three of them back: 7 times its
    bytes. PyTorch's foreach ops: mul (weight decay) 2, lerp 3, mul 2, addcmul 3, sqrt 2, div 2, add 2, addcdiv 4; we
    write the lerp as a mul and a sum of products, 2 more."""
    rank = program(nn.Linear(256, 256, bias=False), (torch.randn(8, 256),), lambda out, batch: out.square().sum())
    moved = []
    for update in ("fused", "foreach"):
        kernels, _ = kernels_of(rank, local_values(rank), fusion, update=update)
        its = [w for k in kernels if k.node.meta["origin"].phase == "update" for w in k.works]
        moved.append(sum(w.bytes for w in its if isinstance(w, MemoryWork)) // (4 * 256 * 256))
    assert moved == [7, 22]


def test_an_unknown_way_to_update_is_an_error() -> None:
    profile = load_profile("h100").with_update("foreach")
    assert (profile.update, profile.name) == ("foreach", "h100 foreach")
    assert profile.with_update("fused").update == "fused"
    with pytest.raises(MeshweaveError, match="unknown kind of update"):
        profile.with_update("slow")


@pytest.mark.parametrize("fusion", get_args(Fusion))
def test_every_op_is_in_one_kernel_and_reads_what_is_made_before(llama: RankGraph, fusion: Fusion) -> None:
    local = local_values(llama)
    kernels, local = kernels_of(llama, local, fusion)
    held = [n for k in kernels for n in k.nodes]
    assert len(held) == len(set(held))
    order = {node: float(i) for i, node in enumerate(llama.graph.nodes)}
    made = {n: k.position for k in kernels for n in k.nodes} | {
        n: order[n] for n in llama.graph.nodes if n.target in STARTS or n.target is WAIT or n.op == "placeholder"
    }
    assert [k.position for k in kernels] == sorted(k.position for k in kernels)
    ready: dict[int, float] = {}  # by storage: a kernel may read a view
    for node, position in made.items():
        for x in local.values[node]:
            ready[x.storage] = min(position, ready.get(x.storage, position))
    for kernel in kernels:
        for read in (x.storage for n in kernel.reads for x in local.values[n]):
            assert ready[read] < kernel.position
    for node in llama.graph.nodes:
        if node.target in STARTS:
            storages = {x.storage for x in local.values[node.args[0]]}
            writers = [k for k in kernels for n in k.writes if {x.storage for x in local.values[n]} & storages]
            assert all(k.position < order[node] for k in writers)


def test_less_is_moved_the_more_is_fused(llama: RankGraph) -> None:
    sizes, flops = {}, {}
    for fusion in get_args(Fusion):
        kernels, _ = kernels_of(llama, local_values(llama), fusion)
        works = [w for k in kernels for w in k.works]
        sizes[fusion] = sum(w.bytes for w in works)
        flops[fusion] = sum(w.flops for w in works if not isinstance(w, MemoryWork))
    assert sizes["compiled"] < 0.9 * sizes["eager"] < 0.8 * sizes["ops"]
    assert flops["compiled"] == flops["ops"] == flops["eager"] > 0


def test_every_op_with_a_sharding_rule_has_a_cost() -> None:
    graph = torch.fx.Graph()
    kinds = {known_kind(graph.call_function(op, ())) for op in TABLE}
    assert kinds >= {"matmul", "attention", "pointwise", "reduction", "strided", "gather", "scatter", "scan", "fill"}


def test_an_op_of_no_known_kind_moves_its_operands_and_results() -> None:
    node = torch.fx.Graph().call_function(torch.ops.aten.nonzero.default, ())
    assert base_name(node.target) == "nonzero"
    assert not known_kind(node)
    x, y = (Value((4, size), (size, 1), torch.float32, size, 16 * size) for size in (3, 5))
    (work,) = work_of(node, [x], [y])
    assert work == MemoryWork("pointwise", x.bytes + y.bytes, 20, torch.float32)


def test_an_unknown_way_of_fusing_is_an_error(llama: RankGraph) -> None:
    with pytest.raises(MeshweaveError, match="unknown fusion mode"):
        kernels_of(llama, local_values(llama), "magic")  # type: ignore[arg-type]


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 6, 3, padding=1, groups=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x)


def test_a_convolution_is_a_matmul_of_its_windows() -> None:
    rank = program(Conv(), (torch.randn(2, 4, 8, 8),), lambda out, batch: out.square().sum())
    kernels, _ = kernels_of(rank, local_values(rank), "ops")
    works = [w for k in kernels for w in k.works if isinstance(w, Matmul)]
    one = 2 * 2 * 64 * 6 * 2 * 9  # batch, positions, channels out, channels in per group, window
    assert [w.flops for w in works] == [one, one]  # no gradient of the input is wanted


def test_equal_ops_are_one_when_compiled() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8, 8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ self.weight.exp()) + (x.cos() @ self.weight.exp())

    rank = program(Twice(), (torch.randn(8, 8),), lambda out, batch: out.sum())
    local: Local = local_values(rank)
    assert names(kernels_of(rank, local, "ops")[0], "forward").count("exp") == 2
    assert names(kernels_of(rank, local, "compiled")[0], "forward").count("exp") == 1


@pytest.mark.parametrize("attention", ["gather", "ring"])
@pytest.mark.parametrize(("balance", "seen"), [("none", 16 * 48 + 16 * 16 / 2), ("head_tail", 64 * 64 / 2 / 4)])
def test_attention_of_a_piece_is_priced_by_what_its_queries_see(balance: str, seen: float, attention: str) -> None:
    """On the device with most work: in order the last, with all keys before its own and a triangle."""
    model, batch, _ = plain(Shape(tokens=64, heads=2, key_heads=1))
    plan = f"cp:cp:{attention}:{balance}"
    step = mw.compile(model, loss=lambda out, _: (out**2).mean(), example=batch, mesh="cp=4", plan=plan)
    role = step.program.roles[0]
    listed, _ = kernels_of(role, local_values(role, role.devices[0]), "ops")
    works = [w for kernel in listed for w in kernel.works if isinstance(w, Attention)]
    forward = [w for w in works if not w.is_backward]
    pairs = sum(w.queries * w.keys * (0.5 if w.is_causal else 1) for w in forward)
    assert pairs == seen
    assert sum(w.flops for w in works) == pytest.approx(pairs * 2 * 2 * 8 * 2 * (2 + 5))


class Shared(nn.Module):
    """Products of a value with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        attended = nn.functional.scaled_dot_product_attention(h[:, None], h[:, None], h[:, None]).squeeze(1)
        return (attended @ attended).sum((1, 2))


def test_an_operand_that_is_passed_twice_counts_twice() -> None:
    rank = program(Shared(), (torch.randn(2, 16, 16),), lambda out, batch: out.square().sum())
    kernels, _ = kernels_of(rank, local_values(rank), "ops")
    works = [work for kernel in kernels for work in kernel.works if kernel.node.meta["origin"].phase == "forward"]
    assert [(w.m, w.n, w.k, w.batch) for w in works if isinstance(w, Matmul)] == [(32, 16, 16, 1), (16, 16, 16, 2)]
    assert [(w.heads, w.queries, w.keys) for w in works if isinstance(w, Attention)] == [(2, 16, 16)]
