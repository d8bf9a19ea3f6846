"""The update, captured from optimizers as they are, against their own step()."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optimizers import SETTINGS, Lion, make
from torch import Tensor, nn

from meshweave.capture.optimizers import OptimizerSpec, StepNumbers, read_optimizer
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
                for slot, spec in self.spec.slots(name).items()
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


TRACED = [kind for kind in SETTINGS if kind != "Adafactor"]


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
@pytest.mark.parametrize("kind", TRACED)
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


def test_groups_and_shapes_are_kinds_of_update() -> None:
    model = Toy()
    optimizer = torch.optim.AdamW(
        [{"params": [model.w, model.v], "weight_decay": 0.5}, {"params": [model.b, model.s], "lr": 0.2}], lr=0.1
    )
    spec = read_optimizer(optimizer, {id(p): n for n, p in model.named_parameters()})
    assert dict(spec.group_of) == {"w": 0, "v": 0, "b": 1, "s": 1}
    assert dict(spec.kind_of) == {"w": 0, "v": 1, "b": 2, "s": 3}
    assert spec.leaders == (0, 0, 2, 2)
    assert all(set(spec.slots(n)) == {"exp_avg", "exp_avg_sq"} for n in "wvbs")


def test_adam_takes_as_many_ops_as_torch_does() -> None:
    """One variant from the first step on: state that begins as 0 is not asked whether it is there."""
    model = Toy()
    spec: OptimizerSpec = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    assert [set(kind.variants) for kind in spec.kinds] == [{0}] * 4
    sgd = read_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9), model)
    assert [set(kind.variants) for kind in sgd.kinds] == [{0, 1}] * 4  # the first step makes the momentum


def test_implementation_switches_and_tensor_options_are_numbers() -> None:
    model = Toy()
    options: dict[str, Any] = {"lr": torch.tensor(0.25), "capturable": True}
    optimizer = torch.optim.Adam(model.parameters(), betas=(torch.tensor(0.5), torch.tensor(0.75)), **options)
    numbers, _ = StepNumbers(read_optimizer(optimizer, model), optimizer, model).next()
    assert 0.5 in numbers.values()
    assert 0.75 in numbers.values()
    read_optimizer(torch.optim.SGD(model.parameters(), foreach=True), model)


class Marked(Lion):
    """Reads what a user has noted on a parameter."""

    def look(self, p: Tensor) -> float:
        if getattr(p, "is_slow", False):
            p.mul_(0.5)
        return 0.0


class Into(Lion):
    """Writes into tensors by out=, with and without numbers, and through views."""

    def look(self, p: Tensor) -> float:
        kept = self.state[p]["exp_avg"]
        torch.add(kept, p, alpha=0.01, out=kept)
        torch.maximum(kept, p, out=kept)
        kept.view(-1).unsqueeze(0).mul_(0.5)
        return 0.0


def test_writes_of_every_kind_are_captured() -> None:
    model = Toy(torch.float64)
    assert compared(Into([model.w, model.v, model.b]), model, 3) <= 1e-12


class Scheduled(Lion):
    """Ops whose numbers are others in every step, on views and temporary tensors, by methods, functions and symbols."""

    def look(self, p: Tensor) -> float:
        kept, n = self.state[p]["exp_avg"], self.state[p]["count"]
        flat = kept.view(-1)
        chained = flat.mul_(1 - 0.05 * n)  # the view itself
        chained.add_(p.grad.reshape(-1), alpha=0.02 * n)
        kept.add_(chained.view_as(kept), alpha=0.1 / n)
        rest = torch.clamp(p.grad, max=0.25 * n - 0.75, min=-0.5 / n)  # the same number at first
        torch.add(kept, rest, alpha=0.1 * n, out=kept)
        p.sub_(0.1 * torch.nn.functional.leaky_relu(rest, 0.1))
        p.add_((kept * kept + 1.0 / n) ** 0.5 / (1.0 + n), alpha=-0.01)
        p.mul_(n).div_(1.0 * n)  # an integer
        p.lerp_(kept, 0.01 * n if n % 2 else torch.tensor(0.03 * n))
        return 0.0


def test_numbers_are_those_of_each_step() -> None:
    model = Toy(torch.float64)
    assert compared(Scheduled([model.w, model.v, model.b]), model, 7) <= 1e-12


def lr_of(optimizer: Any) -> float:
    return optimizer.param_groups[0]["lr"]  # type: ignore[no-any-return]


def kept_by(optimizer: Any, p: Tensor, fill: Callable[[Tensor], Tensor]) -> Tensor:
    """A slot of state, filled in the first step."""
    return optimizer.state[p].setdefault("kept", fill(p))  # type: ignore[no-any-return]


# What users write in a step, with the rate, which is another number in every step.
USES: dict[str, Callable[[Any, Tensor], Any]] = {
    "number - tensor": lambda o, p: p.copy_(1 - lr_of(o) - p),
    "number / tensor": lambda o, p: p.add_(lr_of(o) / (p.abs() + 1)),
    "number ** tensor": lambda o, p: p.add_(lr_of(o) ** p.abs()),
    "number < tensor": lambda o, p: p.mul_((lr_of(o) < p) * 0.5 + 0.5),
    "in place": lambda o, p: p.__iadd__(lr_of(o)).__imul__(lr_of(o)).__isub__(lr_of(o)).__itruediv__(lr_of(o)),
    "a choice": lambda o, p: p.copy_(torch.where(p > 0, p * 0.9, lr_of(o))),
    "a choice by a method": lambda o, p: p.copy_(p.where(p > 0, lr_of(o))),
    "a mask": lambda o, p: p.__setitem__(p > 0.5, lr_of(o)),  # type: ignore[operator]
    "a quotient rounded": lambda o, p: p.sub_(torch.div(p, lr_of(o), rounding_mode="floor"), alpha=0.001),
    "16 bits": lambda o, p: p.sub_(p.bfloat16().mul_(lr_of(o)).to(p.dtype)),
    "state filled with a number": lambda o, p: p.sub_(kept_by(o, p, lambda p: torch.full_like(p, lr_of(o))).mul_(0.5)),
    "state without values": lambda o, p: p.sub_(kept_by(o, p, torch.empty_like).copy_(p), alpha=0.1),
    "a copy as state": lambda o, p: p.sub_(kept_by(o, p, lambda p: p.detach().clone()).lerp_(p, 0.1), alpha=0.1),
    "another gradient": lambda o, p: setattr(p, "grad", p.grad * 2),  # type: ignore[operator]
    "the largest": lambda o, p: p.mul_((p.abs() >= p.abs().reshape(-1).topk(1)[0]).to(p.dtype)),
    "text": lambda o, p: f"{lr_of(o):.3f} {p.shape} {o.state[p]['count']}",
    "a late branch": lambda o, p: p.mul_(0.5 if o.state[p]["count"] > 5 else 0.75),
}


@pytest.mark.parametrize("use", USES)
def test_what_a_step_does_with_numbers_is_captured(use: str) -> None:
    model = Toy(torch.float64)
    kind = type("Using", (Lion,), {"look": lambda o, p: (USES[use](o, p), 0.0)[1]})
    assert compared(kind([model.w, model.v, model.b]), model, 8) <= 1e-12


def test_what_is_noted_on_a_parameter_counts() -> None:
    model = Toy(torch.float64)
    model.v.is_slow = True  # type: ignore[union-attr, assignment]
    assert compared(Marked(model.parameters()), model, 3) <= 1e-12


class FirstOnly(Lion):
    def look(self, p: Tensor) -> float:
        if p is self.param_groups[0]["params"][0]:
            p.mul_(0.5)
        return 0.0


def test_an_update_of_a_single_parameter_is_its_own() -> None:
    model = Toy(torch.float64)
    assert compared(FirstOnly(model.parameters()), model, 3) <= 1e-12


def test_shapes_share_numbers_unless_the_code_looks_at_them() -> None:
    model = Toy()
    adam = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    assert adam.leaders == (0, 0, 0, 0)
    assert {name.partition(".")[0] for name in adam.numbers()} == {"update0"}
    muon = read_optimizer(torch.optim.Muon([model.w, model.v]), model)
    assert muon.leaders == (0, 1)


class MyAdam(torch.optim.Adam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = p.grad * 2
        super().step()


def test_a_subclass_steps_as_it_steps() -> None:
    model = Toy(torch.float64)
    assert compared(MyAdam(model.parameters()), model, 3) <= 1e-12


class Printing(Lion):
    def look(self, p: Tensor) -> float:
        return float(p.abs().max())  # the line of the error


class Noisy(Lion):
    def look(self, p: Tensor) -> float:
        return torch.randn_like(p) * 0.0  # type: ignore[return-value]


class Together(Lion):
    def look(self, p: Tensor) -> float:
        return sum(q.grad.sum() for g in self.param_groups for q in g["params"]) * p  # type: ignore[return-value]


class Aliasing(Lion):
    def look(self, p: Tensor) -> float:
        self.state[p]["same"] = self.state[p]["exp_avg"].view(-1)
        return 0.0


class Forgetful(Lion):
    """Creates state in one step and removes it in another."""

    def look(self, p: Tensor) -> float:
        state = self.state[p]
        if state["count"] % 3:
            state["kept"] = p.mul(0.1)
        else:
            state.pop("kept")
        return 0.0


class Elsewhere(Lion):
    def look(self, p: Tensor) -> float:
        p.data = p.data * 0.5
        return 0.0


class Rooted(Lion):
    def look(self, p: Tensor) -> float:
        return p.mul_(math.sqrt(1 - 0.9 ** self.state[p]["count"]))  # type: ignore[return-value]


class Late(Lion):
    def look(self, p: Tensor) -> float:
        if self.state[p]["count"] == 2:
            self.state[p]["late"] = torch.ones_like(p)
        return 0.0


class Rounded(Lion):
    def look(self, p: Tensor) -> float:
        return p.mul_(1 - 0.1 * int(self.state[p]["count"] / 3))  # type: ignore[return-value]


class OfRows(Lion):
    def look(self, p: Tensor) -> float:
        if p.dim() == 2:
            p[p[:, 0] > 0] = self.param_groups[0]["lr"]
        return 0.0


class Reshaping(Lion):
    def look(self, p: Tensor) -> float:
        return p.mul(0.5).unsqueeze_(0)  # type: ignore[return-value]


class Sliced(Lion):
    def look(self, p: Tensor) -> float:
        self.state[p]["exp_avg"][:1].mul_(0.5)
        return 0.0


class Global(Lion):
    counts = [0]

    def look(self, p: Tensor) -> float:
        self.counts[0] += 1
        return p.mul_(0.5 / self.counts[0])  # type: ignore[return-value]


class OnLists(Lion):
    def look(self, p: Tensor) -> float:
        return torch._foreach_mul_([p], 0.9)  # type: ignore[return-value, func-returns-value]


class Foreign(Lion):
    table = torch.ones(4)

    def look(self, p: Tensor) -> float:
        return p.sum() * self.table  # type: ignore[return-value]


def test_a_new_option_or_attribute_is_another_update() -> None:
    model = Toy()
    optimizer = Lion(model.parameters())
    ours = Ours(model, optimizer)
    torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=9, cycle_momentum=False)
    set_grads(model, 0)
    ours.step()
    optimizer.param_groups[0]["boost"] = 2.0
    with pytest.raises(StepError, match="another update than the compiled one\n  where: Lion, group 0\n  got: boost"):
        ours.step()


class Counting(Lion):
    """Changes values that belong to no parameter, in one step as in the next."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count, self.seen, self.rate = 0, [0], torch.tensor(0.1)
        self.table: dict[str, Any] = {"k": 0}
        for group in self.param_groups:
            group["k"] = 0

    def change(self) -> None:
        raise NotImplementedError

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.change()
        super().step()


def changing(change: Callable[[Any], Any]) -> Make:
    return lambda model: type("Changing", (Counting,), {"change": change})([model.w, model.v, model.b])


class Twice(torch.optim.SGD):
    """Sharpness-aware minimization: gradients at a second point."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        closure()
        super().step()


CHANGES = r"changes an option or attribute of its own\n  where: Changing\n  got: "
REFUSED: dict[str, tuple[Make, str]] = {
    "closures": (lambda m: torch.optim.LBFGS(m.parameters()), r"LBFGS evaluates the loss several times in a step"),
    "a closure that is optional": (lambda m: Twice(m.parameters()), "Twice evaluates the loss several times in a step"),
    "sparse": (lambda m: torch.optim.SparseAdam(m.parameters()), "SparseAdam takes sparse gradients"),
    "others": (lambda m: torch.optim.AdamW([torch.zeros(3, requires_grad=True)]), "a parameter that the model lacks"),
}
EAGER: dict[str, tuple[Make, str]] = {
    "values": (
        lambda m: Printing(m.parameters()),
        r"depends on values of tensors\n  where: .*optimizers\.py:\d+ in look",
    ),
    "Adafactor": (lambda m: torch.optim.Adafactor(m.parameters()), r"values of tensors\n  where: .*_adafactor\.py:\d+"),
    "random": (lambda m: Noisy(m.parameters()), r"draws random numbers\n  where: .*test_optimizers\.py:\d+ in look"),
    "together": (lambda m: Together(m.parameters()), "combines the values of several parameters"),
    "aliases": (lambda m: Aliasing(m.parameters()), "keeps two values in one memory\n  where: Aliasing"),
    "removed": (lambda m: Forgetful(m.parameters()), r"removes a state tensor after its first step\n.*\n.*'kept' of w"),
    "data": (lambda m: Elsewhere(m.parameters()), r"assigns the data of a tensor\n  where: .*in look"),
    "own tensors": (
        lambda m: Foreign(m.parameters()),
        r"not a parameter, gradient or state of its own\n  where: .*in look",
    ),
    "a mask of rows": (lambda m: OfRows(m.parameters()), "an argument of an op without a row"),
    "a slice": (lambda m: Sliced(m.parameters()), "written through a part of it"),
    "a shape": (lambda m: Reshaping(m.parameters()), "changes the shape of a tensor in place"),
    "late": (lambda m: Late(m.parameters()), "creates or removes a state tensor after its first step"),
    "int": (lambda m: Rounded(m.parameters()), "takes another path from step to step"),
    "math": (lambda m: Rooted(m.parameters()), "takes another path from step to step"),
    "lists": (lambda m: OnLists(m.parameters()), "ops on lists of tensors"),
    "of a global": (lambda m: Global(m.parameters()), "something else in a step than in an equal step before"),
    "a group": (changing(lambda o: o.param_groups[0].update(k=o.param_groups[0]["k"] + 1)), CHANGES + "group 0: k"),
    "a new option": (changing(lambda o: o.param_groups[0].update(n=1)), CHANGES + "group 0: n"),
    "an attribute": (changing(lambda o: setattr(o, "count", o.count + 1)), CHANGES + "attribute 0: count"),
    "a tensor": (changing(lambda o: o.rate.mul_(0.5)), CHANGES + "attribute 0: rate"),
    "in a dict": (changing(lambda o: o.table.update(k=o.table["k"] + 1)), CHANGES + "attribute 0: table"),
    "in state": (changing(lambda o: o.state.update(k=1)), "keeps state of no parameter"),
}


@pytest.mark.parametrize("case", [*REFUSED, *EAGER])
def test_what_cannot_be_traced_is_an_error(case: str) -> None:
    model, (build, message) = Toy(), (REFUSED | EAGER)[case]
    with pytest.raises(PlanError if case in REFUSED else CaptureError, match=message):
        read_optimizer(build(model), model)


class Damped(Lion):
    count = 0

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.count = 0

    def look(self, p: Tensor) -> float:
        return p.mul_(1.0 / (1 + self.count))  # type: ignore[return-value]


def test_a_number_of_the_optimizer_that_a_script_changes_counts() -> None:
    model = Toy(torch.float64)
    optimizer = Damped(model.parameters())
    ours = Ours(model, optimizer)
    for step in range(4):
        optimizer.count = 2 * step
        set_grads(model, step)
        ours.step()
        optimizer.step()
        assert ours.error(optimizer) <= 1e-12


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
