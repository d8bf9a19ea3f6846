"""The table of updates, against the optimizers' own step()."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optimizers import SETTINGS, Lion, make
from torch import Tensor, nn

import meshweave as mw
from meshweave.capture.optimizers import StepNumbers, read_optimizer
from meshweave.capture.updates import TABLE
from meshweave.errors import CaptureError, PlanError, StepError

Make = Callable[..., torch.optim.Optimizer]


class Toy(nn.Module):
    """Two parameters of 2 dims, one of 1, one scalar; every element starts different."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        gen = torch.Generator().manual_seed(3)
        shapes = {"w": (3, 5), "v": (6, 4), "b": (7,), "s": ()}
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=gen).to(dtype)))


def set_grads(model: nn.Module, step: int) -> None:
    gen = torch.Generator().manual_seed(100 + step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=gen).to(p.dtype)


class Ours:
    """The captured update of a model, on tensors of its own."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.spec = read_optimizer(optimizer, model)
        self.numbers = StepNumbers(self.spec, optimizer, model)
        self.model = model
        self.params = {n: p.detach().clone() for n, p in model.named_parameters() if n in self.spec.kind_of}
        kept = {name: optimizer.state.get(p, {}) for name, p in model.named_parameters()}
        self.state = {
            name: {
                slot: kept[name][slot].clone()
                if slot in kept[name]
                else torch.full(spec.shape, float("nan"), dtype=spec.dtype)
                for slot, spec in self.spec.slots[name].items()
            }
            for name in self.params
        }

    def step(self) -> None:
        numbers, fills = self.numbers.next()
        for (slot, name), value in fills.items():
            self.state[name][slot].fill_(value)
        scalars = {n: torch.tensor(v, dtype=torch.float64) for n, v in numbers.items()}
        assert sorted(scalars) == sorted(self.spec.numbers())
        for name, p in self.model.named_parameters():
            if name in self.params and p.grad is not None:
                before = [self.params[name], *self.state[name].values()]
                kept = [t.clone() for t in before]
                new = self.spec.update(name, self.params[name], p.grad, self.state[name], scalars)
                same = [torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(before, kept, strict=True)]
                assert all(same), "a tensor was changed in place"
                self.params[name], self.state[name] = new
        self.numbers.commit()

    def error(self, optimizer: torch.optim.Optimizer) -> float:
        """Largest difference from the optimizer's own tensors, relative to the largest element of each."""
        worst = 0.0
        for name, p in self.model.named_parameters():
            if name in self.params:
                worst = max(worst, _difference(self.params[name], p.detach()))
                kept = optimizer.state[p]
                worst = max([worst, *(_difference(t, kept[slot]) for slot, t in self.state[name].items())])
                numbers = self.numbers.kept([name]).get(name, {})
                assert {slot: float(v) for slot, v in numbers.items()} == {
                    slot: float(v) for slot, v in kept.items() if slot not in self.state[name]
                }
        return worst


def _difference(got: Tensor, expected: Tensor) -> float:
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    scale = expected.double().abs().max().clamp(min=0.5 if got.dtype is torch.bfloat16 else 0.1)
    return float((got.double() - expected.double()).abs().max() / scale)


def compared(optimizer: torch.optim.Optimizer, model: nn.Module, num_steps: int) -> float:
    ours, worst = Ours(model, optimizer), 0.0
    for step in range(num_steps):
        for i, group in enumerate(optimizer.param_groups):
            group["lr"] = 2.0 ** -(step % 4 + 3 + i)
        set_grads(model, step)
        ours.step()
        optimizer.step()
        worst = max(worst, ours.error(optimizer))
    return worst


@pytest.mark.slow_rows(
    "torch.float32-2e-06-ASGD",
    "torch.float32-2e-06-Adadelta",
    "torch.float32-2e-06-Adagrad",
    "torch.float32-2e-06-AdamW",
    "torch.float32-2e-06-Adamax",
    "torch.float32-2e-06-Lion",
    "torch.float32-2e-06-Muon",
    "torch.float32-2e-06-NAdam",
    "torch.float32-2e-06-RAdam",
    "torch.float32-2e-06-RMSprop",
    "torch.float32-2e-06-Rprop",
)
@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.float64, 1e-12)], ids=str)
def test_update_equals_torch(kind: str, dtype: torch.dtype, bound: float) -> None:
    model = Toy(dtype)
    assert compared(make(kind, model), model, 10) <= bound


@pytest.mark.parametrize("kind", ["SGD", "Adam", "AdamW", "RMSprop", "Lion"])
def test_update_of_bfloat16_rounds_where_torch_does(kind: str) -> None:
    # Not to the bit: for `add` with alpha, torch's CPU kernels round alpha, and in their scalar tail the product too,
    # to bfloat16; the CUDA kernels do as we do. 2 ** -6 is two units in the last place of the largest element.
    model = Toy(torch.bfloat16)
    assert compared(make(kind, model), model, 4) <= 2**-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_updates_of_16_bits_are_those_of_float32_rounded_once(dtype: torch.dtype) -> None:
    model = Toy(dtype)
    wide = copy.deepcopy(model).float()
    ours, theirs = (
        Ours(model, torch.optim.AdamW(model.parameters(), lr=0.1)),
        torch.optim.AdamW(wide.parameters(), lr=0.1),
    )
    set_grads(model, 0)
    for p, q in zip(model.parameters(), wide.parameters(), strict=True):
        q.grad = p.grad.float() if p.grad is not None else None
    ours.step()
    theirs.step()
    for name, p in wide.named_parameters():
        assert torch.equal(ours.params[name], p.detach().to(dtype))
        assert torch.equal(ours.state[name]["exp_avg"], theirs.state[p]["exp_avg"].to(dtype))


def test_all_options_are_read_at_every_step() -> None:
    model = Toy(torch.float64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
    ours = Ours(model, optimizer)
    for step in range(6):
        group = optimizer.param_groups[0]
        group["betas"] = (0.9 - 0.1 * step, 0.99 - 0.05 * step)
        group["weight_decay"] = 0.1 * (step + 1)
        group["eps"] = 10.0 ** -(step + 2)
        set_grads(model, step)
        ours.step()
        optimizer.step()
        assert ours.error(optimizer) <= 1e-12


def test_a_switch_is_another_update() -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.1)
    ours = Ours(model, optimizer)
    set_grads(model, 0)
    ours.step()
    optimizer.param_groups[0]["weight_decay"] = 0.0
    with pytest.raises(StepError, match=r"another update than the compiled one\n  where: AdamW, param_groups\[0\]"):
        ours.step()


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RAdam", "NAdam", "ASGD", "Rprop", "Muon"])
def test_an_optimizer_that_has_taken_steps_goes_on(kind: str) -> None:
    model = Toy(torch.float64)
    optimizer = make(kind, model)
    for step in range(3):
        set_grads(model, step)
        optimizer.step()
    assert compared(optimizer, model, 6) <= 1e-12


def test_a_step_that_was_not_taken_does_not_count() -> None:
    model = Toy(torch.float64)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    numbers = StepNumbers(read_optimizer(optimizer, model), optimizer, model)
    for _ in range(3):
        numbers.next()
        numbers.commit()
    abandoned = numbers.next()
    assert numbers.next() == abandoned


def test_a_parameter_that_was_left_out_of_steps_has_its_own_count() -> None:
    model = Toy(torch.float64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for step in range(3):
        set_grads(model, step)
        if step:
            model.v.grad = None
        optimizer.step()
    assert compared(optimizer, model, 3) <= 1e-12


def test_groups_are_kinds_of_update() -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(
        [{"params": [model.w, model.v], "weight_decay": 0.5}, {"params": [model.b, model.s], "lr": 0.2}], lr=0.1
    )
    spec = read_optimizer(optimizer, {id(p): n for n, p in model.named_parameters()})
    assert [kind.group for kind in spec.kinds] == [0, 1]
    assert dict(spec.kind_of) == {"w": 0, "v": 0, "b": 1, "s": 1}
    assert all(set(spec.slots[n]) == {"exp_avg", "exp_avg_sq"} for n in "wvbs")


def num_ops(optimizer: torch.optim.Optimizer, model: nn.Module, name: str) -> int:
    """How many ops the update of a parameter takes."""
    spec, calls = read_optimizer(optimizer, model), list[Any]()

    def call(target: Any, args: Any, kwargs: Any, _: Any) -> Any:
        calls.append(target)
        return target(*args, **kwargs)

    own = model.get_parameter(name).detach()
    numbers = dict.fromkeys(spec.numbers(), torch.tensor(0.5, dtype=torch.float64))
    spec.update(name, own, own, dict.fromkeys(spec.slots[name], own), numbers, call)
    return len(calls)


def test_what_is_switched_off_takes_no_ops() -> None:
    model = Toy()
    assert num_ops(torch.optim.SGD(model.parameters()), model, "w") == 2
    assert num_ops(torch.optim.SGD(model.parameters(), momentum=0.9), model, "w") == 4  # in the first step, too
    assert num_ops(torch.optim.AdamW(model.parameters(), weight_decay=0.0), model, "w") == 13
    assert num_ops(torch.optim.AdamW(model.parameters()), model, "w") == 14


def test_numbers_of_a_parameter_without_dims_are_cast() -> None:
    model = Toy()
    assert num_ops(torch.optim.SGD(model.parameters()), model, "s") == 3


def test_implementation_switches_and_tensor_options_are_numbers() -> None:
    model = Toy()
    options: dict[str, Any] = {"lr": torch.tensor(0.25), "capturable": True}
    optimizer = torch.optim.Adam(model.parameters(), betas=(torch.tensor(0.5), torch.tensor(0.75)), **options)
    numbers, _ = StepNumbers(read_optimizer(optimizer, model), optimizer, model).next()
    assert 0.5 in numbers.values()
    assert 0.75 in numbers.values()
    read_optimizer(torch.optim.SGD(model.parameters(), foreach=True), model)


def test_an_option_that_the_update_does_not_read_changes_nothing() -> None:
    model = Toy()
    optimizer = Lion(model.parameters())
    ours = Ours(model, optimizer)
    optimizer.param_groups[0]["boost"] = 2.0
    set_grads(model, 0)
    ours.step()
    optimizer.step()
    assert ours.error(optimizer) <= 2e-6


class Renamed(torch.optim.Adam):
    """Other defaults, the same update."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=0.1, amsgrad=True)


def test_a_subclass_that_overrides_nothing_has_the_update_of_its_class() -> None:
    model = Toy(torch.float64)
    assert compared(Renamed(model.parameters()), model, 3) <= 1e-12


class MyAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()


class Beginning(torch.optim.SGD):
    def _init_group(self, *args: Any) -> Any:
        return super()._init_group(*args)  # type: ignore[misc]


class Looking(Lion):
    def look(self, p: Tensor) -> float:
        return p.mul_(0.5)  # type: ignore[return-value]


class Alone(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        pass


REFUSED: dict[str, tuple[Make, str]] = {
    "closures": (lambda m: torch.optim.LBFGS(m.parameters()), r"LBFGS evaluates the loss several times in a step"),
    "sparse": (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam takes sparse gradients"),
    "others": (lambda m: torch.optim.AdamW([torch.zeros(3, requires_grad=True)]), "a parameter that the model lacks"),
}
EAGER: dict[str, Make] = {
    "a step of its own": lambda m: MyAdam(m.parameters()),
    "state of its own": lambda m: Beginning(m.parameters()),
    "a method of its own": lambda m: Looking(m.parameters()),
    "its own class": lambda m: Alone(m.parameters()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_step_can_do_is_an_error(case: str) -> None:
    model, (build, message) = Toy(), REFUSED[case]
    with pytest.raises(PlanError, match=message):
        read_optimizer(build(model), model)


@pytest.mark.parametrize("case", EAGER)
def test_other_classes_have_no_update(case: str) -> None:
    model = Toy()
    optimizer = EAGER[case](model)
    kind = type(optimizer).__name__
    with pytest.raises(CaptureError, match=rf"no update is registered.*\n.*register_update\({kind}, .*\n.*{kind}"):
        read_optimizer(optimizer, model)


class Mine(Alone):
    pass


OWN = torch.ones(5)
BAD: dict[str, tuple[Any, str]] = {
    "another shape": (lambda p, g, state, n: (p.sum(), state), "an update returns other tensors"),
    "other slots": (lambda p, g, state, n: (p, {}), "an update returns other tensors"),
    "a tensor": (lambda p, g, state, n: (p + OWN, state), "an update uses a tensor of its own"),
    "a branch": (lambda p, g, state, n: (p if p.sum() > 0 else g, state), "control flow depends on data"),
}


@pytest.mark.parametrize("case", BAD)
def test_functions_that_are_no_update(case: str) -> None:
    model, (function, message) = Toy(), BAD[case]
    mw.register_update(Mine, function, lambda options, state: ({"rate": 0.5}, {}), {"mean": 0.0})
    try:
        spec = read_optimizer(Mine([model.w]), model)
        with pytest.raises(CaptureError, match=message):
            spec.update("w", model.w, model.w, {"mean": model.w}, {"update0.rate": torch.tensor(0.5)})
    finally:
        del TABLE[Mine]


def test_only_optimizers_have_updates() -> None:
    with pytest.raises(PlanError, match="not a class of optimizers"):
        mw.register_update(nn.Linear, lambda *_: None, lambda *_: None, {})  # type: ignore[arg-type, return-value]


def test_the_user_s_optimizer_is_left_as_it_was() -> None:
    model = Toy()
    optimizer = torch.optim.Adam(model.parameters())
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    numbers = StepNumbers(read_optimizer(optimizer, model), optimizer, model)
    numbers.next()
    assert not optimizer.state
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    assert optimizer.param_groups[0]["params"][0] is model.w
