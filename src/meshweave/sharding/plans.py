"""Plans: what a user says about layouts. Plans add up; a plan that names nothing in the model is an error."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from meshweave.errors import PlanError
from meshweave.ir import ops
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh

STYLES = ("colwise", "rowwise", "sequence", "replicate")

# The names that Hugging Face tp plans use (transformers/integrations/tensor_parallel.py), and what they mean here.
# "gather output" and the like say how a module's result is laid out, which placement decides by cost.
_HF_STYLES = {
    "colwise": "colwise",
    "colwise_rep": "colwise",
    "colwise_gather_output": "colwise",
    "rowwise": "rowwise",
    "rowwise_rep": "rowwise",
    "rowwise_split_input": "rowwise",
    "embedding_rowwise": "rowwise",
    "sequence_parallel": "sequence",
    "replicate": "replicate",
    "replicated_with_grad_allreduce": "replicate",
    "all_reduce": "replicate",
}


@dataclass(frozen=True, slots=True)
class Entry:
    """One statement: `kind` is batch, state, style, layout, hf_tp, auto_tp, sequence or idle."""

    kind: str
    axis: str = ""
    glob: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A sum of entries.

    `Plan({"layers.*.mlp.up": "[{tp}, {}]"})` gives globs over parameter and module names layouts;
    `Plan.tp("tp", {"*.q_proj": "colwise"})` gives modules the familiar styles; `dp`, `fsdp`, `hf_tp`, `auto_tp` and
    `sequence_parallel` are the usual schemes over one axis. `a + b` holds both.
    """

    entries: tuple[Entry, ...] = ()

    def __init__(self, layouts: Mapping[str, str] | Iterable[Entry] = ()) -> None:
        if isinstance(layouts, Mapping):
            made = tuple(Entry("layout", glob=glob, text=str(text)) for glob, text in layouts.items())
        else:
            made = tuple(layouts)
        object.__setattr__(self, "entries", made)

    def __add__(self, other: Plan) -> Plan:
        return Plan((*self.entries, *other.entries))

    @staticmethod
    def dp(axis: str) -> Plan:
        """Data parallel: the batch is sharded over `axis`, parameters are whole everywhere."""
        return Plan([Entry("batch", axis)])

    @staticmethod
    def fsdp(axis: str) -> Plan:
        """ZeRO-3: batch, parameters, gradients and optimizer state sharded over `axis`; parameters gathered where used,
        in forward and again in backward, and never kept whole."""
        return Plan([Entry("batch", axis), Entry("state", axis)])

    @staticmethod
    def tp(axis: str, styles: Mapping[str, str]) -> Plan:
        """Tensor parallel: module globs to colwise, rowwise, sequence or replicate."""
        for glob, style in styles.items():
            if style not in STYLES:
                near = difflib.get_close_matches(style, STYLES, 1)
                hint = f"did you mean {near[0]}?" if near else ""
                raise PlanError(f"'{style}' is no style", where=glob, got=style, expected=", ".join(STYLES), hint=hint)
        return Plan([Entry("style", axis, glob, style) for glob, style in styles.items()])

    @staticmethod
    def hf_tp(axis: str) -> Plan:
        """Tensor parallel as the Hugging Face model's own tp plan says."""
        return Plan([Entry("hf_tp", axis)])

    @staticmethod
    def auto_tp(axis: str) -> Plan:
        """Tensor parallel with the column or row choice per weight that moves the fewest bytes."""
        return Plan([Entry("auto_tp", axis)])

    @staticmethod
    def sequence_parallel(axis: str) -> Plan:
        """Between layers activations are sharded over `axis` along dim 1, the sequence."""
        return Plan([Entry("sequence", axis)])

    @staticmethod
    def replicate(axis: str) -> Plan:
        """Every device along `axis` does the same: for an axis that should stay unused."""
        return Plan([Entry("idle", axis)])


@dataclass(slots=True)
class Resolved:
    """A plan read against one model: what placement and capture need of it.

    `shards[param][axis]` is the dim that the axis shards; `pins` are (module, "in" or "out", constraint).
    """

    batch_axes: list[str] = field(default_factory=list)
    state_axes: list[str] = field(default_factory=list)
    auto_axes: list[str] = field(default_factory=list)
    shards: dict[str, dict[str, int]] = field(default_factory=dict)
    pins: list[tuple[str, str, str]] = field(default_factory=list)
    named: set[str] = field(default_factory=set)

    def shard(self, param: str, axis: str, dim: int | None, where: str) -> None:
        """Note that `axis` shards `dim` of a parameter (None: leaves it whole). PlanError if it was said otherwise."""
        held = self.shards.setdefault(param, {})
        value = -1 if dim is None else dim
        if held.get(axis, value) != value:
            raise PlanError(
                f"the plan says two things about {param} over {axis}",
                where=where,
                got=f"dim {held[axis]} and {'replicate' if dim is None else f'dim {dim}'}",
                hint="let one glob name it",
            )
        held[axis] = value


def default_plan(model: nn.Module, mesh: Mesh) -> Plan:
    """What axis names mean without a plan: dp, fsdp and tp as usual. PlanError for another name of size above 1."""
    plan = Plan()
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        known: dict[str, Callable[[], Plan]] = {
            "dp": lambda a=axis: Plan.dp(a),  # type: ignore[misc]
            "fsdp": lambda a=axis: Plan.fsdp(a),  # type: ignore[misc]
            "tp": lambda a=axis: Plan.hf_tp(a) if hf_tp_plan(model) else Plan.auto_tp(a),  # type: ignore[misc]
        }
        if axis in known:
            plan = plan + known[axis]()
        elif size > 1:
            raise PlanError(
                f"axis '{axis}' has no usual meaning",
                where=f"mesh {mesh}",
                got=axis,
                expected="dp, fsdp or tp, or a plan that says what the axis is for",
                hint=f'pass a plan, for example mw.Plan.dp("{axis}")',
            )
    return plan


def hf_tp_plan(model: nn.Module) -> dict[str, str]:
    """The tp plan of a Hugging Face model, module glob -> style name; empty where it has none."""
    plan = getattr(model, "tp_plan", None) or getattr(model, "_tp_plan", None) or {}
    return dict(plan) if isinstance(plan, Mapping) else {}


def resolve(plan: Plan, model: nn.Module, mesh: Mesh) -> Resolved:
    """Read a plan against a model. Raises PlanError where a glob, axis or style fits nothing, with near misses."""
    found = Resolved()
    for entry in plan.entries:
        if entry.axis:
            mesh.axis_index(entry.axis)
            found.named.add(entry.axis)
        _READ[entry.kind](found, entry, model, mesh)
    unused = [a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1 and a not in found.named]
    if unused:
        raise PlanError(
            f"the plan does not use axis {', '.join(unused)}",
            where=f"mesh {mesh}",
            hint=f'say what it is for, or mw.Plan.replicate("{unused[0]}") to let its devices repeat the work',
        )
    return found


def _batch(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    if entry.axis not in found.batch_axes:
        found.batch_axes.append(entry.axis)


def _state(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    if entry.axis not in found.state_axes:
        found.state_axes.append(entry.axis)


def _style(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    modules = _matching(entry.glob, dict(model.named_modules()))
    if not modules:
        raise _nothing(entry.glob, (n for n, _ in model.named_modules() if n), "module")
    for name in modules:
        apply_style(found, model, name, entry.text, entry.axis, entry.glob)


def _hf_tp(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    styles = hf_tp_plan(model)
    if not styles:
        raise PlanError(
            "the model has no Hugging Face tp plan",
            where=type(model).__name__,
            hint=f'use mw.Plan.auto_tp("{entry.axis}"), or mw.Plan.tp("{entry.axis}", {{"*.q_proj": "colwise", ...}})',
        )
    modules = dict(model.named_modules())
    hits = 0
    for glob, style in styles.items():
        for name in _matching(glob, modules):
            hits += 1
            if style not in _HF_STYLES:
                raise PlanError(f"tp style '{style}' is not supported", where=name, expected=", ".join(_HF_STYLES))
            apply_style(found, model, name, _HF_STYLES[style], entry.axis, glob)
    if not hits:
        raise PlanError("the model's tp plan names none of its modules", got=", ".join(styles))


def _auto_tp(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    found.auto_axes.append(entry.axis)


def _sequence(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    """Pins what enters the first and leaves every layer of the model's longest list of layers, and the layers' norms:
    the gradient of a norm's output is then scattered to where the norm runs, as its output was gathered from there."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise PlanError("sequence parallel needs a list of layers", where=type(model).__name__, got="no nn.ModuleList")
    name, layers = max(lists, key=lambda item: len(item[1]))
    found.pins += [(f"{name}.0", "in", f"{entry.axis}=1")]
    outputs = [*(f"{name}.{i}" for i in range(len(layers))), *_norms(model, name)]
    found.pins += [(output, "out", f"{entry.axis}=1") for output in outputs]


def _norms(model: nn.Module, layers: str) -> list[str]:
    """The norms over the model's width in a list of layers and beside it: modules whose parameters are all vectors."""
    around = layers.rpartition(".")[0]
    inside = {n: m for n, m in model.named_modules() if n.startswith(f"{layers}.") or n.rpartition(".")[0] == around}
    params = {n: list(m.parameters()) for n, m in inside.items() if not list(m.children())}
    sizes = {n: ps[0].numel() for n, ps in params.items() if ps and all(p.dim() == 1 for p in ps)}
    return [n for n, size in sizes.items() if size == max(sizes.values())]


def _idle(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    pass


def _layout(found: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    layout = Layout.parse(entry.text, mesh)
    if layout.partial:
        raise PlanError("a plan cannot ask for partial values", where=entry.glob, got=entry.text)
    found.named.update(layout.sharded_axes)
    params = _matching(entry.glob, dict(model.named_parameters()))
    for name in params:
        layout.check_rank(model.get_parameter(name).shape)
        for axis in mesh.axis_names:
            found.shard(name, axis, layout.dim_of(axis), entry.glob)
    glob, colon, side = entry.glob.partition(":")
    modules = [] if params else _matching(glob, dict(model.named_modules()))
    constraint = ";".join(_constraint(layout, mesh))
    found.pins += [(name, side if colon else "out", constraint) for name in modules]
    if not params and not modules:
        names = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_modules() if n]
        raise _nothing(entry.glob, names, "parameter or module")


def _constraint(layout: Layout, mesh: Mesh) -> Iterator[str]:
    for axis in mesh.axis_names:
        if layout.dim_of(axis) is None:
            yield f"{axis}=r"
    for d, dim in enumerate(layout.dims):
        yield from (f"{axis}={d}" for axis in dim.axes)


_READ: dict[str, Callable[[Resolved, Entry, nn.Module, Mesh], None]] = {
    "batch": _batch,
    "state": _state,
    "style": _style,
    "hf_tp": _hf_tp,
    "auto_tp": _auto_tp,
    "sequence": _sequence,
    "layout": _layout,
    "idle": _idle,
}


def _matching(glob: str, names: Mapping[str, Any]) -> list[str]:
    return [name for name in names if name and (fnmatchcase(name, glob) or fnmatchcase(name, f"*.{glob}"))]


def _nothing(glob: str, names: Iterable[str], kind: str) -> PlanError:
    general = list(dict.fromkeys(re.sub(r"\b\d+\b", "*", name) for name in names))
    near = difflib.get_close_matches(glob, general, 3, 0.4)
    return PlanError(
        f"the plan names no {kind} of the model",
        got=glob,
        expected=f"one of {', '.join(near)}" if near else f"a {kind}, for example {', '.join(general[:3])}",
        hint="globs match whole names; * matches any part",
    )


# Module type -> style -> parameter -> the dim that the axis shards. Linear weights are [out, in] (torch.nn.Linear),
# Hugging Face Conv1D weights [in, out] (transformers/pytorch_utils.py), convolutions [out, in, ...].
_OUT_IN = {"colwise": {"weight": 0, "bias": 0}, "rowwise": {"weight": 1}}
_IN_OUT = {"colwise": {"weight": 1, "bias": 0}, "rowwise": {"weight": 0}}
_TABLES = {
    "Linear": _OUT_IN,
    "Embedding": _IN_OUT,
    "Conv1D": _IN_OUT,
    "Conv2d": _OUT_IN,
}


def style_dims(module: nn.Module) -> Mapping[str, Mapping[str, int]] | None:
    """What colwise and rowwise mean for a module, or None where they mean nothing."""
    return next((_TABLES[c.__name__] for c in type(module).__mro__ if c.__name__ in _TABLES), None)


def apply_style(found: Resolved, model: nn.Module, name: str, style: str, axis: str, where: str) -> None:
    """Note what a style asks of one module's parameters and values."""
    module = model.get_submodule(name)
    if style == "sequence":
        found.pins.append((name, "out", f"{axis}=1"))
        return
    if style == "replicate":
        for param, _ in module.named_parameters(prefix=name):
            found.shard(param, axis, None, where)
        return
    table = style_dims(module)
    if table is None:
        raise PlanError(
            f"{style} means nothing for a {type(module).__name__}",
            where=f"{name} (from {where})",
            expected=f"a module of type {', '.join(_TABLES)}",
            hint="give its parameters layouts instead",
        )
    canonical = {id(p): n for n, p in model.named_parameters()}
    for param, value in module.named_parameters(recurse=False):
        found.shard(canonical[id(value)], axis, table[style].get(param), where)


def pinning(found: Resolved) -> Callable[[nn.Module], Any]:
    """The context in which capture traces the model: hooks that pin the values that the plan names."""

    @contextmanager
    def hooks(model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, side, constraint in found.pins:
                module = model.get_submodule(name)
                hook = _Hook(constraint)
                handle = (
                    module.register_forward_pre_hook(hook.before)
                    if side == "in"
                    else module.register_forward_hook(hook.after)
                )
                stack.callback(handle.remove)
            yield

    return hooks


@dataclass(frozen=True, slots=True)
class _Hook:
    """Pins the first floating-point tensor that enters or leaves a module."""

    constraint: str

    def before(self, module: nn.Module, args: Any) -> Any:
        return self._pin(args)

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return self._pin(result)

    def _pin(self, value: Any) -> Any:
        leaves, tree = pytree.tree_flatten(value)
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > self._highest():
                leaves[i] = ops.pin(leaf, self.constraint, False)
                break
        return pytree.tree_unflatten(leaves, tree)

    def _highest(self) -> int:
        dims = [part.partition("=")[2] for part in self.constraint.split(";")]
        return max((int(d) for d in dims if d != "r"), default=0)
