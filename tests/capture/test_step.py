"""The whole step: its text, what optimizers, clipping, accumulation and autocast make of it, and odd models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.training import (
    assert_equals_eager,
    assert_tensors,
    assert_trained_alike,
    batches,
    mse,
    sgd,
    train,
    train_eagerly,
)
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import meshweave as mw
from meshweave.capture.batch import Batch, call_model
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, capture
from meshweave.capture.trace import Provenance
from meshweave.errors import CaptureError, PlanError
from meshweave.ir.collectives import STARTS
from meshweave.ir.graph import op_name, origin_of, spec_of


class MLP(nn.Module):
    def __init__(self, width: int = 4, hidden: int = 6) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


def captured_text(model: nn.Module, example: Any, make: Callable[..., Any], **options: Any) -> str:
    spec = read_optimizer(make(model.parameters()), model)
    return capture(model, mse, example, spec, CaptureOptions(**options)).text()


GOLDEN = """\
weight: float32[2,3] = input
bias: float32[2] = input
batch_input: float32[4,3] = input
batch_y: float32[4,2] = input
scalar_draw: int64[] = input
scalar_update0_size: float64[] = input
permute_default: float32[3,2] = aten.permute(weight, [1, 0])
mm_default: float32[4,2] = aten.mm(batch_input, permute_default)
add_tensor: float32[4,2] = aten.add.Tensor(mm_default, bias)
sub_tensor: float32[4,2] = aten.sub.Tensor(add_tensor, batch_y)
pow_tensor_scalar: float32[4,2] = aten.pow.Tensor_Scalar(sub_tensor, 2)
sum_dim_int_list: float32[] = aten.sum.dim_IntList(pow_tensor_scalar, [0, 1])
div_tensor: float32[] = aten.div.Tensor(sum_dim_int_list, 8)
full_default: float32[] = aten.full([], 1, dtype=float32)
expand_default: float32[4,2] = aten.expand(full_default, [4, 2])
div_scalar: float32[4,2] = aten.div.Scalar(expand_default, 8)
pow_tensor_scalar_1: float32[4,2] = aten.pow.Tensor_Scalar(sub_tensor, 1.0)
mul_scalar: float32[4,2] = aten.mul.Scalar(pow_tensor_scalar_1, 2.0)
mul_tensor: float32[4,2] = aten.mul.Tensor(div_scalar, mul_scalar)
permute_default_1: float32[2,4] = aten.permute(mul_tensor, [1, 0])
mm_default_1: float32[2,3] = aten.mm(permute_default_1, batch_input)
sum_dim_int_list_1: float32[1,2] = aten.sum.dim_IntList(mul_tensor, [0], True)
view_default: float32[2] = aten.view(sum_dim_int_list_1, [2])
mul_tensor_1: float32[2,3] = aten.mul.Tensor(mm_default_1, scalar_update0_size)
add_tensor_1: float32[2,3] = aten.add.Tensor(weight, mul_tensor_1)
mul_tensor_2: float32[2] = aten.mul.Tensor(view_default, scalar_update0_size)
add_tensor_2: float32[2] = aten.add.Tensor(bias, mul_tensor_2)
return [div_tensor, mm_default_1, view_default, add_tensor_1, add_tensor_2]
"""
PLAIN_SGD = partial(torch.optim.SGD, lr=0.1)


def test_the_text_of_a_step() -> None:
    example = {"input": torch.randn(4, 3), "y": torch.randn(4, 2)}
    model = nn.Linear(3, 2)
    assert captured_text(model, example, PLAIN_SGD) == GOLDEN
    step = capture(model, mse, example, read_optimizer(PLAIN_SGD(model.parameters()), model), CaptureOptions())
    assert step.outputs == (("loss", ""), ("grad", "weight"), ("grad", "bias"), ("param", "weight"), ("param", "bias"))
    assert [(i.kind, i.name) for i in step.inputs] == [
        ("param", "weight"),
        ("param", "bias"),
        ("batch", "input"),
        ("batch", "y"),
        ("scalar", "draw"),
        ("scalar", "update0.size"),
    ]


@pytest.mark.parametrize("make", [sgd, partial(torch.optim.AdamW, lr=0.1)])
def test_real_meta_and_fake_models_give_the_same_text(make: Callable[..., Any]) -> None:
    real, x, y = MLP(), torch.randn(3, 4), torch.randn(3, 4)
    expected = captured_text(real, {"x": x, "y": y}, make)
    with torch.device("meta"):
        meta, example = MLP(), {"x": torch.empty(3, 4), "y": torch.empty(3, 4)}
    assert captured_text(meta, example, make) == expected
    with FakeTensorMode():
        fake, example = MLP(), {"x": torch.empty(3, 4), "y": torch.empty(3, 4)}
    assert captured_text(fake, example, make) == expected


def test_without_an_optimizer_the_step_is_loss_and_gradients() -> None:
    model, example = MLP(), batches(1, (3, 4), (3, 4))[0]
    step = capture(model, mse, example, None, CaptureOptions())
    names = [n for n, _ in model.named_parameters()]
    assert step.outputs == (("loss", ""), *(("grad", n) for n in names))
    assert [i.kind for i in step.inputs] == ["param"] * 4 + ["batch"] * 2 + ["scalar"]


def test_capture_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    before = copy.deepcopy(model.state_dict())
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    captured_text(model, {"input": torch.randn(3, 4), "y": torch.randn(3, 4)}, sgd)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert all(p.grad is None for p in model.parameters())


# optimizers, schedulers, clipping


@pytest.mark.parametrize(
    "make",
    [
        partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(torch.optim.Adam, lr=0.01, weight_decay=0.1, amsgrad=True),
        partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    ],
)
@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_optimizers_equal_eager(make: Callable[..., Any], mesh: str) -> None:
    assert_equals_eager(MLP(), batches(4, (4, 4), (4, 4)), mesh, make=make)


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
@pytest.mark.parametrize("largest", [0.05, 1e6])
def test_clipping_equals_that_of_torch(mesh: str, largest: float) -> None:
    norms: list[float] = []

    def clip(model: nn.Module) -> None:
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), largest)))

    model, data = MLP(), batches(3, (4, 4), (4, 4))
    eager, expected = train_eagerly(model, data, after_backward=clip)
    step = mw.compile(
        model, loss=mse, example=data[0], optimizer=sgd(model.parameters()), mesh=mesh, clip_grad_norm=largest
    )
    found = []
    for i, batch in enumerate(data):
        found.append(step(batch))
        assert step.metrics["grad_norm"] == pytest.approx(norms[i], rel=1e-5)
    assert_trained_alike(step, found, eager, expected)


WIDE = torch.float64
ADAMW = partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1, amsgrad=True)


@pytest.mark.parametrize("make", [partial(torch.optim.SGD, lr=0.03, momentum=0.9, dampening=0.3), ADAMW])
@pytest.mark.parametrize("mesh", ["", "fsdp=2,tp=2"])
def test_float64_trains_as_eager_to_its_own_rounding(make: Callable[..., Any], mesh: str) -> None:
    model = MLP().double()
    data = [{k: v.to(WIDE) for k, v in b.items()} for b in batches(4, (4, 4), (4, 4))]

    def clip(model: nn.Module) -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    eager, expected = train_eagerly(model, data, make=make, after_backward=clip)
    step, found = train(model, data, mesh, make=make, clip_grad_norm=0.05)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in eager.named_parameters()}, 1e-12)


@pytest.mark.parametrize("mesh", ["", "dp=2"])
@pytest.mark.parametrize("scale", [1e25, 1e-25])
def test_the_norm_of_huge_and_tiny_float32_gradients_is_that_of_float64(mesh: str, scale: float) -> None:
    """torch.nn.utils.clip_grad_norm_ itself gives inf and 0 in float32; in float64 it is the judge."""
    (batch,) = batches(1, (4, 4), (4, 4))
    wide = copy.deepcopy(model := MLP()).double()
    (mse(wide(batch["x"].double()), batch) * scale).backward()
    expected = nn.utils.clip_grad_norm_(wide.parameters(), 0.5 * scale).item()
    step = mw.compile(
        model, loss=lambda out, b: mse(out, b) * scale, example=batch, mesh=mesh, clip_grad_norm=0.5 * scale,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1 / scale),
    )  # fmt: skip
    step(batch)
    assert step.metrics["grad_norm"] == pytest.approx(expected, rel=1e-6)
    moved = {n: p.detach() - 0.1 / scale * p.grad for n, p in wide.named_parameters()}
    assert_tensors(step.parameters(), {n: p.float() for n, p in moved.items()}, 1e-6)


def test_the_norm_of_bfloat16_gradients_is_rounded_as_by_torch() -> None:
    torch.manual_seed(0)  # where a bias added to a rounded product makes no other gradient: docs/guarantees.md
    model = MLP().to(torch.bfloat16)
    data = [{k: v.to(torch.bfloat16) for k, v in b.items()} for b in batches(1, (4, 4), (4, 4))]
    norms: list[float] = []
    train_eagerly(
        model, data, after_backward=lambda m: norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.5)))
    )
    step, _ = train(model, data, clip_grad_norm=0.5)
    assert step.metrics["grad_norm"] == norms[0]


def test_the_norm_takes_one_collective() -> None:
    step, _ = train(MLP(), batches(1, (4, 4), (4, 4)), "fsdp=2,tp=2", clip_grad_norm=0.5)
    starts = [n for n in step.program.rank.graph.nodes if n.target in STARTS]
    assert [origin_of(n).phase for n in starts if origin_of(n).phase not in ("forward", "backward")] == ["reduce"]


def test_a_scheduler_of_the_optimizer_is_followed() -> None:
    model, data = MLP(), batches(4, (4, 4), (4, 4))
    factors = [1.0, 0.5, 2.0, 0.0, 1.0]
    twin = copy.deepcopy(model)
    losses: dict[str, list[float]] = {"eager": [], "ours": []}
    ours, theirs = sgd(model.parameters()), sgd(twin.parameters())
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, factors.__getitem__) for o in (ours, theirs)]
    step = mw.compile(model, loss=mse, example=data[0], optimizer=ours, mesh="dp=2")
    for batch in data:
        losses["ours"].append(float(step(batch)))
        theirs.zero_grad()
        value = mse(twin(batch["x"]), batch)
        value.backward()
        theirs.step()
        losses["eager"].append(value.item())
        for schedule in schedules:
            schedule.step()
    assert_trained_alike(step, losses["ours"], twin, losses["eager"])


def test_param_groups_have_their_own_options_and_rates() -> None:
    def make(params: Any) -> torch.optim.Optimizer:
        first, *rest = list(params)
        groups = [{"params": [first], "lr": 0.2, "momentum": 0.5}, {"params": rest, "weight_decay": 0.1}]
        return torch.optim.SGD(groups, lr=0.05)

    step = assert_equals_eager(MLP(), batches(3, (4, 4), (4, 4)), "dp=2", make=make)
    assert [n for kind, n in step.program.captured.outputs if kind == "state"] == ["momentum_buffer/up.weight"]
    spec = step.program.optimizer
    assert spec is not None
    groups = {name: spec.kinds[k].group for name, k in spec.kind_of.items()}
    assert groups == {n: int(n != "up.weight") for n, _ in MLP().named_parameters()}


def test_a_parameter_outside_the_optimizer_has_a_gradient_and_stays() -> None:
    model, data = MLP(), batches(2, (4, 4), (4, 4))
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    step = mw.compile(
        model,
        loss=mse,
        example=data[0],
        optimizer=sgd(model.down.parameters()),
        mesh="fsdp=2",
        run=mw.RunOptions(keep_gradients=True),
    )
    for batch in data:
        step(batch)
    after = step.parameters()
    assert all(torch.equal(after[n], before[n]) == n.startswith("up.") for n in before)
    assert set(step.gradients()) == set(before)
    assert float(step.gradients()["up.weight"].abs().max()) > 0


# accumulation


@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2"])
def test_four_microbatches_equal_one_batch(mesh: str) -> None:
    model, data = MLP(), batches(3, (16, 4), (16, 4))
    eager, expected = train_eagerly(model, data)
    step, losses = train(model, data, mesh, accumulate=4)
    assert_trained_alike(step, losses, eager, expected)


def test_accumulation_with_clipping_clips_the_whole_gradient() -> None:
    model, data = MLP(), batches(2, (8, 4), (8, 4))
    eager, expected = train_eagerly(
        model, data, after_backward=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.05)
    )
    step, losses = train(model, data, "dp=2", accumulate=2, clip_grad_norm=0.05)
    assert_trained_alike(step, losses, eager, expected)


def test_batch_norm_sees_each_microbatch_in_turn() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    data = [{"input": b["x"], "y": b["y"]} for b in batches(2, (8, 4), (8, 4))]
    twin = copy.deepcopy(model)
    step, _ = train(model, data, "dp=2", accumulate=2, make=partial(torch.optim.SGD, lr=0.0))
    for batch in data:
        for half in batch["input"].chunk(2):
            twin(half)
    assert_tensors(step.buffers(), dict(twin.named_buffers()))
    assert int(step.buffers()["1.num_batches_tracked"]) == 4


def test_a_batch_that_does_not_divide_into_microbatches_is_an_error() -> None:
    with pytest.raises(PlanError, match="does not divide into microbatches") as error:
        train(MLP(), batches(1, (6, 4), (6, 4)), accumulate=4)
    assert error.value.got == "batch size 6, accumulate=4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accumulate": 0}, "invalid number of microbatches"),
        ({"clip_grad_norm": 0.0}, "invalid norm"),
        ({"clip_grad_norm": float("nan")}, "invalid norm"),
    ],
)
def test_options_that_mean_nothing_are_errors(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        CaptureOptions(**options)


# autocast


@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2"])
def test_autocast_is_close_to_eager_autocast(mesh: str) -> None:
    model, data = MLP(16, 32), batches(3, (8, 16), (8, 16))

    def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return mse(out.float(), batch)

    twin = copy.deepcopy(model)
    optimizer, expected = sgd(twin.parameters()), []
    for batch in data:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(twin(batch["x"]), batch)
        value.backward()
        optimizer.step()
        expected.append(value.item())
    step, losses = train(model, data, mesh, loss=loss, precision=torch.bfloat16)
    torch.testing.assert_close(losses, expected, rtol=2e-3, atol=0)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in twin.named_parameters()}, 4e-3)
    nodes = step.program.captured.graph.nodes
    products = [spec_of(n).dtype for n in nodes if op_name(n.target) == "aten.mm"]
    assert len(products) == 5
    assert set(products) == {torch.bfloat16}
    assert {p.dtype for p in step.parameters().values()} == {torch.float32}


# odd models


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(torch.tanh(self.embed(tokens)))


def _next_token(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), batch["labels"].flatten())


@pytest.mark.parametrize("mesh", ["", "dp=2", "fsdp=2", "tp=2"])
def test_tied_weights_and_integer_inputs(mesh: str) -> None:
    data = [
        {"tokens": torch.arange(8).view(2, 4) + i, "labels": (torch.arange(8).view(2, 4) * 3 + i) % 11}
        for i in range(3)
    ]
    data[1]["labels"][0, 1] = -100
    step = assert_equals_eager(Tied(), data, mesh, loss=_next_token)
    assert list(step.parameters()) == ["embed.weight"]


@pytest.mark.parametrize("make", [sgd, partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)])
@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_frozen_parameters_stay_and_have_no_gradient(make: Callable[..., Any], mesh: str) -> None:
    model = MLP()
    model.up.weight.requires_grad_(False)
    step = assert_equals_eager(model, batches(3, (4, 4), (4, 4)), mesh, make=make)
    assert torch.equal(step.parameters()["up.weight"], model.up.weight)
    assert ("grad", "up.weight") not in step.program.captured.outputs
    assert not any("up.weight" in i.name for i in step.program.captured.inputs if i.kind == "state")


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_an_unused_parameter_stays_as_in_eager_even_under_weight_decay(mesh: str) -> None:
    model = MLP()
    model.idle = nn.Linear(4, 4)
    data = batches(3, (4, 4), (4, 4))
    step = assert_equals_eager(model, data, mesh, make=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5))
    assert torch.equal(step.parameters()["idle.weight"], model.idle.weight)
    assert ("grad", "idle.weight") not in step.program.captured.outputs


def test_a_parameter_used_twice_gets_both_gradients() -> None:
    class Twice(MLP):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(super().forward(x))

    assert_equals_eager(Twice(), batches(3, (4, 4), (4, 4)), "fsdp=2")


# batches


def test_a_tuple_batch_is_called_by_position_and_its_loss_sees_it_whole() -> None:
    data = [(b["x"], b["y"]) for b in batches(3, (4, 4), (4, 4))]
    step = assert_equals_eager(MLP(), data, "dp=2", loss=lambda out, batch: ((out - batch[1]) ** 2).mean())
    assert [i.name for i in step.program.captured.inputs if i.kind == "batch"] == ["0", "1"]


def test_a_tensor_alone_is_a_batch() -> None:
    data = [b["x"] for b in batches(2, (4, 4), (4, 4))]
    step = assert_equals_eager(MLP(), data, "dp=2", loss=lambda out, batch: ((out - batch) ** 2).mean())
    assert [i.name for i in step.program.captured.inputs if i.kind == "batch"] == ["batch"]


def test_a_nested_batch_is_put_together_again_with_what_is_no_tensor() -> None:
    example = {"a": torch.ones(2), "b": [torch.zeros(3), "text", {"c": torch.ones(()), "d": 4}]}
    batch = Batch.of(example)
    assert batch.names == ("a", "b.0", "b.2.c")
    assert batch.rebuild(["x", "y", "z"]) == {"a": "x", "b": ["y", "text", {"c": "z", "d": 4}]}


class Records(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args, kwargs


class Named(nn.Module):
    def forward(self, a: Any, b: Any, c: Any = 3, *, d: Any = 4) -> Any:
        return a, b, c, d


@pytest.mark.parametrize(
    ("model", "batch", "expected"),
    [
        (Records(), {"a": 1, "b": 2}, ((), {"a": 1, "b": 2})),
        (Records(), (1, 2), ((1,), {})),
        (Named(), {"a": 1, "b": 2, "other": 5}, (1, 2, 3, 4)),
        (Named(), {"a": 1, "b": 2, "d": 5}, (1, 2, 3, 5)),
        (Named(), (1, 2, 9), (1, 2, 3, 4)),
    ],
)
def test_what_of_a_batch_a_model_is_called_with(model: nn.Module, batch: Any, expected: Any) -> None:
    assert call_model(model, batch) == expected


def test_forward_says_how_the_model_is_called() -> None:
    class Asks(MLP):
        def forward(self, x: Tensor, twice: bool = False) -> Tensor:
            return super().forward(x) * (2 if twice else 1)

    model, data = Asks(), batches(1, (4, 4), (4, 4))
    _, plain = train(model, data)
    _, twice = train(model, data, forward=lambda m, batch: m(batch["x"], twice=True))
    assert plain[0] == pytest.approx(mse(model(data[0]["x"]), data[0]).item(), rel=1e-6)
    assert twice[0] == pytest.approx(mse(model(data[0]["x"], True), data[0]).item(), rel=1e-6)


def test_a_model_called_with_too_little_is_an_error() -> None:
    with pytest.raises(CaptureError, match="the training step cannot be captured") as error:
        capture(nn.Bilinear(2, 2, 2), mse, {"input1": torch.ones(2, 2)}, None, CaptureOptions())
    assert "input2" in error.value.got


@pytest.mark.parametrize("way", ["of the model", "of a list", "of the optimizer"])
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=3", "tp=2"])
def test_a_loss_that_reads_parameters_is_that_of_eager(way: str, mesh: str) -> None:
    """However it reaches them, it sees the parameters of the step at hand, and its gradient counts."""
    torch.manual_seed(0)
    models = [MLP(), MLP()]
    models[1].load_state_dict(models[0].state_dict())
    results = []
    for model, is_compiled in zip(models, (False, True), strict=True):
        optimizer = sgd(model.parameters())
        held = list(model.parameters())

        def penalty(model: nn.Module = model, held: Any = held, optimizer: Any = optimizer) -> Tensor:
            of_the_optimizer = optimizer.param_groups[0]["params"]
            read = {"of the model": model.parameters(), "of a list": held, "of the optimizer": of_the_optimizer}[way]
            return sum((p.square().sum() for p in read), torch.zeros(()))

        def loss(out: Tensor, batch: Any, penalty: Any = penalty) -> Tensor:
            return mse(out, batch) + 0.3 * penalty()

        data = batches(3, (5, 4), (5, 4))
        if is_compiled:
            step = mw.compile(model, loss=loss, example=data[0], optimizer=optimizer, mesh=mesh)
            results.append(([float(step(batch)) for batch in data], step.parameters()))
            continue
        losses = []
        for batch in data:
            optimizer.zero_grad()
            value = loss(model(batch["x"]), batch)
            value.backward()
            optimizer.step()
            losses.append(value.item())
        results.append((losses, {n: p.detach() for n, p in model.named_parameters()}))
    (expected, wanted), (losses, found) = results
    torch.testing.assert_close(losses, expected, rtol=2e-6, atol=1e-6)
    assert_tensors(found, wanted)


def test_no_op_of_the_update_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The update is known as a graph: tracing it again for each parameter took a fifth of a capture."""
    phases: list[str] = []
    run = Provenance.run

    def counted(self: Provenance, *call: Any) -> Any:
        phases.append(self.phase)
        return run(self, *call)

    monkeypatch.setattr(Provenance, "run", counted)
    model, example = MLP(), {"x": torch.randn(2, 4), "y": torch.randn(2, 4)}
    spec = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    graph = capture(model, mse, example, spec, CaptureOptions()).graph
    assert "backward" in phases
    assert "update" not in phases
    assert sum(origin_of(n).phase == "update" and n.op == "call_function" for n in graph.nodes) > 4 * 8
