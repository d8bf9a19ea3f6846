"""Moves between meshes, run: every device must end with exactly its piece."""

from __future__ import annotations

import torch
from tests.expand.test_moves import full_value, pieces_of
from torch import Tensor, fx

from meshweave.ir import ops
from meshweave.ir.graph import Input, Origin, Spec, StepGraph
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_placed, verify_rank
from meshweave.place.expand.expand import expand
from meshweave.place.movement.plan import plan_move
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.interfaces import World

Case = tuple[str, Mesh, str, Mesh, str]  # name, source mesh and layout, target mesh and layout


def mesh(axes: str, *devices: int) -> Mesh:
    return Mesh(axes, devices=devices)


FOUR = Mesh("d=4")
CASES: list[Case] = [
    ("one to one", mesh("", 0), "[{}, {}]", mesh("", 1), "[{}, {}]"),
    ("one to two", mesh("", 1), "[{}, {}]", mesh("t=2", 0, 1), "[{}, {t}]"),
    ("two to one", mesh("t=2", 0, 1), "[{t}, {}]", mesh("", 1), "[{}, {}]"),
    ("one to many", mesh("", 2), "[{}, {}]", mesh("t=3", 0, 1, 3), "[{t}, {}]"),
    ("one to replicas", mesh("", 0), "[{}, {}]", mesh("t=3", 1, 2, 3), "[{}, {}]"),
    ("a gather of several producers", mesh("t=3", 0, 1, 3), "[{t}, {}]", mesh("", 2), "[{}, {}]"),
    ("two to two", mesh("t=2", 0, 1), "[{t}, {}]", mesh("t=2", 2, 3), "[{t}, {}]"),
    ("rows to columns", mesh("t=2", 0, 1), "[{t}, {}]", mesh("t=2", 2, 3), "[{}, {t}]"),
    ("three to two", mesh("t=3", 0, 1, 2), "[{}, {t}]", mesh("u=2", 3, 0), "[{u}, {}]"),
    ("overlapping in part", mesh("t=2", 0, 1), "[{t}, {}]", mesh("t=3", 1, 2, 0), "[{t}, {}]"),
    ("swapped devices", mesh("t=2", 0, 1), "[{t}, {}]", mesh("t=2", 1, 0), "[{t}, {}]"),
    ("another order", mesh("t=4", 0, 1, 2, 3), "[{}, {t}]", mesh("t=4", 2, 0, 3, 1), "[{}, {t}]"),
    ("other axes", mesh("a=2,b=2", 0, 1, 2, 3), "[{a}, {b}]", mesh("t=4", 3, 2, 1, 0), "[{t}, {}]"),
    ("nested axes", mesh("a=2,b=2", 0, 2, 1, 3), "[{b,a}, {}]", mesh("c=2", 1, 2), "[{}, {c}]"),
    ("whole to part", FOUR, "[{}, {}]", mesh("t=2", 2, 3), "[{t}, {}]"),
    ("part to whole", mesh("t=2", 2, 3), "[{t}, {}]", FOUR, "[{}, {}]"),
    ("pieces to the whole mesh", mesh("t=2", 1, 3), "[{}, {t}]", FOUR, "[{d}, {}]"),
    ("a sum on other devices", mesh("t=2", 0, 1), "[{}, {}] partial(sum: t)", mesh("t=2", 2, 3), "[{t}, {}]"),
    ("a sum on more devices", mesh("t=3", 0, 1, 2), "[{}, {}] partial(sum: t)", FOUR, "[{}, {}]"),
    ("a maximum on one", mesh("t=2", 3, 0), "[{}, {}] partial(max: t)", mesh("", 1), "[{}, {}]"),
    ("blocks", mesh("t=2", 0, 1), "[{t}x2, {}]", mesh("t=2", 2, 3), "[{}, {t}x3]"),
]
SHAPES = [(8, 6), (5, 7), (1, 3), (0, 4)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]


def program(world: Mesh, source: Layout, target: Layout, spec: Spec) -> tuple[RankGraph, ...]:
    """The rank graphs of one move among the devices of `world`."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta.update(spec=spec, origin=Origin("forward"), layout=source)
    y = graph.call_function(ops.move, (x, str(target)))
    y.meta.update(spec=spec, origin=Origin("forward"), layout=target)
    graph.output([y])
    step = verify_placed(StepGraph(graph, (Input("batch", "x", spec),), (("loss", ""),)))
    return tuple(map(verify_rank, expand(step, world, lambda a, b, s, d: plan_move(a, b, s, d))))


def run(world: World, roles: tuple[RankGraph, ...], source: Layout, held: list[Tensor]) -> dict[int, Tensor]:
    """What each held device of the target has afterwards. `held` is what the devices of the source's mesh have."""
    by_device = {device: rank for rank in roles for device in rank.devices}
    ranks = [compile_tasks(by_device[d], world.device) for d in world.devices]
    executor = world.executor(roles, ranks, None)
    envs = executor.environment()
    for device, env, rank in zip(world.devices, envs, ranks, strict=True):
        for slot in rank.inputs:
            env[slot] = held[source.mesh.index(device)]
    executor.begin(envs)
    for action in ("forward", "backward", "update"):
        executor.run(action)
    return {d: env[rank.outputs[0]] for d, env, rank in zip(world.devices, envs, ranks, strict=True) if rank.outputs}


def layouts(case: Case, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    _, before, source, after, target = case
    return Layout.parse(source, before).normalized(shape), Layout.parse(target, after).normalized(shape)


def check(world: World, case: Case, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Every held device of the target's mesh has its piece, and its piece only."""
    source, target = layouts(case, shape)
    full = full_value(shape, dtype, 3)
    found = run(world, program(world.mesh, source, target, Spec(shape, dtype)), source, pieces_of(full, source, 4))
    assert set(found) == {device for device in world.devices if device in target.mesh}
    for device, piece in found.items():
        expected = full[target.box_of(shape, device).slices()]
        where = f"{case[0]} {shape} {dtype} on device {device}"
        assert (piece.dtype, piece.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(piece, expected), where


def sums(case: Case) -> bool:
    return "partial" in case[2]
