"""move: how a value gets from a layout to another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from rich.markup import escape

from meshweave.cli.command import Options, argument, option
from meshweave.cli.costs import parse_costs
from meshweave.cli.screen import Screen, attributes_of
from meshweave.errors import MeshweaveError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.place.movement.plan import MovePlan, plan_move


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveOptions(Options):
    source: str = argument("SRC", "layout, such as '[{a}, {}] partial(sum: b)'")
    target: str = argument("DST", "layout")
    mesh: str = option(help="named axes, such as a=4,b=8, or 'a=2 on [4, 5]'")
    shape: str = option(help="shape of the whole tensor, such as 4096,4096")
    to_mesh: str | None = option(None, "mesh of DST, if different")
    dtype: str = option("float32", "a torch dtype")
    profile: str = option("", "a machine such as h100, its file, or alpha=seconds,axis=bytes per second")
    memory_cap: int | None = option(None, "most bytes in and out of a step; by default a share of the memory", min=0)


def move(screen: Screen, options: MoveOptions) -> int:
    """Show the cheapest plan from layout SRC to layout DST with its certificate."""
    start = Mesh.parse(options.mesh)
    goal = start if options.to_mesh is None else Mesh.parse(options.to_mesh)
    source, target = Layout.parse(options.source, start), Layout.parse(options.target, goal)
    shape, dtype = _shape(options.shape), _dtype(options.dtype)
    costs = parse_costs(options.profile, (*start.axis_names, *goal.axis_names))
    plan = plan_move(source, target, shape, dtype, costs, memory_cap_bytes=options.memory_cap)
    return _show(screen, plan, shape, options.dtype)


def _show(screen: Screen, plan: MovePlan, shape: tuple[int, ...], dtype: str) -> int:
    where = " -> ".join(dict.fromkeys(str(end.mesh) or "one device" for end in (plan.source, plan.target)))
    screen.say(escape(f"{dtype} {list(shape)} on {where}\n{plan}"))
    screen.result(
        True,
        source=str(plan.source),
        target=str(plan.target),
        **_cost(plan),
        **attributes_of(plan, "kind", "lower_bound_seconds", "numerics"),
    )
    return 0


def _cost(plan: MovePlan) -> dict[str, Any]:
    steps = [
        {"text": str(s), "target": str(s.target), **attributes_of(s, "kind", "axes", "bytes_received", "seconds")}
        for s in plan.steps
    ]
    return {"steps": steps, **attributes_of(plan, "seconds", "bytes_received", "peak_bytes")}


def _shape(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() for part in parts):
        raise MeshweaveError("not a shape", where="--shape", got=repr(text), expected="sizes such as 4096,4096")
    return tuple(map(int, parts))


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text, None)
    if not isinstance(dtype, torch.dtype):
        raise MeshweaveError("not a dtype", where="--dtype", got=repr(text), expected="float32, bfloat16, ...")
    return dtype
