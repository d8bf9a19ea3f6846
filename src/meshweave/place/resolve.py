"""Resolving a plan for a model: which parameters, modules and axes it names."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from meshweave.errors import MeshError, PlanError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.plans import Entry, Plan, Resolved
from meshweave.place.stage_layout import StageLayout
from meshweave.place.styles import HF_STYLES, apply_param_style, apply_style, expert_parameters, hugging_face_plan


def default_plan(model: nn.Module, mesh: Mesh) -> Plan:
    """The meaning of axis names without a plan: dp, fsdp, cp, tp and pp as usual, ep for a model that has experts;
    other names have none."""
    usual: dict[str, Callable[[str], Plan]] = {
        "dp": Plan.dp,
        "fsdp": Plan.fsdp,
        "cp": Plan.cp,
        "tp": Plan.hf_tp if hf_tp_plan(model) else Plan.auto_tp,
        "pp": Plan.stages,
    }
    if "ep" in mesh.axis_names and expert_parameters(model):
        usual["ep"] = Plan.ep
    known = [axis for axis, size in zip(mesh.axis_names, mesh.shape, strict=True) if axis in usual]
    return sum((usual[axis](axis) for axis in known if axis != "pp" or mesh.size(axis) > 1), Plan())


def batch_axes(mesh: Mesh, plan: Plan | None) -> tuple[str, ...]:
    """The axes that cut the rows of a batch, the slowest first."""
    entries = (plan or Plan()).entries
    named = {"dp", "fsdp", "ep"} if plan is None else {entry.axis for entry in entries if entry.kind == "batch"}
    return tuple(axis for axis in mesh.axis_names if axis in named)


def hf_tp_plan(model: nn.Module) -> dict[str, str]:
    """The tp plan of a Hugging Face model, or of models in a wrapper; empty if there is none."""
    return hugging_face_plan(model, "tp_plan", "_tp_plan")


def resolve(plan: Plan | None, model: nn.Module, mesh: Mesh) -> Resolved:
    """Read a plan against a model; its layers are put on stages once the step is captured (`place.stages`). Raises
    PlanError if a glob, axis or style matches nothing, with near misses."""
    resolved = Resolved(is_default=plan is None)
    _check_zero(plan)
    for entry in (default_plan(model, mesh) if plan is None else plan).entries:
        _read(resolved, entry, model, mesh)
    if resolved.accumulate_in != "auto":  # ZeRO-1 and 2
        resolved.state_axes += [axis for axis in resolved.context_axes if axis not in resolved.state_axes]
    return resolved


def _check_zero(plan: Plan | None) -> None:
    """Raise PlanError if a plan has both ZeRO-1 and ZeRO-2, or one of them over an axis that also has ZeRO-3."""
    entries = () if plan is None else plan.entries
    zero = [entry for entry in entries if entry.kind == "zero"]
    schemes = {"zero1" if entry.text == "whole" else "zero2" for entry in zero}
    if {entry.axis for entry in entries if entry.kind == "state"} & {entry.axis for entry in zero}:
        schemes.add("fsdp or shard_state")
    if len(schemes) > 1:
        got = " and ".join(sorted(schemes, reverse=True))
        raise PlanError("stages of ZeRO exclude each other", where="plan", got=got, hint="keep one of them")


def _read(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    if entry.axis:
        mesh.axis_index(entry.axis)
        resolved.named.add(entry.axis)
    _READ[entry.kind](resolved, entry, model, mesh)


# What axis names without a usual meaning commonly stand for.
_USUAL = {
    "ep": "it means expert parallelism for models with parameters stacked over experts, found by a Hugging Face "
    "expert plan or in modules named experts; parameters of other names: "
    'mw.Plan({"*.NAME": "[{ep}, {}, {}]"}) + mw.Plan.dp("ep")',
}


def check_axes(resolved: Resolved, mesh: Mesh, by_operators: Collection[str] = ()) -> None:
    """Raise PlanError unless every axis of the mesh is used, by the plan or by operators in the model."""
    used = {*resolved.named, *by_operators}
    unused = [a for a, n in zip(mesh.axis_names, mesh.shape, strict=True) if n > 1 and a not in used]
    if unused and resolved.is_default:
        raise PlanError(
            f"axis '{unused[0]}' has no usual meaning",
            where=f"mesh {mesh}",
            got=unused[0],
            expected="dp, fsdp, cp, tp, pp or (with experts) ep, or a plan that uses the axis",
            hint=_USUAL.get(unused[0], f'pass a plan, for example mw.Plan.dp("{unused[0]}")'),
        )
    if unused:
        raise PlanError(
            f"the plan does not use axis {', '.join(unused)}",
            where=f"mesh {mesh}",
            hint=f'use it, or write mw.Plan.replicate("{unused[0]}") to let its devices repeat the work',
        )


def _batch(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    if entry.axis not in resolved.batch_axes:
        resolved.batch_axes.append(entry.axis)


def _state(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    if entry.axis not in resolved.state_axes:
        resolved.state_axes.append(entry.axis)


def _zero(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    _state(resolved, entry, model, mesh)
    resolved.kept |= {name for name, _ in model.named_parameters(remove_duplicate=False)}
    resolved.accumulate_in = entry.text


def _context(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    if entry.axis not in resolved.context_axes:
        resolved.context_axes.append(entry.axis)
    resolved.attention, resolved.balance = entry.text.split(":")


def _style(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    modules = _matching(entry.glob, dict(model.named_modules()))
    if not modules:
        raise _nothing(entry.glob, (n for n, _ in model.named_modules() if n), "module")
    apply_style(resolved, model, modules, entry.text, entry.axis, entry.glob)


def _hf_tp(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    styles = hf_tp_plan(model)
    if not styles:
        raise PlanError(
            "the model has no Hugging Face tp plan",
            where=type(model).__name__,
            hint=f'use mw.Plan.auto_tp("{entry.axis}"), or mw.Plan.tp("{entry.axis}", {{"*.q_proj": "colwise", ...}})',
        )
    modules, params = dict(model.named_modules()), dict(model.named_parameters())
    hits = 0
    for glob, style in styles.items():
        of_modules = _matching(glob, modules)
        apply = apply_style if of_modules else apply_param_style
        names = [*(of_modules or _matching(glob, params))]
        hits += len(names)
        if names and style not in HF_STYLES:
            raise PlanError(f"tp style '{style}' is not supported", where=names[0], expected=", ".join(HF_STYLES))
        if names and HF_STYLES[style]:
            apply(resolved, model, names, HF_STYLES[style], entry.axis, glob)
    if not hits:
        raise PlanError("the model's tp plan matches none of its modules", got=", ".join(styles))


def _experts(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    stacked = expert_parameters(model)
    if not stacked:
        raise _no_experts(entry.axis, model)
    for name, where in stacked.items():
        resolved.shard(name, entry.axis, 0, where)


def _no_experts(axis: str, model: nn.Module) -> PlanError:
    """The error for a model without parameters that are stacked over experts."""
    expected = "a Hugging Face model with an expert plan, or modules named experts with stacked parameters"
    lists = [n for n, m in model.named_modules() if n.rpartition(".")[2] == "experts" and isinstance(m, nn.ModuleList)]
    if lists:
        return PlanError(
            "the experts are modules of their own, not parameters stacked over experts",
            where=f"{lists[0]}, experts over {axis}",
            expected=expected,
            hint="stack each weight over the experts into a single parameter [experts, ...] (torch.stack; torch.bmm "
            "or torch.nn.functional.grouped_mm instead of the loop), or keep the modules and use dp, fsdp or tp",
        )
    return PlanError(
        "no parameters stacked over experts were found in the model",
        where=f"experts over {axis}",
        got=type(model).__name__,
        expected=expected,
        hint=f'parameters [experts, ...] of another name: mw.Plan({{"*.NAME": "[{{{axis}}}, {{}}, {{}}]"}})',
    )


def _auto_tp(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    resolved.auto_axes.append(entry.axis)


def _sequence(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    """Pin the input of the first layer and the output of every layer of the model's longest list of layers, and the
    layers' norms: the gradient of a norm's output is then scattered to where the norm runs, mirroring the gather of its
    output."""
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)]
    if not lists:
        raise PlanError("sequence parallel needs a list of layers", where=type(model).__name__, got="no nn.ModuleList")
    name, layers = max(lists, key=lambda item: len(item[1]))
    resolved.pins += [(f"{name}.0", "in", f"{entry.axis}=1")]
    outputs = [*(f"{name}.{i}" for i in range(len(layers))), *_norms(model, name)]
    resolved.pins += [(output, "out", f"{entry.axis}=1") for output in outputs]


def _norms(model: nn.Module, layers: str) -> list[str]:
    """The norms over the model's width inside and beside a list of layers: modules whose parameters are all vectors."""
    around = layers.rpartition(".")[0]
    inside = {n: m for n, m in model.named_modules() if n.startswith(f"{layers}.") or n.rpartition(".")[0] == around}
    params = {n: list(m.parameters()) for n, m in inside.items() if not list(m.children())}
    sizes = {n: ps[0].numel() for n, ps in params.items() if ps and all(p.dim() == 1 for p in ps)}
    return [n for n, size in sizes.items() if size == max(sizes.values())]


def _idle(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    pass


def _layout(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    layout = Layout.parse(entry.text, mesh)
    if layout.partial:
        raise PlanError("a plan cannot ask for partial values", where=entry.glob, got=entry.text)
    resolved.named.update(layout.sharded_axes)
    params = _matching(entry.glob, dict(model.named_parameters()))
    for name in params:
        layout.check_rank(model.get_parameter(name).shape)
        for axis in mesh.axis_names:
            resolved.shard(name, axis, layout.dim_of(axis), entry.glob)
    glob, colon, side = entry.glob.partition(":")
    modules = [] if params else _matching(glob, dict(model.named_modules()))
    constraint = ";".join(_constraint(layout, mesh))
    resolved.pins += [(name, side if colon else "out", constraint) for name in modules]
    if not params and not modules:
        names = [n for n, _ in model.named_parameters()] + [n for n, _ in model.named_modules() if n]
        raise _nothing(entry.glob, names, "parameter or module")


def _keep(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    params = dict(model.named_parameters(remove_duplicate=False))
    modules = _matching(entry.glob, dict(model.named_modules()))
    names = {*_matching(entry.glob, params), *(n for n in params for m in modules if n.startswith(f"{m}."))}
    if not names:
        raise _nothing(entry.glob, [*params, *(n for n, _ in model.named_modules() if n)], "parameter or module")
    resolved.kept |= names


def _constraint(layout: Layout, mesh: Mesh) -> Iterator[str]:
    for axis in mesh.axis_names:
        if layout.dim_of(axis) is None:
            yield f"{axis}=r"
    for d, dim in enumerate(layout.dims):
        yield from (f"{axis}={d}" for axis in dim.axes)


def _on(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    modules = _matching(entry.glob, dict(model.named_modules()))
    if not modules:
        raise _nothing(entry.glob, (n for n, _ in model.named_modules() if n), "module")
    place_modules(resolved, modules, _devices(entry.text, mesh, entry.glob), mesh, entry.glob)


def place_modules(resolved: Resolved, modules: Iterable[str], where: Mesh, mesh: Mesh, glob: str) -> None:
    """Record where modules run. PlanError if another entry says otherwise."""
    resolved.named.update(a for a in mesh.axis_names if a not in where.axis_names or where.size(a) != mesh.size(a))
    for name in modules:
        home = resolved.homes.setdefault(name, where)
        if home != where:
            raise PlanError(
                f"the plan assigns {name} to two sets of devices",
                where=glob,
                got=f"{list(home.devices)} and {list(where.devices)}",
                hint="let a single glob match it",
            )


_COORDINATES = re.compile(r"\w+=\d+(,\w+=\d+)*")
_IDS = re.compile(r"\d+(,\d+)*")


def _devices(text: str, mesh: Mesh, glob: str) -> Mesh:
    """The devices of a plan's text: `pp=1`, ids `2,3`, or a mesh `dp=2 on [2, 3]`."""
    plain = text.replace(" ", "")
    if _COORDINATES.fullmatch(plain):
        return mesh.at(**{axis: int(i) for axis, _, i in (part.partition("=") for part in plain.split(","))})
    if _IDS.fullmatch(plain):
        ids = [int(i) for i in plain.split(",")]
        submesh = Mesh(f"d={len(ids)}" if len(ids) > 1 else "", devices=ids)
    else:
        submesh = Mesh.parse(text)
    missing = [d for d in submesh.devices if d not in mesh]
    if missing:
        raise MeshError(
            "the plan names devices that the mesh lacks",
            where=glob,
            got=", ".join(map(str, missing)),
            expected=f"devices of mesh {mesh}: {_few(mesh.devices)}",
        )
    return submesh


def _few(ids: tuple[int, ...]) -> str:
    return ", ".join(map(str, ids)) if len(ids) <= 8 else f"{ids[0]} to {ids[-1]}"


def _stages(resolved: Resolved, entry: Entry, model: nn.Module, mesh: Mesh) -> None:
    wanted, order = entry.text.split(":")
    is_layout = wanted and not wanted.isdecimal()
    resolved.staged.append((entry.axis, StageLayout.parse(wanted) if is_layout else int(wanted or 0), order))


_READ: dict[str, Callable[[Resolved, Entry, nn.Module, Mesh], None]] = {
    "batch": _batch,
    "state": _state,
    "zero": _zero,
    "context": _context,
    "style": _style,
    "hf_tp": _hf_tp,
    "auto_tp": _auto_tp,
    "experts": _experts,
    "sequence": _sequence,
    "layout": _layout,
    "on": _on,
    "stages": _stages,
    "keep": _keep,
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
