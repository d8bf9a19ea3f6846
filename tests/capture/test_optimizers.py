"""The update phase as data, against torch.optim."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from meshweave.capture.optimizers import (
    KINDS,
    AdamHyper,
    SGDHyper,
    current_lrs,
    initial_state,
    read_optimizer,
    update,
)
from meshweave.errors import PlanError

Make = Callable[..., torch.optim.Optimizer]

CASES: list[tuple[Make, dict[str, Any]]] = [
    (torch.optim.SGD, {}),
    (torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01}),
    *(
        (kind, {"weight_decay": decay, "amsgrad": ams, "maximize": maximize})
        for kind, decay, ams, maximize in itertools.product(
            (torch.optim.Adam, torch.optim.AdamW), (0.0, 0.1), (False, True), (False, True)
        )
    ),
    (torch.optim.Adam, {"betas": (0.3, 0.95), "eps": 1e-3}),
    (torch.optim.Adam, {"betas": (0.0, 0.0), "eps": 1e-3}),
    (torch.optim.Adam, {"decoupled_weight_decay": True, "weight_decay": 0.2}),
]


def case_id(value: object) -> str:
    return value.__name__ if isinstance(value, type) else str(value)


class Toy(nn.Module):
    """One parameter of 2 dims, one of 1, one scalar; every element starts different."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(3)
        self.w, self.b, self.s = (
            nn.Parameter(torch.randn(shape, generator=gen).to(dtype)) for shape in ((3, 5), (7,), ())
        )


def set_grads(model: nn.Module, step: int) -> None:
    gen = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)


def compare(optimizer_of: Make, options: dict[str, Any], dtype: torch.dtype, num_steps: int = 10) -> float:
    """Largest relative difference between torch and `update` over parameters and states, after each step."""
    model = Toy(dtype)
    optimizer = optimizer_of(model.parameters(), lr=0.05, foreach=False, **options)
    spec = read_optimizer(optimizer, model)
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    states = {n: {slot: torch.zeros_like(p) for slot in spec.slots(n)} for n, p in params.items()}
    worst = 0.0
    for step in range(1, num_steps + 1):
        optimizer.param_groups[0]["lr"] = 2.0 ** -(step % 4 + 2) if dtype is torch.bfloat16 else 0.05 / step
        set_grads(model, step)
        optimizer.step()
        lr, number = (torch.tensor(x, dtype=torch.float64) for x in (current_lrs(optimizer)[0], step))
        for name, p in model.named_parameters():
            before = {name: params[name].clone(), **{s: t.clone() for s, t in states[name].items()}}
            new, state = update(spec.kind, spec.hyper(name), params[name], p.grad, states[name], lr, number)
            assert torch.equal(params[name], before[name]), "the parameter was changed in place"
            assert all(torch.equal(t, before[s]) for s, t in states[name].items()), "the state was changed in place"
            assert tuple(state) == spec.slots(name)
            pairs = [(new, p.detach()), *((state[s], optimizer.state[p][s]) for s in state)]
            worst = max(worst, *(_difference(a, b) for a, b in pairs))
            params[name], states[name] = new, dict(state)
    return worst


def _difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    scale = expected.double().abs().max().clamp(min=0.5 if got.dtype is torch.bfloat16 else 0.0)
    return float((got.double() - expected.double()).abs().max() / scale)


@pytest.mark.parametrize(("optimizer_of", "options"), CASES, ids=case_id)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.float64, 1e-13)], ids=str)
def test_update_equals_torch(optimizer_of: Make, options: dict[str, Any], dtype: torch.dtype, bound: float) -> None:
    assert compare(optimizer_of, options, dtype) <= bound


@pytest.mark.parametrize(("optimizer_of", "options"), CASES, ids=case_id)
def test_update_of_bfloat16_rounds_where_torch_does(optimizer_of: Make, options: dict[str, Any]) -> None:
    # Not to the bit: for `add` with alpha, torch's CPU kernels round alpha, and in their scalar tail the product too,
    # to bfloat16; the CUDA kernels do as we do. 2 ** -6 is two units in the last place of the largest element.
    exact = {k: float(torch.tensor(v).bfloat16()) if isinstance(v, float) else v for k, v in options.items()}
    assert compare(optimizer_of, exact, torch.bfloat16) <= 2**-6


def test_adam_bias_correction_is_accurate_at_the_first_step_and_late() -> None:
    hyper = AdamHyper()
    for step in (1.0, 2.0, 1e3, 1e5):
        grad = torch.tensor([2.0])
        state = {"exp_avg": torch.tensor([1.0]), "exp_avg_sq": torch.tensor([1.0])}
        new, _ = update("Adam", hyper, torch.zeros(1), grad, state, torch.tensor(1.0), torch.tensor(step))
        mean, square = 0.9 + 0.1 * 2, 0.999 + 0.001 * 4
        expected = -(mean / (1 - 0.9**step)) / ((square / (1 - 0.999**step)) ** 0.5 + 1e-8)
        assert new.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("optimizer_of", "options"), CASES[:8], ids=case_id)
def test_update_traces_under_fake_tensors_into_pointwise_ops(optimizer_of: Make, options: dict[str, Any]) -> None:
    model = Toy(torch.bfloat16)
    spec = read_optimizer(optimizer_of(model.parameters(), lr=0.1, **options), model)
    slots = spec.slots("w")

    def step(p: Any, g: Any, lr: Any, n: Any, *state: Any) -> Any:
        new, kept = update(spec.kind, spec.hyper("w"), p, g, dict(zip(slots, state, strict=True)), lr, n)
        return new, *kept.values()

    with FakeTensorMode():
        p, scalar = torch.empty(3, 5, dtype=torch.bfloat16), torch.empty(())
        graph = make_fx(step)(p, p, scalar, scalar, *(p for _ in slots)).graph
    values = [n.meta["val"] for n in graph.nodes if n.op == "call_function"]
    assert {tuple(v.shape) for v in values} <= {(3, 5), ()}
    named = {str(n.target).split(".")[1] for n in graph.nodes if n.op == "call_function"}
    assert named <= {
        "neg", "add", "sub", "rsub", "mul", "div", "sqrt", "maximum", "expm1", "eq", "where", "_to_copy",
    }  # fmt: skip
    outputs = next(n for n in graph.nodes if n.op == "output").args[0]
    assert [(n.meta["val"].dtype, tuple(n.meta["val"].shape)) for n in outputs] == [
        (torch.bfloat16, (3, 5)) for _ in outputs
    ]
    assert len(outputs) == 1 + len(slots)


def test_groups_keep_their_own_options_and_learning_rates() -> None:
    model = Toy(torch.float32)
    optimizer = torch.optim.AdamW(
        [{"params": [model.w], "weight_decay": 0.5}, {"params": [model.b, model.s], "lr": 0.2}], lr=0.1
    )
    spec = read_optimizer(optimizer, {id(p): n for n, p in model.named_parameters()})
    assert spec.kind == "Adam"
    assert dict(spec.group_of) == {"w": 0, "b": 1, "s": 1}
    assert spec.hyper("w") == AdamHyper(weight_decay=0.5, decoupled_weight_decay=True)
    assert spec.hyper("b") == AdamHyper(weight_decay=0.01, decoupled_weight_decay=True)
    assert current_lrs(optimizer) == [0.1, 0.2]
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.5)
    assert current_lrs(optimizer) == [0.05, 0.1]
    assert read_optimizer(optimizer, model) == spec


def test_implementation_switches_and_tensor_options_are_read_as_plain_numbers() -> None:
    model = Toy(torch.float32)
    optimizer = torch.optim.Adam(
        model.parameters(), lr=torch.tensor(0.25), betas=(torch.tensor(0.5), torch.tensor(0.75)), capturable=True
    )
    assert read_optimizer(optimizer, model).groups == (AdamHyper(betas=(0.5, 0.75)),)
    assert current_lrs(optimizer) == [0.25]
    assert read_optimizer(torch.optim.SGD(model.parameters(), foreach=True), model).groups == (SGDHyper(),)


def test_resumed_state_is_returned_by_name() -> None:
    model = Toy(torch.float32)
    optimizer = torch.optim.Adam(model.parameters(), amsgrad=True)
    assert initial_state(optimizer, model) is None
    for step in range(3):
        set_grads(model, step)
        optimizer.step()
    state = initial_state(optimizer, model)
    assert state is not None
    assert state.num_steps == 3
    assert {n: tuple(s) for n, s in state.tensors.items()} == dict.fromkeys(
        "wbs", ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
    )
    assert state.tensors["w"]["exp_avg"] is optimizer.state[model.w]["exp_avg"]


def test_resumed_sgd_is_past_its_first_step_and_without_momentum_has_no_state() -> None:
    model = Toy(torch.float32)
    for momentum, expected in ((0.9, {"w", "b", "s"}), (0.0, None)):
        optimizer = torch.optim.SGD(model.parameters(), momentum=momentum)
        set_grads(model, 0)
        optimizer.step()
        state = initial_state(optimizer, model)
        assert (set(state.tensors) if state else None) == expected
        assert state is None or state.num_steps == 1


def test_parameters_with_different_step_counts_are_refused() -> None:
    model = Toy(torch.float32)
    optimizer = torch.optim.Adam(model.parameters())
    set_grads(model, 0)
    optimizer.step()
    model.b.grad = None
    optimizer.step()
    with pytest.raises(PlanError, match=r"different numbers of steps\n.*\n  got: b: 1, w: 2"):
        initial_state(optimizer, model)


class MyAdam(torch.optim.Adam):
    pass


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: torch.optim.RMSprop(p), "RMSprop is not supported"),
        (lambda p: MyAdam(p), r"MyAdam is not supported\n(.*\n)*.*exactly torch.optim.SGD, torch.optim.Adam or"),
        (
            lambda p: torch.optim.SGD(p, differentiable=True),
            r"'differentiable' is not supported\n  where: SGD, param_groups\[0\]",
        ),
        (
            lambda p: torch.optim.AdamW([torch.zeros(3, requires_grad=True)]),
            r"a parameter that the model does not have",
        ),
    ],
)
def test_unsupported_is_refused_by_name(make: Callable[[Any], torch.optim.Optimizer], message: str) -> None:
    model = Toy(torch.float32)
    with pytest.raises(PlanError, match=message):
        read_optimizer(make(model.parameters()), model)


def test_a_schedule_of_the_momentum_is_refused() -> None:
    model = Toy(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    with pytest.raises(PlanError, match="cycle_momentum=False"):
        read_optimizer(optimizer, model)


def test_complex_parameters_are_refused() -> None:
    model = nn.ParameterDict({"z": nn.Parameter(torch.zeros(2, dtype=torch.complex64))})
    with pytest.raises(PlanError, match=r"z: torch\.complex64"):
        read_optimizer(torch.optim.SGD(model.parameters()), model)


def test_every_kind_is_exercised() -> None:
    assert {read_optimizer(o([torch.zeros(1)], **k), _AnyName()).kind for o, k in CASES} == set(KINDS)


class _AnyName(dict[int, str]):
    def __contains__(self, key: object) -> bool:
        return True

    def __getitem__(self, key: int) -> str:
        return str(key)
