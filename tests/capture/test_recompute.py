"""Activation checkpointing: what is made again, that nothing else changes, and what it saves."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from tests.state_meter import StateMeter
from tests.training import batches, mse, sgd, train
from torch import Tensor, fx, nn
from typer.testing import CliRunner

import meshweave as mw
from meshweave.capture.blocks import find_blocks, is_ahead, is_back
from meshweave.capture.recompute import parameter_forms, recompute
from meshweave.capture.step import CaptureOptions, capture
from meshweave.cli import app
from meshweave.errors import PlanError
from meshweave.ir.graph import StepGraph, graph_text, op_name, origin_of, spec_of, tensor_inputs
from meshweave.ir.traits import VIEWS
from meshweave.passes import CapturedProgram, Recompute

aten = torch.ops.aten
POLICIES = ("pointwise", "selective", "full")
ADAM = partial(torch.optim.AdamW, lr=1e-3)


class Layer(nn.Module):
    def __init__(self, width: int = 8, wide: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, wide * width)
        self.down = nn.Linear(wide * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def captured(model: nn.Module, width: int = 8, **options: Any) -> StepGraph:
    example = {"input": torch.randn(4, width), "y": torch.randn(4, width)}
    return capture(model, mse, example, None, CaptureOptions(**options))


def again(step: StepGraph) -> list[fx.Node]:
    return [n for n in step.graph.nodes if n.name.endswith("_again")]


def kept_bytes(step: StepGraph) -> int:
    """Bytes of global shapes that ops of forward and loss save for the backward pass: a value and its views
    once, parameters and inputs not at all."""
    forms = parameter_forms(step)
    roots = {_root(n) for n in step.graph.nodes if is_ahead(n) and n not in forms and any(map(is_back, n.users))}
    return sum(spec_of(n).num_bytes for n in roots if is_ahead(n) and n.all_input_nodes)


def _root(node: fx.Node) -> fx.Node:
    """The value whose memory a view shares."""
    while node.target in VIEWS:
        (node,) = tensor_inputs(node)
    return node


@cache
def llama(layers: int = 2) -> StepGraph:
    model, batch, loss = hugging_face("llama", batch=4, heads=4, layers=layers)
    return capture(model, loss, batch, None, CaptureOptions())


# the text

TWO = """\
_0_0_weight: float32[2,2] = input
_0_2_weight: float32[2,2] = input
_1_0_weight: float32[2,2] = input
_1_2_weight: float32[2,2] = input
batch_input: float32[4,2] = input
batch_y: float32[4,2] = input
scalar_draw: int64[] = input
permute_default: float32[2,2] = aten.permute(_0_0_weight, [1, 0])
mm_default: float32[4,2] = aten.mm(batch_input, permute_default)
tanh_default: float32[4,2] = aten.tanh(mm_default)
permute_default_1: float32[2,2] = aten.permute(_0_2_weight, [1, 0])
mm_default_1: float32[4,2] = aten.mm(tanh_default, permute_default_1)
permute_default_2: float32[2,2] = aten.permute(_1_0_weight, [1, 0])
mm_default_2: float32[4,2] = aten.mm(mm_default_1, permute_default_2)
tanh_default_1: float32[4,2] = aten.tanh(mm_default_2)
"""


def test_the_text_of_two_blocks() -> None:
    block = lambda: nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh(), nn.Linear(2, 2, bias=False))  # noqa: E731
    before = captured(nn.Sequential(block(), block()), 2)
    after = recompute(before, "full")
    assert after.text().startswith(TWO)
    assert before.text().startswith(TWO)
    lines = after.text().splitlines()
    made = [line for line in lines if "_again" in line.partition(":")[0]]
    assert made == [
        "mm_default_2_again: float32[4,2] = aten.mm(mm_default_1, permute_default_2)",
        "tanh_default_1_again: float32[4,2] = aten.tanh(mm_default_2_again)",
        "mm_default_again: float32[4,2] = aten.mm(batch_input, permute_default)",
        "tanh_default_again: float32[4,2] = aten.tanh(mm_default_again)",
    ]
    # Right before the first op that reads it, and only backward does.
    first = next(i for i, line in enumerate(lines) if "tanh_default_again" in line.partition("=")[2])
    assert lines[first - 1] == made[-1]
    assert [origin_of(n).phase for n in again(after)] == ["backward"] * 4
    assert [origin_of(n).module for n in again(after)] == ["1.0", "1.1", "0.0", "0.1"]
    plain = after.text().replace("_again", "")
    assert all(line in plain for line in before.text().splitlines())
    assert (kept_bytes(before), kept_bytes(after)) == (128, 64)  # two tanh are gone: 4 x 2 float32 each


def test_none_is_the_step_itself() -> None:
    step = captured(nn.Linear(8, 8))
    assert recompute(step, "none") is step


@pytest.mark.parametrize("policy", POLICIES)
def test_the_step_is_left_as_it_was_and_the_text_is_the_same_each_time(policy: str) -> None:
    before = captured(nn.Sequential(Layer(), Layer()))
    text = before.text()
    assert recompute(before, policy).text() == recompute(before, policy).text()
    assert before.text() == text


def test_full_keeps_what_enters_a_block() -> None:
    """Of two llama layers what leaves them, for it enters the next; casts and views of parameters are not kept."""
    before = llama()
    after = recompute(before, "full")
    of = find_blocks(before).of
    ahead = [n for n in after.graph.nodes if origin_of(n).phase == "forward" and of(n) and n.op == "call_function"]
    kept = [n for n in ahead if any(origin_of(u).phase == "backward" for u in n.users)]
    values = [(of(n), op_name(n.target)) for n in kept if n.target is not aten.permute.default]
    assert values == [("model.layers.0", "aten.add.Tensor"), ("model.layers.1", "aten.add.Tensor")]
    assert kept_bytes(after) < kept_bytes(before) / 3
    assert again(after)


def test_selective_keeps_attention_and_every_second_matmul() -> None:
    step = recompute(llama(), "selective")
    made = [n for n in again(step) if origin_of(n).module.startswith("model.layers.1.")]
    matmuls = [origin_of(n).module.rpartition(".")[2] for n in made if n.target is aten.mm.default]
    assert matmuls == ["k_proj", "o_proj", "up_proj"]  # of q k v o gate up down
    assert not [n for n in made if "attention" in op_name(n.target)]
    assert [n for n in made if n.target is aten.silu.default]
    whole = [n for n in again(recompute(llama(), "full")) if "attention" in op_name(n.target)]
    assert [origin_of(n).module for n in whole] == ["model.layers.1.self_attn", "model.layers.0.self_attn"]


def test_selective_keeps_sums_over_devices() -> None:
    """The output projection is row-parallel: what is kept is the residual stream, where its sum is taken."""
    cuts = {f"model.layers.{i}.self_attn.o_proj.weight": (1,) for i in range(2)}
    step = recompute(llama(), "selective", cuts)
    made = [n for n in again(step) if n.target is aten.mm.default]
    assert [origin_of(n).module.rpartition(".")[2] for n in made] == ["k_proj", "up_proj"] * 2
    assert not [n for n in again(step) if n.target is aten.add.Tensor and origin_of(n).module == "model.layers.1"]
    column = recompute(llama(), "selective", {name: (0,) for name in cuts})
    assert column.text() == recompute(llama(), "selective").text()


# blocks


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.experts = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.gate(x)) * sum(e(x) for e in self.experts)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(Layer() for _ in range(2))
        self.right = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3))

    def forward(self, input: Tensor) -> Tensor:
        x = y = input
        for layer in self.left:
            x = layer(x)
        for layer in self.right:
            y = layer(y)
        return x * y


class OneWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.a) @ self.b


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "layers between others": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.Sequential(Layer(), Layer()), nn.LayerNorm(8)),
        ["1.0", "1.1"],
    ),
    "layers beside others": (lambda: nn.Sequential(nn.Linear(8, 8), Layer(), Layer(), nn.Linear(8, 8)), ["1", "2"]),
    "lists in blocks": (lambda: nn.Sequential(Experts(), Experts()), ["0", "1"]),
    "two lists": (Towers, ["left.0", "left.1", "right.0", "right.1", "right.2"]),
    "parameters of their own": (lambda: nn.Sequential(OneWeight(), OneWeight()), ["0", "1"]),
    "another kind of layer": (
        lambda: nn.Sequential(nn.Sequential(Layer(), nn.Linear(8, 8)), *(nn.Sequential(Layer()) for _ in range(2))),
        ["0", "1", "2"],
    ),
    "one layer of each kind": (
        lambda: nn.Sequential(nn.Sequential(Layer()), nn.Sequential(Layer(), Experts())),
        ["0", "1"],
    ),
}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_the_outermost_lists(name: str) -> None:
    make, expected = MODELS[name]
    torch.manual_seed(0)
    before = captured(make())
    assert list(find_blocks(before).names) == expected
    for policy in POLICIES:
        after = recompute(before, policy)
        assert kept_bytes(after) <= kept_bytes(before)
        assert {find_blocks(before).of(n) for n in again(after)} <= set(expected)


@pytest.mark.parametrize(
    "model",
    [nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Sequential(Layer(), nn.Tanh())],
)
def test_a_model_without_blocks_is_refused(model: nn.Module) -> None:
    data = batches(1, (4, 8), (4, 8))[0] | {}
    with pytest.raises(PlanError, match="no repeated block") as error:
        mw.compile(model, loss=mse, example={"input": data["x"], "y": data["y"]}, mesh="", passes="recompute=full")
    assert error.value.expected.startswith("layers in a list")
    assert "ModuleList" in error.value.hint
    assert "modules 0" in error.value.got or "without modules" in error.value.got


def test_a_model_without_repeated_blocks_is_left_alone_if_nobody_asked() -> None:
    program = CapturedProgram(captured(nn.Linear(8, 8)), {})
    assert Recompute("pointwise", is_optional=True).run(program, None)[0] is program
    with pytest.raises(PlanError, match="no repeated block"):
        Recompute("pointwise").run(program, None)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(PlanError, match="'most' is not a recomputation policy") as error:
        Recompute("most")
    assert error.value.expected == "none, pointwise, selective, full"
    with pytest.raises(PlanError, match="not a recomputation policy"):
        recompute(captured(nn.Sequential(Layer(), Layer())), "")


# numbers


def run(kind: str, mesh: str, policy: str, **options: Any) -> tuple[mw.TrainStep, dict[str, Any]]:
    """A step after two batches, and all that it left."""
    model, batch, loss = hugging_face(kind, batch=4, heads=4)
    data = [batch, {k: v.flip(0) for k, v in batch.items()}]
    kept = {"run": mw.RunOptions(keep_gradients=True)} | options
    step, losses = train(model, data, mesh, loss, ADAM, passes=f"recompute={policy}", **kept)
    left = {f"gradient {n}": g for n, g in step.gradients().items()}
    left |= step.parameters() | step.optimizer_state() | {"loss": torch.tensor(losses, dtype=torch.float64)}
    return step, left


def assert_same_bits(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n in expected if not torch.equal(found[n], expected[n])] == []


@pytest.mark.slow_rows("gpt2-")
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [
        ("llama", "dp=2"),
        ("gpt2", ""),
        pytest.param("llama", "", marks=pytest.mark.slow),
        pytest.param("llama", "fsdp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("gpt2", "fsdp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("llama", "dp=2,fsdp=2,tp=2", marks=pytest.mark.slow),
        pytest.param("gpt2", "fsdp=4", marks=pytest.mark.slow),
    ],
)
def test_the_bits_are_those_without_recomputation(kind: str, mesh: str) -> None:
    """gpt2 has dropout: what is drawn again is what was drawn."""
    _, expected = run(kind, mesh, "none")
    for policy in ("full",) if kind == "gpt2" or mesh != "fsdp=2,tp=2" else POLICIES:
        step, found = run(kind, mesh, policy)
        assert_same_bits(found, expected)
        drawn = [n for n in again(step.program.captured) if "chance" in op_name(n.target)]
        assert bool(drawn) == (kind == "gpt2")


@pytest.mark.slow
def test_with_clipping_accumulation_and_autocast() -> None:
    options: dict[str, Any] = {
        "clip_grad_norm": 0.5,
        "accumulate": 2,
        "precision": torch.bfloat16,
        "run": mw.RunOptions(backend="eager", keep_gradients=True),
    }
    _, expected = run("llama", "", "none", **options)
    assert_same_bits(run("llama", "", "selective", **options)[1], expected)


@pytest.mark.slow
def test_stages_make_again_where_they_ran() -> None:
    _, expected = run("llama", "pp=2", "none", plan=mw.Plan.stages("pp"))
    step, found = run("llama", "pp=2", "full", plan=mw.Plan.stages("pp"))
    assert_same_bits(found, expected)
    nodes = again(step.program.captured)
    homes = {(find_blocks(step.program.captured).of(n), step.program.placement.homes[n].devices) for n in nodes}
    assert homes == {("model.layers.0", (0,)), ("model.layers.1", (1,))}


class OnTwo(nn.Module):
    """A layer that sends its middle to device 1 and gets it back."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        there = torch.tanh(self.up(mw.on(x, mw.Mesh("", devices=[1]))))
        return torch.tanh(self.down(mw.on(there, mw.Mesh("", devices=[0])))) + x


class Megatron(nn.Module):
    """A column- and a row-parallel layer, by operators."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = mw.replicate(x, "t")
        y = mw.repartition(torch.tanh(self.up(x)), dim=-1, axis="t")
        return torch.tanh(mw.reduction(self.down(y), "t")) + x


@pytest.mark.parametrize(("layer", "mesh"), [(OnTwo, "d=2"), (Megatron, "t=2")])
def test_operators_in_a_block_are_made_again(layer: type[nn.Module], mesh: str) -> None:
    def trained(policy: str) -> tuple[mw.TrainStep, dict[str, Any]]:
        torch.manual_seed(0)
        model = nn.Sequential(layer(), layer())
        data = [{"input": b["x"], "y": b["y"]} for b in batches(2, (4, 8), (4, 8))]
        step, losses = train(model, data, mesh, make=sgd, passes=f"recompute={policy}")
        return step, step.parameters() | {"loss": torch.tensor(losses)}

    _, expected = trained("none")
    for policy in POLICIES:
        step, found = trained(policy)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        pins = [n for n in again(step.program.captured) if n.target is torch.ops.meshweave.pin.default]
        assert bool(pins) == (policy != "pointwise")
        kept = [n for n in pins if "reduction" in str(n.args[1])]
        assert bool(kept) == (policy == "full" and layer is Megatron)


def test_buffers_are_updated_once() -> None:
    def block() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())

    def trained(policy: str) -> mw.TrainStep:
        torch.manual_seed(0)
        data = [{"input": b["x"], "y": b["y"]} for b in batches(2, (4, 8), (4, 8))]
        return train(nn.Sequential(block(), block()), data, "dp=2", passes=f"recompute={policy}")[0]

    plain, found = trained("none"), trained("full")
    assert_same_bits(found.buffers(), plain.buffers())
    assert_same_bits(found.parameters(), plain.parameters())
    assert again(found.program.captured)


# memory


def peak(policy: str, mesh: str = "") -> int:
    """The most bytes that device 0 holds in the second step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(16) for _ in range(8)))
    data = [{"input": b["x"], "y": b["y"]} for b in batches(2, (512, 16), (512, 16))]
    options: dict[str, Any] = {
        "mesh": mesh,
        "passes": f"recompute={policy}",
        "run": mw.RunOptions(backend="eager"),
    }  # the meter counts op by op
    step = mw.compile(model, loss=mse, example=data[0], optimizer=sgd(model.parameters()), **options)
    step(data[0])
    ranks = [step.program.rank] * step.program.mesh.num_devices
    meter = step.session.turns.meter = StateMeter(ranks)
    meter.kinds = [dict.fromkeys(rank.graph.nodes, "any") for rank in ranks]
    meter.begin(step.session.state)
    step(data[1])
    return meter.peak[0]


@pytest.mark.parametrize("mesh", ["", pytest.param("dp=2", marks=pytest.mark.slow)])
def test_memory_falls(mesh: str) -> None:
    none, selective, full = (peak(policy, mesh) for policy in ("none", "selective", "full"))
    assert full < selective < none
    # A layer keeps its input, the normalised input and the wide activation: 6 times the residual stream, against 1.
    # What one layer works with, parameters and state are there in any case.
    assert full < none / 2


def test_kept_bytes_count_a_value_once() -> None:
    """tanh keeps its output; its view is the same memory. Parameters and inputs are not counted."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, input: Tensor) -> Tensor:
            y = torch.tanh(input @ self.weight)
            return y * y.view(2, 2, 8).view(4, 8)

    step = captured(Twice())
    held = [n for n in step.graph.nodes if origin_of(n).phase == "forward" and n.target is aten.tanh.default]
    assert len(held) == 1
    assert "aten.sub.Tensor" in graph_text(step.graph)
    assert kept_bytes(step) == 2 * 4 * 8 * 4  # tanh, and the difference of which the loss is the square


# the command line


FACTORY = """
import torch
from torch import nn

def make():
    layer = lambda: nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8))
    batch = {"input": torch.ones(4, 8), "y": torch.zeros(4, 8)}
    return nn.Sequential(layer(), layer()), batch, lambda out, batch: ((out - batch["y"]) ** 2).mean()
"""


@pytest.mark.slow
def test_the_command_line_takes_it(tmp_path: Path) -> None:
    (tmp_path / "layers.py").write_text(FACTORY)
    model = f"{tmp_path}/layers.py:make"

    def losses(policy: str) -> list[float]:
        result = CliRunner().invoke(app, ["run", model, "--steps", "3", "--json", "--passes", f"recompute={policy}"])
        assert result.exit_code == 0
        found: list[float] = json.loads(result.stdout.splitlines()[-1])["losses"]
        return found

    assert losses("full") == losses("none")
    assert losses("none")[2] < losses("none")[0]
    arguments = [
        "check",
        model,
        "--mesh",
        "fsdp=2",
        "--passes",
        "recompute=selective",
        "--steps",
        "2",
        "--optimizer",
        "sgd",
    ]
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert CliRunner().invoke(app, ["plan", model, "--mesh", "dp=2", "--passes", "recompute=full"]).exit_code == 0
    wrong = CliRunner().invoke(app, ["run", model, "--passes", "recompute=most"])
    assert wrong.exit_code == 2
    assert "'most' is not a recomputation policy" in wrong.output
