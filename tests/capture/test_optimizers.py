"""The update, captured from optimizers as they are, against their own step()."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.optimizers import SETTINGS, Lion, make
from torch import Tensor, nn

from meshweave.capture import optimizers
from meshweave.capture.optimizer_recorder import OptimizerRecorder
from meshweave.capture.optimizer_steps import StepNumbers
from meshweave.capture.optimizers import OptimizerSpec, initial_state, read_optimizer
from meshweave.errors import CaptureError, MeshweaveError, PlanError, StepError

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
        held = initial_state(optimizer, self.spec, model)
        self.params = {n: p.detach().clone() for n, p in model.named_parameters() if n in self.spec.kind_of}
        self.state = {
            name: {
                slot: held.tensors[name][slot].clone()
                if held and slot in held.tensors.get(name, {})
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
                assert self.numbers.values().get(name, {}) == {
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


@pytest.mark.parametrize("kind", list(SETTINGS))
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


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RAdam", "NAdam", "Adafactor", "ASGD", "Rprop", "Muon"])
def test_an_optimizer_that_has_taken_steps_goes_on(kind: str) -> None:
    model = Toy(torch.float64)
    optimizer = make(kind, model)
    for step in range(3):
        set_grads(model, step)
        optimizer.step()
    assert compared(optimizer, model, 6) <= 1e-12


def test_numbers_that_were_saved_go_on() -> None:
    model = Toy(torch.float64)
    optimizer = torch.optim.NAdam(model.parameters(), lr=0.1)
    spec = read_optimizer(optimizer, model)
    first, other = StepNumbers(spec, optimizer, model), StepNumbers(spec, optimizer, model)
    for _ in range(3):
        first.next()
        first.commit()
    other.load(first.values(), 3)
    assert other.values() == first.values()
    assert other.next() == first.next()
    abandoned = first.next()
    assert first.next() == abandoned, "a step that was not taken counts"


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
    assert [len(kind.variants) for kind in spec.kinds] == [1] * 4
    sgd = read_optimizer(torch.optim.SGD(model.parameters(), momentum=0.9), model)
    assert [len(kind.variants) for kind in sgd.kinds] == [2] * 4  # the first step makes the momentum of the gradient


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
    """Writes into tensors by out=, with and without numbers, and by slices and columns."""

    def look(self, p: Tensor) -> float:
        kept = self.state[p]["exp_avg"]
        torch.add(kept, p, alpha=0.01, out=kept)
        torch.maximum(kept, p, out=kept)
        kept[:1].mul_(0.5)
        torch._foreach_mul_([kept], 0.9)
        return 0.0


def test_writes_of_every_kind_are_captured() -> None:
    model = Toy(torch.float64)
    assert compared(Into([model.w, model.v, model.b]), model, 3) <= 1e-12


class OnLists(torch.optim.Optimizer):
    """Updates all parameters of a group together, as optimizers written for GPUs do."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "beta": 0.9})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads, beta = [p.grad for p in params], group["beta"]
            for p in params:
                if not self.state[p]:
                    self.state[p] |= {"count": 0, **{k: torch.zeros_like(p) for k in ("mean", "square", "most")}}
                self.state[p]["count"] += 1
            mean, square, most = ([self.state[p][k] for p in params] for k in ("mean", "square", "most"))
            counts = [self.state[p]["count"] for p in params]
            torch._foreach_mul_(params, 1 - 0.1 * group["lr"])
            torch._foreach_lerp_(mean, grads, 1 - beta)
            torch._foreach_mul_(square, beta)
            torch._foreach_addcmul_(square, grads, grads, 1 - beta)
            torch._foreach_maximum_(most, square)
            scales = torch._foreach_sqrt(most)
            torch._foreach_div_(scales, [(1 - beta**n) ** 0.5 for n in counts])
            torch._foreach_add_(scales, 1e-6)
            torch._foreach_maximum_(scales, 0.01)
            steps = torch._foreach_div(torch._foreach_neg(mean), scales)
            norms = torch._foreach_norm(steps)
            torch._foreach_add_(norms, 1.0)
            torch._foreach_div_(steps, norms)
            torch._foreach_add_(steps, torch._foreach_sign(grads), alpha=-0.01)
            torch._foreach_addcdiv_(params, steps, scales, [group["lr"] / n for n in counts])
            torch._foreach_copy_(square, torch._foreach_minimum(square, 4.0))


def test_ops_on_lists_are_captured_element_by_element() -> None:
    model = Toy(torch.float64)
    optimizer = OnLists([{"params": [model.w, model.v]}, {"params": [model.b, model.s]}])
    assert compared(optimizer, model, 5) <= 1e-12


class Assigning(Lion):
    """Assigns new values by `.data`, after which views of the old values change nothing."""

    def look(self, p: Tensor) -> float:
        kept, old = self.state[p]["exp_avg"], p.data.view(-1)
        kept.data = 0.5 * kept + 0.25 * p.data
        p.data = 0.75 * p.data - 0.1 * kept
        old.add_(1.0)
        p.data.mul_(0.5)
        return 0.0


def test_values_assigned_by_data_are_captured() -> None:
    model = Toy(torch.float64)
    assert compared(Assigning([model.w, model.v, model.b]), model, 3) <= 1e-12


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
        p.sub_(0.1 * torch.nn.functional.leaky_relu(rest, 0.1 * n))
        p.add_((kept * kept + 1.0 / n) ** 0.5 / (1.0 + n), alpha=-0.01)
        p.mul_(n).div_(float(n))  # an integer
        p.lerp_(kept, 0.01 * n if n % 2 else torch.tensor(0.03 * n))
        return 0.0


def test_numbers_are_those_of_each_step() -> None:
    model = Toy(torch.float64)
    assert compared(Scheduled([model.w, model.v, model.b]), model, 7) <= 1e-12


class Quiet(torch.optim.Optimizer):
    """Keeps no state, and its rate is an attribute in a dict, which `step()` does not change."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})
        self.rates: dict[str, Any] = {"of": {"all": 0.1}}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.rates["of"]["all"])


def test_attributes_are_read_at_every_step() -> None:
    model = Toy(torch.float64)
    optimizer = Quiet(model.parameters())
    ours = Ours(model, optimizer)
    for step in range(6):
        if step % 3:
            optimizer.rates["of"]["all"] = 0.2 / step
        if step == 5:
            optimizer.rates = {"of": {"all": 0.7}}
        set_grads(model, step)
        ours.step()
        optimizer.step()
        assert ours.error(optimizer) <= 1e-12


class Boosted(torch.optim.Optimizer):
    """Its rate has factors that may be missing."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                boost = group.get("boost", 1.0) * getattr(self, "boost", 1.0) * getattr(p, "boost", 1.0)
                p.sub_(p.grad, alpha=group["lr"] * boost)


@pytest.mark.parametrize("place", ["group", "optimizer", "parameter"])
def test_what_the_user_deletes_counts_no_longer(place: str) -> None:
    model = Toy(torch.float64)
    optimizer = Boosted(model.parameters())
    ours = Ours(model, optimizer)
    places: dict[str, list[dict[str, Any]]] = {
        "group": optimizer.param_groups,
        "optimizer": [vars(optimizer)],
        "parameter": [vars(p) for p in model.parameters()],
    }
    for step in range(6):
        for entries in places[place]:
            if step in (1, 4):
                entries["boost"] = 3.0
            if step in (3, 5):
                del entries["boost"]
        set_grads(model, step)
        ours.step()
        optimizer.step()
        assert ours.error(optimizer) <= 1e-12


class Watch:
    """An object that refers to the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def rate(self) -> float:
        rate: float = self.optimizer.param_groups[0]["lr"] * 0.7
        return rate


class Referring(torch.optim.Optimizer):
    """Takes its rate from an attribute `kept`, as `read` says."""

    def __init__(self, params: Any, build: Callable[[Any], Any], read: Callable[[Any], float]) -> None:
        super().__init__(params, {"lr": 0.1})
        self.kept, self.read = build(self), read

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.sub_(p.grad, alpha=self.read(self.kept))


def _tensor(_: Any) -> Tensor:
    return torch.tensor(0.1)


def _set_group(kept: Any, rate: float) -> None:
    kept["lr"] = rate


# How the attribute is built, how the rate is read, how the user changes it between steps.
REFERENCES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], float], Callable[[Any, float], Any]]] = {
    "a tensor": (_tensor, lambda x: x.item(), lambda x, v: x.fill_(v)),
    "a tensor by data": (_tensor, lambda x: x.item(), lambda x, v: x.data.fill_(v)),
    "a tensor by numpy": (_tensor, lambda x: x.item(), lambda x, v: x.numpy().__setitem__(..., v)),
    "bytes": (lambda _: bytearray(b"\x0a"), lambda x: x[0] / 100, lambda x, v: x.__setitem__(0, int(v * 100))),
    "an array": (lambda _: array("d", [0.1]), lambda x: x[0], lambda x, v: x.__setitem__(0, v)),
    "with parameters": (
        lambda o: {"of": list(o.param_groups[0]["params"]), "rate": 0.1},
        lambda x: x["rate"],
        lambda x, v: x.update(rate=v),
    ),
    "a schedule": (
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda k: 0.5**k),
        lambda x: x.get_last_lr()[0],
        lambda x, v: x.step(),
    ),
    "a group": (lambda o: o.param_groups[0], lambda x: x["lr"] * 0.5, _set_group),
    "itself": (lambda o: o, lambda x: x.param_groups[0]["lr"], lambda x, v: _set_group(x.param_groups[0], v)),
    "an object": (Watch, lambda x: x.rate, lambda x, v: _set_group(x.optimizer.param_groups[0], v)),
}


@pytest.mark.filterwarnings("ignore:Detected call of:UserWarning")
@pytest.mark.parametrize("kind", list(REFERENCES))
def test_whatever_an_attribute_refers_to_is_read_at_every_step(kind: str) -> None:
    model, (build, read, write) = Toy(torch.float64), REFERENCES[kind]
    optimizer = Referring(model.parameters(), build, read)
    ours = Ours(model, optimizer)
    for step in range(5):
        if step != 2:
            write(optimizer.kept, 0.1 + 0.05 * step)
        if step == 3:  # other dicts for the same groups
            optimizer.load_state_dict(optimizer.state_dict())
        set_grads(model, step)
        ours.step()
        optimizer.step()
        assert ours.error(optimizer) <= 1e-12


def test_an_option_may_refer_to_a_parameter() -> None:
    model = Toy(torch.float64)
    optimizer = Preferring(model.parameters())
    optimizer.param_groups[0]["first"] = [model.v]
    assert compared(optimizer, model, 3) <= 1e-12


class Preferring(torch.optim.Optimizer):
    """Has another rate for the parameters that an option of the group lists."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "first": []})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                is_first = any(p is other for other in group["first"])
                p.sub_(p.grad, alpha=group["lr"] * (0.5 if is_first else 1.0))


class Telling(torch.optim.Optimizer):
    """Tells parameters apart, by what its attributes are."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1, "rates": [1.0] * 3})
        first = self.param_groups[0]["params"]
        self.listed, self.by_param, self.first, self.other = list(first), dict.fromkeys(first, 1.0), first[0], 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, rate in zip(group["params"], group["rates"], strict=False):
                rate *= self.by_param[p] * (1.0 if any(p is x for x in self.listed) else 0.5)
                p.sub_(p.grad, alpha=group["lr"] * rate * (1.0 if p is self.first else self.other))


CHANGES: dict[str, Callable[[Any], Any]] = {
    "a list of parameters": lambda o: o.listed.pop(),
    "a value by parameter": lambda o: o.by_param.update({o.first: 0.5}),
    "a number beside a parameter": lambda o: vars(o).update(other=0.5),
    "another parameter": lambda o: vars(o).update(first=o.listed[1], other=0.5),
    "values in the order of parameters": lambda o: o.param_groups[0].update(rates=[1.0, 0.5, 1.0]),
}


@pytest.mark.parametrize("kind", list(CHANGES))
def test_parameters_that_become_different_are_another_update(kind: str) -> None:
    """Until then they had the same numbers, which ran for the first of them only."""
    model = Toy(torch.float64)
    optimizer = Telling([model.w, model.v, model.b])
    ours = Ours(model, optimizer)
    for step in range(2):
        set_grads(model, step)
        optimizer.param_groups[0]["lr"] *= 0.5
        ours.step()
        optimizer.step()
        assert ours.error(optimizer) <= 1e-12
    CHANGES[kind](optimizer)
    for _ in range(2):
        with pytest.raises(StepError, match="in different ways that it updated alike when the step was compiled"):
            ours.step()


class Reshaping(Lion):
    """Changes the shape of what it has computed, and of the gradient, in place, and notes something on them."""

    def look(self, p: Tensor) -> float:
        assert p.grad is not None
        fresh = p.mul(0.5)
        rate = 0.1 / (1 + fresh.dim()) if not hasattr(fresh, "is_seen") else 5.0
        fresh.is_seen = True  # type: ignore[attr-defined]
        fresh.unsqueeze_(0)
        rate = rate if not hasattr(p.grad, "is_seen") else 7.0
        p.grad.is_seen = True  # type: ignore[attr-defined]
        p.sub_(p.grad, alpha=rate)
        p.sub_(fresh.squeeze_(0), alpha=0.01)
        return 0.0


def test_a_step_does_not_see_what_the_previous_step_computed() -> None:
    model = Toy(torch.float64)
    assert compared(Reshaping(model.parameters()), model, 5) <= 1e-12


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "Lion"])
def test_ops_are_dispatched_in_the_first_steps_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a step costs on the host: its ops on stand-ins are looked up, not run."""
    model = Toy(torch.float64)
    optimizer = make(kind, model)
    ours, ops = Ours(model, optimizer), list[str]()
    for step in range(3):
        set_grads(model, step)
        ours.step()
    before = OptimizerRecorder._written
    monkeypatch.setattr(
        OptimizerRecorder, "_written", lambda self, func, *rest: ops.append(str(func)) or before(self, func, *rest)
    )
    ours.step()
    assert ops == []


def test_what_is_noted_on_a_parameter_counts() -> None:
    model = Toy(torch.float64)
    model.v.is_slow = True  # type: ignore[union-attr, assignment]
    assert compared(Marked(model.parameters()), model, 3) <= 1e-12


class FirstOnly(Lion):
    def look(self, p: Tensor) -> float:
        if p is self.param_groups[0]["params"][0]:
            p.mul_(0.5)
        return 0.0


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
    """Keeps a value in the memory of another."""

    view: Callable[[Tensor, Tensor], Tensor] = staticmethod(lambda p, kept: kept)

    def look(self, p: Tensor) -> float:
        self.state[p]["same"] = self.view(p, self.state[p]["exp_avg"])
        return 0.0


def aliasing(view: Callable[[Tensor, Tensor], Tensor]) -> Callable[[nn.Module], Aliasing]:
    kind = type("Aliasing", (Aliasing,), {"view": staticmethod(view)})
    return lambda m: kind(m.parameters())


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
        p.data = p.data.double()
        return 0.0


class Foreign(Lion):
    table = torch.ones(4)

    def look(self, p: Tensor) -> float:
        return p.sum() * self.table  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda m: torch.optim.LBFGS(m.parameters()),
            r"LBFGS evaluates the loss several times in a step\n.*lbfgs\.py:\d+",
        ),
        (
            lambda m: torch.optim.SparseAdam(m.parameters()),
            r"SparseAdam cannot be captured\n.*sparse_adam\.py:\d+.*\n.*dense",
        ),
        (lambda m: Printing(m.parameters()), r"depends on data\n  where: .*test_optimizers\.py:\d+ in look"),
        (lambda m: Noisy(m.parameters()), r"draws random numbers\n  where: .*test_optimizers\.py:\d+ in look"),
        (lambda m: Together(m.parameters()), "combines the values of several parameters"),
        (lambda m: FirstOnly(m.parameters()), "'v' depends on the optimizer's other parameters"),
        (aliasing(lambda p, kept: kept), "keeps 'same' in the memory of 'exp_avg'\n  where: Aliasing"),
        (aliasing(lambda p, kept: kept.view(-1)), "keeps 'same' in the memory of 'exp_avg'"),
        (aliasing(lambda p, kept: p.detach()), "keeps 'same' in the memory of the parameter"),
        (lambda m: Forgetful(m.parameters()), r"removes a state tensor .*\n.*\n.*state\['kept'\] of w"),
        (lambda m: Elsewhere(m.parameters()), r"assigns other data to a tensor.*\n  where: .*in look"),
        (lambda m: Foreign(m.parameters()), r"not a parameter, gradient or state of its own\n  where: .*in look"),
        (
            lambda m: torch.optim.SGD(m.parameters(), differentiable=True),
            r"'differentiable' is not supported\n  where: SGD",
        ),
        (lambda m: torch.optim.AdamW([torch.zeros(3, requires_grad=True)]), "a parameter that the model lacks"),
    ],
)
def test_what_cannot_be_captured_is_refused(build: Callable[[nn.Module], Any], message: str) -> None:
    model = Toy()
    with pytest.raises(MeshweaveError, match=message) as error:
        read_optimizer(build(model), model)
    assert isinstance(error.value, (CaptureError, PlanError))


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


@pytest.mark.parametrize(("kind", "num_read"), [("AdamW", 2), ("SGD", 2), ("Adafactor", 4)])
def test_shapes_whose_update_goes_element_by_element_are_read_once(
    kind: str, num_read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shape without dims is read by itself: dtypes of results are another matter there. Adafactor reads shapes."""
    read: list[str] = []
    of = optimizers._kind
    monkeypatch.setattr(optimizers, "_kind", lambda *how: (read.append(how[1]), of(*how))[1])
    model = Toy()
    spec = read_optimizer(getattr(torch.optim, kind)(model.parameters(), lr=0.1), model)
    assert len(spec.kinds) == 4
    assert len(read) == num_read
    for name, param in model.named_parameters():
        sizes = {s.shape for s in spec.slots(name).values()}
        assert kind == "Adafactor" or sizes <= {tuple(param.shape), ()}
