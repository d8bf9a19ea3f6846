"""The updates of optimizers as pure functions, and the table of them by class.

A row has three functions. `numbers` computes in Python, before every step, what a group's options and a parameter's
step count come to. `function` computes with tensors, without writing to them, and is traced once. The rows of
torch.optim follow the form for a single tensor in torch/optim/*.py (`foreach=False`), in the order of its operations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from meshweave.errors import PlanError

Options = Mapping[str, Any]
SlotValues = Mapping[str, Any]
Slots = Mapping[str, Any]  # by slot its first value, which every element has; or (value, shape)
UpdateFunction = Callable[[Tensor, Tensor, Mapping[str, Tensor], Mapping[str, Any]], tuple[Tensor, dict[str, Tensor]]]
NumbersFunction = Callable[[Options, SlotValues], tuple[Mapping[str, Any], SlotValues]]
StateFunction = Callable[[Options, tuple[int, ...]], Slots]


@dataclass(frozen=True, slots=True)
class UpdateRule:
    """How an optimizer updates a parameter (see `register_update`)."""

    function: UpdateFunction
    numbers: NumbersFunction
    state: StateFunction


TABLE: dict[type[Optimizer], UpdateRule] = {}


def register_update(
    cls: type[Optimizer], function: UpdateFunction, numbers: NumbersFunction, state: Slots | StateFunction
) -> None:
    """Teach meshweave the update of an optimizer: `mw.register_update(Lion, lion, lion_numbers, {"exp_avg": 0.0})`.

    The update of a class without one is its own `step()`, which runs after the compiled step.

    function: (param, grad, state, numbers) -> (new param, new state), for a single parameter: tensors of global shape,
        state by slot. It writes to no tensor, and is traced once for each shape. Parameters, gradients and state of 16
        bits come as float32, complex ones as pairs of real numbers in a last dim; results are rounded to what is
        stored.
    numbers: (options, state) -> (numbers, state after the step), plain Python before every step. `options` are those of
        the group, numbers as floats. `state` is what the optimizer keeps for a parameter, by slot: its own numbers (a
        step count) in its own form, and True for tensors of its state; it is empty before the first step. Of the
        results floats become 0-dim tensors, inputs of `function`, which may change in every step. Bools, integers, text
        and None are switches: other ones are another update, for which the step is compiled again.
    state: the tensors of a parameter's state: by slot the value with which they begin, or a function (options, shape)
        -> slots, where (value, shape) is a tensor of another shape.

    A subclass has the update of its class unless it overrides methods. Registering again replaces the row. Raises
    PlanError for what is no class of optimizers.
    """
    if not (isinstance(cls, type) and issubclass(cls, Optimizer)):
        raise PlanError("not a class of optimizers", where="register_update", got=repr(cls))
    slots = state
    TABLE[cls] = UpdateRule(function, numbers, slots if callable(slots) else lambda options, shape: slots)


def update_of(optimizer: Optimizer) -> UpdateRule | None:
    """The row for an optimizer. None if its class, or what it overrides of a class in the table, has none."""
    cls = type(optimizer)
    base = next((k for k in cls.__mro__ if k in TABLE), None)
    if base is None:
        return None
    classes = base.__mro__[: base.__mro__.index(Optimizer)]
    methods = {name for k in classes for name, value in vars(k).items() if callable(value) and name[:2] != "__"}
    # torch wraps step() anew in each class
    is_same = all(inspect.unwrap(getattr(cls, name)) is inspect.unwrap(getattr(base, name)) for name in methods)
    return TABLE[base] if is_same else None


def _scalar(value: float) -> Tensor:
    """A number as torch's optimizers keep it (`_get_scalar_dtype`, torch/optim/optimizer.py)."""
    dtype = torch.promote_types(torch.get_default_dtype(), torch.float32)
    return torch.tensor(value, dtype=dtype, device="cpu")


def _counted(state: SlotValues) -> tuple[Tensor, float]:
    """The count of steps with the present one, in its own form, and as a number."""
    step = state["step"] + 1 if "step" in state else _scalar(1.0)
    return step, float(step)


def _decay(o: Options, is_decoupled: bool = False) -> dict[str, Any]:
    decay = o["weight_decay"] or None
    shrink = None if decay is None or not is_decoupled else 1 - o["lr"] * decay
    return {"maximize": o.get("maximize", False), "decay": None if is_decoupled else decay, "shrink": shrink}


def _decayed(param: Tensor, grad: Tensor, n: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    grad = -grad if n["maximize"] else grad
    if n["decay"] is not None:
        grad = grad + param * n["decay"]
    return (param if n["shrink"] is None else param * n["shrink"]), grad


def _sgd_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    part = 1.0 if "momentum_buffer" not in state else 1 - o["dampening"]
    own = {"momentum": o["momentum"] or None, "part": part if o["dampening"] else None, "nesterov": o["nesterov"]}
    return {**_decay(o), **own, "size": -o["lr"]}, {}


def _sgd(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """With momentum: Sutskever et al., On the importance of initialization and momentum in deep learning, 2013."""
    param, grad = _decayed(param, grad, n)
    if n["momentum"] is None:
        return param + grad * n["size"], {}
    buffer = state["momentum_buffer"] * n["momentum"] + (grad if n["part"] is None else grad * n["part"])
    grad = grad + buffer * n["momentum"] if n["nesterov"] else buffer
    return param + grad * n["size"], {"momentum_buffer": buffer}


def _means(o: Options) -> dict[str, float]:
    beta1, beta2 = o["betas"]
    return {"beta1": beta1, "rest1": 1 - beta1, "beta2": beta2, "rest2": 1 - beta2, "eps": o["eps"]}


def _averaged(grad: Tensor, state: Mapping[str, Tensor], n: Any) -> dict[str, Tensor]:
    """The means of gradients and of their squares."""
    mean = state["exp_avg"] * n["beta1"] + grad * n["rest1"]
    return {"exp_avg": mean, "exp_avg_sq": state["exp_avg_sq"] * n["beta2"] + n["rest2"] * grad * grad}


def _adam_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    (beta1, beta2), (step, count) = o["betas"], _counted(state)
    own = {"root": (1 - beta2**count) ** 0.5, "size": -o["lr"] / (1 - beta1**count), "amsgrad": o["amsgrad"]}
    return {**_decay(o, o["decoupled_weight_decay"]), **_means(o), **own}, {"step": step}


def _adam_state(o: Options, shape: tuple[int, ...]) -> Slots:
    return dict.fromkeys(("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if o["amsgrad"] else ())), 0.0)


def _adam(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Kingma and Ba, arXiv 1412.6980; Loshchilov and Hutter, arXiv 1711.05101; Reddi et al., arXiv 1904.09237."""
    param, grad = _decayed(param, grad, n)
    new = _averaged(grad, state, n)
    square = new["exp_avg_sq"]
    if n["amsgrad"]:
        square = new["max_exp_avg_sq"] = torch.maximum(state["max_exp_avg_sq"], square)
    return param + n["size"] * new["exp_avg"] / (square.sqrt() / n["root"] + n["eps"]), new


def _nadam_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    (beta1, beta2), (step, count) = o["betas"], _counted(state)
    mu, following = (beta1 * (1 - 0.5 * 0.96 ** (i * o["momentum_decay"])) for i in (count, count + 1))
    product = state.get("mu_product", _scalar(1.0)) * mu
    own = {
        "correction": 1 - beta2**count,
        "of_grad": -o["lr"] * (1 - mu) / (1 - float(product)),
        "of_mean": -o["lr"] * following / (1 - float(product) * following),
    }
    return {**_decay(o, o["decoupled_weight_decay"]), **_means(o), **own}, {"step": step, "mu_product": product}


def _nadam(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Dozat, Incorporating Nesterov Momentum into Adam, 2016."""
    param, grad = _decayed(param, grad, n)
    new = _averaged(grad, state, n)
    root = (new["exp_avg_sq"] / n["correction"]).sqrt() + n["eps"]
    return param + n["of_grad"] * grad / root + n["of_mean"] * new["exp_avg"] / root, new


def _radam_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    (beta1, beta2), (step, count) = o["betas"], _counted(state)
    correction, longest = 1 - beta2**count, 2 / (1 - beta2) - 1
    length = longest - 2 * count * beta2**count / correction
    is_rectified, factor = length > 5, 1.0
    if is_rectified:
        rest = (length - 4) * (length - 2) * longest / ((longest - 4) * (longest - 2) * length)
        factor = rest**0.5 * correction**0.5
    size = -o["lr"] * factor / (1 - beta1**count)
    own = {"size": size, "adapted": float(is_rectified), "plain": float(not is_rectified)}
    return {**_decay(o, o["decoupled_weight_decay"]), **_means(o), **own}, {"step": step}


def _radam(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Liu et al., arXiv 1908.03265. Until it is rectified, from the sixth step on, the mean is not divided."""
    param, grad = _decayed(param, grad, n)
    new = _averaged(grad, state, n)
    root = (new["exp_avg_sq"].sqrt() + n["eps"]) * n["adapted"] + n["plain"]
    return param + n["size"] * new["exp_avg"] / root, new


def _adamax_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    step, count = _counted(state)
    return {**_decay(o), **_means(o), "size": -o["lr"] / (1 - o["betas"][0] ** count)}, {"step": step}


def _adamax(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Kingma and Ba, arXiv 1412.6980, section 7.1."""
    param, grad = _decayed(param, grad, n)
    mean = state["exp_avg"] * n["beta1"] + grad * n["rest1"]
    largest = torch.maximum(state["exp_inf"] * n["beta2"], grad.abs() + n["eps"])
    return param + n["size"] * mean / largest, {"exp_avg": mean, "exp_inf": largest}


def _adagrad_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    step, count = _counted(state)
    return {**_decay(o), "eps": o["eps"], "size": -o["lr"] / (1 + (count - 1) * o["lr_decay"])}, {"step": step}


def _adagrad(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Duchi et al., Adaptive Subgradient Methods, 2011."""
    param, grad = _decayed(param, grad, n)
    total = state["sum"] + grad * grad
    return param + n["size"] * grad / (total.sqrt() + n["eps"]), {"sum": total}


def _adadelta_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    own = {"rho": o["rho"], "rest": 1 - o["rho"], "eps": o["eps"], "size": -o["lr"]}
    return {**_decay(o), **own}, {"step": _counted(state)[0]}


def _adadelta(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Zeiler, arXiv 1212.5701."""
    param, grad = _decayed(param, grad, n)
    square = state["square_avg"] * n["rho"] + n["rest"] * grad * grad
    delta = (state["acc_delta"] + n["eps"]).sqrt() / (square + n["eps"]).sqrt() * grad
    deltas = state["acc_delta"] * n["rho"] + n["rest"] * delta * delta
    return param + delta * n["size"], {"square_avg": square, "acc_delta": deltas}


def _rmsprop_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    own = {"alpha": o["alpha"], "rest": 1 - o["alpha"], "eps": o["eps"], "size": -o["lr"], "centered": o["centered"]}
    return {**_decay(o), **own, "momentum": o["momentum"] or None}, {"step": _counted(state)[0]}


def _rmsprop_state(o: Options, shape: tuple[int, ...]) -> Slots:
    chosen = {"square_avg": True, "momentum_buffer": o["momentum"] > 0, "grad_avg": o["centered"]}
    return {slot: 0.0 for slot, is_kept in chosen.items() if is_kept}


def _rmsprop(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Tieleman and Hinton, lecture 6.5, 2012; centered: Graves, arXiv 1308.0850."""
    param, grad = _decayed(param, grad, n)
    square = state["square_avg"] * n["alpha"] + n["rest"] * grad * grad
    new = {"square_avg": square}
    if n["centered"]:
        mean = new["grad_avg"] = state["grad_avg"] * n["alpha"] + grad * n["rest"]
        square = square - mean * mean
    root = square.sqrt() + n["eps"]
    if n["momentum"] is None:
        return param + n["size"] * grad / root, new
    new["momentum_buffer"] = state["momentum_buffer"] * n["momentum"] + grad / root
    return param + new["momentum_buffer"] * n["size"], new


def _rprop_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    (down, up), (least, most) = o["etas"], o["step_sizes"]
    own = {"maximize": o["maximize"], "down": down, "up": up, "same": 1.0, "zero": 0.0, "least": least, "most": most}
    return own, {"step": _counted(state)[0]}


def _rprop(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Riedmiller and Braun, A direct adaptive method for faster backpropagation learning, 1993."""
    down, up, same, zero, least, most = (n[k].to(grad.dtype) for k in ("down", "up", "same", "zero", "least", "most"))
    grad = -grad if n["maximize"] else grad
    agreement = grad * state["prev"]
    factor = torch.where(agreement > 0, up, torch.where(agreement < 0, down, same))
    size = torch.minimum(torch.maximum(state["step_size"] * factor, least), most)
    grad = torch.where(agreement < 0, zero, grad)
    return param - grad.sign() * size, {"prev": grad, "step_size": size}


def _asgd_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    step, count = _counted(state)
    eta, mu = float(state.get("eta", _scalar(o["lr"]))), float(state.get("mu", 1.0))
    after = _scalar(o["lr"] / (1 + o["lambd"] * o["lr"] * count) ** o["alpha"])
    own = {"keep": 1 - o["lambd"] * eta, "size": -eta, "mu": mu, "rest": 1 - mu}
    return {**_decay(o), **own}, {"step": step, "eta": after, "mu": _scalar(1 / max(1, count - o["t0"]))}


def _asgd(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Polyak and Juditsky, Acceleration of stochastic approximation by averaging, 1992."""
    param, grad = _decayed(param, grad, n)
    param = param * n["keep"] + grad * n["size"]
    return param, {"ax": state["ax"] * n["rest"] + param * n["mu"]}


def _adafactor_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    step, count = _counted(state)
    part = count ** o["beta2_decay"]
    own = {"part": part, "rest": 1 - part, "rate": min(o["lr"], 1 / count**0.5), "d": o["d"]}
    return {**_decay(o, True), **own, "eps1": o["eps"][0], "eps2": o["eps"][1]}, {"step": step}


def _adafactor_state(o: Options, shape: tuple[int, ...]) -> Slots:
    if len(shape) < 2:
        return {"variance": 0.0}
    return {"row_var": (0.0, (*shape[:-1], 1)), "col_var": (0.0, (*shape[:-2], 1, shape[-1]))}


def _adafactor(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Shazeer and Stern, arXiv 1804.04235."""
    least = torch.finfo(n["dtype"]).eps if n["eps1"] is None else n["eps1"]
    rate = torch.maximum(param.norm() / param.numel() ** 0.5, n["eps2"]) * n["rate"]
    param, grad = _decayed(param, grad, n)
    if grad.dim() < 2:
        variance = state["variance"] * n["rest"] + grad * grad * n["part"]
        new = {"variance": variance}
    else:
        rows, columns = (grad.norm(dim=d, keepdim=True).square() / grad.shape[d] for d in (-1, -2))
        rows = state["row_var"] * n["rest"] + rows * n["part"]
        columns = state["col_var"] * n["rest"] + columns * n["part"]
        variance = rows * columns / rows.mean(dim=-2, keepdim=True).clamp(min=least)
        new = {"row_var": rows, "col_var": columns}
    update = variance.clamp(min=least * least).rsqrt() * grad
    size = (update.norm() / (update.numel() ** 0.5 * n["d"])).clamp(min=1.0)
    return param - update * (rate / size), new


def _muon_numbers(o: Options, state: SlotValues) -> tuple[dict[str, Any], SlotValues]:
    switches = {"nesterov": o["nesterov"], "steps": int(o["ns_steps"]), "adjust": o["adjust_lr_fn"]}
    own = {"momentum": o["momentum"], "rest": 1 - o["momentum"], "eps": o["eps"], "size": -o["lr"]}
    return {**_decay(o, True), **switches, **own, **dict(zip("abc", o["ns_coefficients"], strict=True))}, {}


def _muon(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    """Jordan et al., kellerjordan.github.io/posts/muon, 2024; Liu et al., arXiv 2502.16982. Products of 16 bits are
    added in float32 and rounded once, on any mesh."""

    def rounded(x: Tensor) -> Tensor:
        return x.bfloat16().float()

    param, grad = _decayed(param, grad, n)
    buffer = state["momentum_buffer"] * n["momentum"] + grad * n["rest"]
    x = rounded(grad * n["rest"] + buffer * n["momentum"] if n["nesterov"] else buffer)
    rows, columns = x.shape
    x = x.T if rows > columns else x
    x = rounded(x / torch.maximum(rounded(x.norm()), rounded(n["eps"])))
    for _ in range(n["steps"]):
        gram = rounded(x @ x.T)
        x = rounded(n["a"] * x + rounded(n["b"] * gram + n["c"] * (gram @ gram)) @ x)
    x = x.T if rows > columns else x
    ratios = {"match_rms_adamw": 0.2 * max(rows, columns) ** 0.5}
    ratio = ratios.get(n["adjust"], max(1.0, rows / columns) ** 0.5)
    return param + x.to(param.dtype) * (n["size"] * ratio), {"momentum_buffer": buffer}


def _zeros(*slots: str) -> Slots:
    return dict.fromkeys(slots, 0.0)


register_update(torch.optim.Adam, _adam, _adam_numbers, _adam_state)
register_update(torch.optim.AdamW, _adam, _adam_numbers, _adam_state)
register_update(
    torch.optim.SGD, _sgd, _sgd_numbers, lambda o, shape: _zeros("momentum_buffer") if o["momentum"] else {}
)
register_update(torch.optim.NAdam, _nadam, _nadam_numbers, _zeros("exp_avg", "exp_avg_sq"))
register_update(torch.optim.RAdam, _radam, _radam_numbers, _zeros("exp_avg", "exp_avg_sq"))
register_update(torch.optim.Adamax, _adamax, _adamax_numbers, _zeros("exp_avg", "exp_inf"))
register_update(
    torch.optim.Adagrad, _adagrad, _adagrad_numbers, lambda o, shape: {"sum": o["initial_accumulator_value"]}
)
register_update(torch.optim.Adadelta, _adadelta, _adadelta_numbers, _zeros("square_avg", "acc_delta"))
register_update(torch.optim.RMSprop, _rmsprop, _rmsprop_numbers, _rmsprop_state)
register_update(torch.optim.Rprop, _rprop, _rprop_numbers, lambda o, shape: {"prev": 0.0, "step_size": o["lr"]})
register_update(torch.optim.ASGD, _asgd, _asgd_numbers, _zeros("ax"))
register_update(torch.optim.Adafactor, _adafactor, _adafactor_numbers, _adafactor_state)
register_update(torch.optim.Muon, _muon, _muon_numbers, _zeros("momentum_buffer"))
