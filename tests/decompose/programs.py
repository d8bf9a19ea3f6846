"""Rank graphs written by hand, and what every device of a world has after them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.ir.collectives import STARTS, WAIT, permute
from meshweave.ir.graph import Input, Origin, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.verify import verify_rank
from meshweave.runtime.executor import compile_tasks
from meshweave.runtime.interfaces import World
from meshweave.runtime.world import LocalWorld

Build = Callable[..., Sequence[fx.Node]]  # (call, *placeholders) -> outputs


def program(mesh: Mesh, inputs: Mapping[str, tuple[Tensor, str]], build: Build) -> RankGraph:
    """A rank graph of all devices. `inputs` are global values and their layouts, `build(call, *inputs)` the outputs."""
    graph = fx.Graph()
    held = {name: (value, Layout.parse(text, mesh)) for name, (value, text) in inputs.items()}
    sources = []
    for name, (value, layout) in held.items():
        node = graph.placeholder(name)
        node.meta.update(spec=Spec(layout.local_shape(tuple(value.shape)), value.dtype), origin=Origin("forward"))
        sources.append(node)

    def call(target: Any, *args: Any, phase: str = "forward", **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta["origin"] = Origin(phase, source=f"model.py:{len(graph.nodes)}")
        return node

    outputs = list(build(call, *sources))
    graph.output(outputs)
    items = tuple(Input("batch", name, Spec(tuple(v.shape), v.dtype)) for name, (v, _) in held.items())
    names = tuple(("loss", str(i)) for i in range(len(outputs)))
    layouts = tuple(layout for _, layout in held.values())
    unknown = Layout.replicated(mesh, 0)
    return verify_rank(RankGraph(graph, mesh, items, layouts, names, (unknown,) * len(outputs)))


def run(role: RankGraph, values: Mapping[str, Tensor], world: World | None = None) -> dict[int, list[Tensor]]:
    """What each held device has of the outputs, from its pieces of global values."""
    world = world or LocalWorld(role.mesh)
    compiled = compile_tasks(role, world.device)
    executor = world.executor([role], [compiled] * len(world.devices), None)
    envs = executor.environment()
    for device, env in zip(world.devices, envs, strict=True):
        for item, layout, slot in zip(role.inputs, role.layouts, compiled.inputs, strict=True):
            env[slot] = values[item.name][layout.box_of(item.spec.shape, device).slices()].clone().to(world.device)
    executor.begin(envs)
    for action in ("forward", "backward", "update"):
        executor.run(action)
    return {d: [env[slot] for slot in compiled.outputs] for d, env in zip(world.devices, envs, strict=True)}


def count(role: RankGraph, *targets: Any) -> int:
    return sum(node.target in targets for node in role.graph.nodes)


def num_permutes(role: RankGraph) -> int:
    return count(role, permute)


def ops(role: RankGraph) -> list[Any]:
    """What runs, in order, less starts, waits and symbols."""
    hidden = STARTS | SYMBOLS | {WAIT}
    return [n.target for n in role.graph.nodes if n.op == "call_function" and n.target not in hidden]


def integers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Small integers: sums and products of a few hundred of them are exact in float32."""
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=made).to(dtype)
