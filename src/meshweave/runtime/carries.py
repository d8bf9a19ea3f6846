"""What a step passes to the next step beside its state: parameters that are gathered already."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor, fx

from meshweave.ir.rank import RankGraph
from meshweave.runtime.cluster import on_any
from meshweave.runtime.executor import FORWARD, Compiled, Env, compile_tasks
from meshweave.runtime.fingerprint import fingerprint
from meshweave.runtime.state import State
from meshweave.runtime.world import World

GatheredParams = Mapping[str, Tensor]  # by parameter


class Carries:
    """The carried values of the local devices, and the graphs that compute them from the parameters before the first
    step.

    They are used only while the parameters are the same tensors, with the same values, that they were gathered from:
    after a load, or a write to the state on any rank (also through `.data`, which does not change a tensor's version),
    they are gathered again. So checkpoints need not contain them.
    """

    def __init__(self, roles: Sequence[RankGraph], world: World) -> None:
        """Every process of the world constructs it together."""
        self._values: list[dict[str, Tensor]] | None = None
        self._sources: list[tuple[Tensor, Tensor]] = []  # piece, fingerprint of its bytes
        self._world = world
        self._names = dict.fromkeys(name for role in roles for kind, name in role.outputs if kind == "carry")
        if not self._names:
            return
        prologues = [role.prologue or _nothing(role) for role in roles]
        compiled = [compile_tasks(prologue, world.device) for prologue in prologues]
        by_device = {d: rank for rank in compiled for d in rank.graph.devices}
        self._ranks: tuple[Compiled, ...] = tuple(by_device[d] for d in world.devices)
        self._executor = world.executor(prologues, self._ranks, None)

    def ready(self, state: State) -> Sequence[GatheredParams]:
        """The values of every local device, gathered first if missing. All processes call it."""
        if not self._names:
            return [{} for _ in self._world.devices]
        if on_any(self._world, self._values is None or not self._is_fresh(state)):
            self.drop()
            self._hold(state, self._gathered(state))
        assert self._values is not None, "held right above"
        return self._values

    def keep(self, state: State, ranks: Sequence[Compiled], envs: Sequence[Env]) -> None:
        """Store the values that an update has gathered from the new parameters."""
        if self._names:
            self._hold(state, [_carried(rank, env) for rank, env in zip(ranks, envs, strict=True)])

    def drop(self) -> None:
        """Drop the values. They live on while a step uses them."""
        self._values, self._sources = None, []

    def _hold(self, state: State, gathered: list[dict[str, Tensor]]) -> None:
        self._values = gathered
        self._sources = [(piece, fingerprint(piece)) for piece in self._parameters(state)]

    def _parameters(self, state: State) -> list[Tensor]:
        return [piece for name in self._names for piece in state.pieces["param", name]]

    def _is_fresh(self, state: State) -> bool:
        now = self._parameters(state)
        return len(now) == len(self._sources) and all(
            piece is source and bool(fingerprint(piece) == before)
            for piece, (source, before) in zip(now, self._sources, strict=True)
        )

    def _gathered(self, state: State) -> list[dict[str, Tensor]]:
        envs = self._executor.environment()
        for device, rank, env in zip(self._world.devices, self._ranks, envs, strict=True):
            for item, layout, slot in zip(rank.graph.inputs, rank.graph.layouts, rank.inputs, strict=True):
                env[slot] = state.pieces[item.kind, item.name][state.holders(layout).index(device)]
        self._executor.begin(envs)
        try:
            self._executor.run(FORWARD)
            return [_carried(rank, env) for rank, env in zip(self._ranks, envs, strict=True)]
        finally:
            self._executor.end()


def _carried(rank: Compiled, env: Env) -> dict[str, Tensor]:
    keys = zip(rank.graph.outputs, rank.outputs, strict=True)
    return {name: env[slot] for (kind, name), slot in keys if kind == "carry"}


def _nothing(role: RankGraph) -> RankGraph:
    """The empty prologue of a role that carries nothing, in a program where other roles do."""
    graph = fx.Graph()
    graph.output([])
    return replace(role, graph=graph, inputs=(), layouts=(), outputs=(), output_layouts=(), prologue=None)
