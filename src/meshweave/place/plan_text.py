"""Plans as text: `plan="..."`, and --plan on the command line."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from inspect import Parameter, signature
from pathlib import Path

from meshweave.errors import PlanError, near_miss
from meshweave.ir.mesh import Mesh
from meshweave.place.plans import Entry, Plan

_SCHEMES: Mapping[str, Callable[..., Plan]] = {
    "dp": Plan.dp,
    "fsdp": Plan.fsdp,
    "zero1": Plan.zero1,
    "zero2": Plan.zero2,
    "cp": Plan.cp,
    "shard_state": Plan.shard_state,
    "hf_tp": Plan.hf_tp,
    "auto_tp": Plan.auto_tp,
    "ep": Plan.ep,
    "experts": partial(Plan.ep, batch=False),
    "sequence": Plan.sequence_parallel,
    "replicate": Plan.replicate,
    "stages": Plan.stages,
    "keep": Plan.keep,
}


def parse_plan(text: str) -> Plan | None:
    """`fsdp:dp+hf_tp:tp`, or a .toml or .json file of globs; None for empty text: axis names then decide.

    Further arguments of a scheme follow its axis: `cp:cp:gather`, `cp:cp:ring:none`; by name in any order, behind those
    without: `cp:cp:balance=none`, `stages:pp:layout=Et*3|t*3L`.

    A file maps globs of parameters and modules to a layout ("[{tp}, {}]"), to style:axis ("colwise:tp") or to devices
    ("on:pp=1", "on:2,3"); its entry `plan` may list schemes.
    """
    if not text:
        return None
    if Path(text).suffix in (".toml", ".json"):
        return _plan_file(Path(text))
    plan = Plan()
    for part in text.split("+"):
        name, *arguments = part.strip().split(":")
        known = _parameters(name)
        named = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
        plain = [argument for argument in arguments if "=" not in argument]
        is_known = not {*named} - {*known[len(plain) :]} and arguments[: len(plain)] == plain
        if not (is_known and 0 < len(plain) <= len(known) and plain[0]):
            raise PlanError(
                f"'{part}' is not a scheme of plans",
                where=f"plan {text}",
                got=part,
                expected=f"{near_miss(name, _SCHEMES)}, as scheme:{':'.join(known or ('axis',))}",
                hint="for example fsdp:dp (ZeRO-3) or fsdp:dp+hf_tp:tp, or a .toml or .json file",
            )
        plan = plan + _SCHEMES[name](*plain, **named)
    return plan


def _parameters(scheme: str) -> tuple[str, ...]:
    """The names of a scheme's arguments; none of an unknown one. An argument by keyword alone has no text."""
    parameters = signature(_SCHEMES[scheme]).parameters.values() if scheme in _SCHEMES else ()
    return tuple(each.name for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD)


def plan_of(plan: Plan | str | None) -> Plan | None:
    """A plan itself or as text. PlanError for anything else."""
    if plan is None or isinstance(plan, Plan):
        return plan
    if not isinstance(plan, str):
        expected = "a meshweave.Plan, or its text such as fsdp:dp+hf_tp:tp"
        raise PlanError("not a plan", where="plan=", got=type(plan).__name__, expected=expected)
    return parse_plan(plan)


def _plan_file(path: Path) -> Plan:
    try:
        entries = tomllib.loads(path.read_text()) if path.suffix == ".toml" else json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise PlanError("the plan cannot be read", where=str(path), got=str(error)) from error
    wrong = [k for k, v in entries.items() if not isinstance(v, str)] if isinstance(entries, dict) else ["the file"]
    if wrong:
        raise PlanError(
            "a plan file maps globs to layouts",
            where=str(path),
            got=f"{wrong[0]} is not text",
            expected='"layers.*.up.weight" = "[{tp}, {}]" or "*.up" = "colwise:tp"',
            hint="put globs with dots in quotes",
        )
    plan = parse_plan(entries.pop("plan", "")) or Plan()
    for glob, value in entries.items():
        style, colon, rest = value.partition(":")
        if value.lstrip().startswith("[") or not colon:
            plan = plan + Plan([Entry("layout", glob=glob, text=value)])
        else:
            plan = plan + (Plan.on({glob: rest}) if style == "on" else Plan.tp(rest, {glob: style}))
    return plan


def data_parallel_size(mesh: Mesh, plan: Plan | None) -> int:
    """Number of pieces that the batch is cut into."""
    named = {"dp", "fsdp", "ep"} if plan is None else {e.axis for e in plan.entries if e.kind == "batch"}
    return mesh.flat_size([axis for axis in mesh.axis_names if axis in named])
