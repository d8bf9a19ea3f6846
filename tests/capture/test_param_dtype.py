"""Parameters stored in float32 and used in bfloat16: what moves in which dtype, and the numbers of eager PyTorch."""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from tests.training import assert_tensors, batches, mse, sgd, train
from torch import Tensor, nn
from typer.testing import CliRunner

from meshweave.capture.step import CaptureOptions, Precision, Substituted, capture, cast_for_eager
from meshweave.cli import app
from meshweave.errors import CaptureError, PlanError
from meshweave.ir.graph import op_name, origin_of, spec_of
from meshweave.runtime.session import RunOptions

BF16 = torch.bfloat16
ADAM = partial(torch.optim.AdamW, lr=1e-3)
ROUND_PARTS = torch.ops.meshweave.round_parts.default


def eager(model: nn.Module, data: list[Any], loss: Any, make: Any) -> tuple[dict[str, Tensor], list[float]]:
    """Parameters and losses of a copy whose parameters are cast for every forward pass, as FSDP2 casts them."""
    model = copy.deepcopy(model)
    optimizer, losses = make(model.parameters()), []
    for batch in data:
        optimizer.zero_grad()
        cast = {n: p.to(BF16) for n, p in model.named_parameters()}
        value = loss(torch.func.functional_call(model, cast, (), {k: v for k, v in batch.items() if k != "y"}), batch)
        value.backward()
        optimizer.step()
        losses.append(value.item())
    return {n: p.detach() for n, p in model.named_parameters()}, losses


# Activations are rounded to 8 bits: half a unit is 2**-9 of a value. Several such roundings meet in a gradient.
# Processors with bfloat16 instructions choose kernels by shape: one device, too, rounds a few elements otherwise.
ROUNDED, ROUNDED_GRADIENT = 2**-9, 2**-5


@pytest.mark.slow_rows("llama-2e-06-0.0001")
@pytest.mark.parametrize(
    ("kind", "of_loss", "of_parameter"),
    [("llama", 2e-6, 1e-4), pytest.param("gpt2", ROUNDED, ROUNDED_GRADIENT, marks=pytest.mark.slow)],
)
def test_equals_eager_and_trains_on_a_mesh(kind: str, of_loss: float, of_parameter: float) -> None:
    """The loss falls; one device is eager PyTorch (to a few roundings of a gradient to bfloat16 for llama; gpt2's sum
    of matmul and bias, one op in eager PyTorch, rounds twice); a mesh is, to the rounding of bfloat16 activations.

    Without dropout, for eager PyTorch draws other numbers. gpt2 ties its embedding to its head: one cast, one sum.
    """
    model, batch, loss = hugging_face(kind, batch=4, heads=4)
    model.eval()
    data = [batch] * 4
    expected, losses = eager(model, data, loss, sgd)
    single, found = train(model, data, "", loss, sgd, precision=Precision(param_dtype=BF16))
    torch.testing.assert_close(found, losses, rtol=of_loss, atol=0)
    assert_tensors(single.parameters(), expected, of_parameter)
    assert found[3] < found[0]
    mesh, on_mesh = train(
        model,
        data,
        "fsdp=2,tp=2",
        loss,
        sgd,
        precision=Precision(param_dtype=BF16),
        run=RunOptions(keep_gradients=True),
    )
    torch.testing.assert_close(on_mesh, losses, rtol=ROUNDED, atol=0)
    assert_tensors(mesh.parameters(), expected, ROUNDED_GRADIENT)
    assert {g.dtype for g in mesh.gradients().values()} == {torch.float32}
    assert {p.dtype for p in (mesh.parameters() | mesh.optimizer_state()).values()} == {torch.float32}


def test_bfloat16_is_gathered_and_float32_reduced() -> None:
    model, batch, loss = hugging_face("llama", batch=4, heads=4)
    for options in ({}, {"passes": "recompute=full"}):
        step, _ = train(model, [batch], "fsdp=2", loss, ADAM, precision=Precision(param_dtype=BF16), **options)
        rows = step.explain()
        gathered = [row for row in rows if "all_gather" in row.kind]
        reduced = [row for row in rows if "reduce_scatter" in row.kind]
        num = len(list(model.parameters()))
        # Every parameter in forward; in backward all but the embedding, of which no gradient needs the value.
        assert [r.phase for r in gathered].count("forward") == num
        assert [r.phase for r in gathered].count("backward") == num - 1
        assert all(row.value.startswith("bfloat16") for row in gathered)
        assert len(reduced) == num
        assert [row.value for row in reduced if not row.value.startswith("float32")] == []


def test_a_gradient_is_cast_and_reduced_as_soon_as_it_is_there() -> None:
    """Not at the end of the backward pass, where autograd would cast what was cast first."""
    model, batch, loss = hugging_face("llama", batch=4, heads=4)
    step = capture(model, loss, batch, None, CaptureOptions(precision=Precision(param_dtype=BF16)))
    casts = [n for n in step.graph.nodes if n.target is ROUND_PARTS]
    assert len(casts) == len(list(model.parameters()))
    assert all(n.prev is n.all_input_nodes[0] for n in casts)
    assert {n for (kind, _), n in zip(step.outputs, step.output_values, strict=True) if kind == "grad"} == set(casts)
    assert {str(spec_of(n).dtype) for n in casts} == {"torch.float32"}
    modules = {origin_of(n).module for n in casts}
    assert {"model.embed_tokens", "model.layers.1.mlp.up_proj", "model.norm", "lm_head"} <= modules


class Mixed(nn.Module):
    """A float32 weight, a float64 one, and a buffer, which stays what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Linear(4, 4)
        self.wide = nn.Parameter(torch.linspace(-1, 1, 4, dtype=torch.float64))
        self.register_buffer("shift", torch.full((4,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        print(x.dtype, self.narrow.weight.dtype, self.wide.dtype, self.shift.dtype)
        return self.narrow(x.to(self.narrow.weight.dtype)) * self.wide + self.shift


def test_parameters_are_cast_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    model = Mixed()
    data = batches(2, (4, 4), (4, 4))
    step, found = train(
        model, data, "fsdp=2", precision=Precision(param_dtype=BF16), run=RunOptions(keep_gradients=True)
    )
    assert "torch.float32 torch.bfloat16 torch.bfloat16 torch.float32" in capsys.readouterr().out
    assert step.gradients()["wide"].dtype == step.parameters()["wide"].dtype == torch.float64
    expected, losses = eager(model, data, mse, sgd)
    torch.testing.assert_close(found, losses, rtol=ROUNDED, atol=0)
    assert_tensors(step.parameters(), expected, ROUNDED_GRADIENT)


def test_no_cast_where_nothing_would_change() -> None:
    model, data = nn.Linear(4, 4), {"input": torch.randn(2, 4), "y": torch.randn(2, 4)}
    plain = capture(model, mse, data, None, CaptureOptions())
    assert (
        capture(model, mse, data, None, CaptureOptions(precision=Precision(param_dtype=torch.float32))).text()
        == plain.text()
    )
    other = capture(model.to(BF16), mse, data, None, CaptureOptions(precision=Precision(param_dtype=torch.float32)))
    assert [op_name(n.target) for n in other.graph.nodes if "copy" in n.name] == ["aten._to_copy"] * 2


def test_a_dtype_of_integers_is_refused() -> None:
    with pytest.raises(PlanError, match="param_dtype is not a floating-point dtype") as error:
        CaptureOptions(precision=Precision(param_dtype=torch.int8))
    assert error.value.got == "torch.int8"


def test_an_eager_run_casts_alike_but_leaves_float64() -> None:
    def run(model: nn.Module, dtype: torch.dtype | None, x: Tensor) -> Tensor:
        return Substituted.run(model, cast_for_eager(model, dtype), lambda m: m(x))

    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    assert run(model, BF16, x.to(BF16)).equal(copy.deepcopy(model).to(BF16)(x.to(BF16)))
    wide = copy.deepcopy(model).double()
    assert run(wide, BF16, x.double()).equal(wide(x.double()))
    assert run(model, None, x).equal(model(x))


FACTORY = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x.to(self.up.weight.dtype))))

def make():
    return Net(), {"x": torch.ones(4, 8)}, lambda out, batch: (out.float() ** 2).mean()
"""


@pytest.mark.slow
def test_the_command_line_takes_it(tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(FACTORY)
    model = f"{tmp_path}/net.py:make"

    def result(*arguments: str) -> Any:
        return CliRunner().invoke(app, [*arguments])

    def losses(*options: str) -> list[float]:
        lines = result("run", model, "--steps", "3", "--json", *options).stdout.splitlines()
        found: list[float] = json.loads(lines[-1])["losses"]
        return found

    plain, cast = losses(), losses("--param-dtype", "bfloat16")
    assert plain != cast
    assert cast == pytest.approx(plain, rel=0.05)
    checked = result(
        "check", model, "--mesh", "fsdp=2", "--param-dtype", "bfloat16", "--steps", "2", "--optimizer", "sgd"
    )
    assert checked.exit_code == 0
    shown = result("plan", model, "--mesh", "fsdp=2", "--param-dtype", "bfloat16", "--json")
    moves = json.loads(shown.stdout.splitlines()[-1])["moves"]
    assert {m["value"].partition("[")[0] for m in moves if m["kind"] == "all_gather"} == {"bfloat16"}
    wrong = result("run", model, "--dtype", "float64", "--param-dtype", "bfloat16")
    assert wrong.exit_code == 2
    assert "contradict each other" in wrong.output


class Normed(nn.Module):
    """Its norm runs in float32."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(4, 4), norm, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x.bfloat16()).float()).bfloat16()).float()


@pytest.mark.parametrize("norm", [lambda: nn.LayerNorm(4), lambda: nn.Linear(4, 4)])
def test_modules_that_keep_their_dtype(norm: Any) -> None:
    torch.manual_seed(0)
    model, data = Normed(norm()), batches(3, (4, 4), (4, 4))
    with pytest.raises(CaptureError, match="different dtypes") as error:
        train(model, data, precision=Precision(param_dtype=BF16))
    assert error.value.where.endswith("module 'norm'")
    assert '"norm": None' in error.value.hint
    _, losses = train(model, data, "dp=2", precision=Precision(param_dtype={"*": BF16, "norm": None}))
    cast = copy.deepcopy(model)
    assert {n for n, p in cast_for_eager(cast, {"*": BF16, "nor*": None}).items() if p.dtype == BF16} == {
        f"{module}.{kind}" for module in ("up", "down") for kind in ("weight", "bias")
    }
    optimizer, expected = sgd(cast.parameters()), []
    for batch in data:
        params = cast_for_eager(cast, {"*": BF16, "norm": None})
        value = mse(torch.func.functional_call(cast, params, (batch["x"],)), batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(value.item())
    torch.testing.assert_close(losses, expected, rtol=2 * ROUNDED, atol=0)
    with pytest.raises(PlanError, match="names no parameter"):
        train(model, data, precision=Precision(param_dtype={"*": BF16, "norms": None}))


@pytest.mark.parametrize(
    "first", [lambda: nn.Conv1d(4, 4, 1), lambda: nn.Conv1d(4, 4, 1, bias=False), lambda: nn.Linear(4, 4)]
)
def test_a_batch_of_another_dtype(first: Any) -> None:
    model = nn.Sequential(first(), nn.LayerNorm(4), nn.Linear(4, 4))
    data = [{"input": batch["x"], "y": batch["y"]} for batch in batches(2, (4, 4, 4), (4, 4, 4))]
    with pytest.raises(CaptureError, match="different dtypes") as error:
        train(model, data, precision=Precision(param_dtype=BF16))
    assert "all of the batch before the step" in error.value.hint
    in_16_bits = [{name: x.bfloat16() for name, x in batch.items()} for batch in data]
    train(model, in_16_bits, precision=Precision(param_dtype=BF16))
