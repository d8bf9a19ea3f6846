"""The update of a step: each new value replaces the old value, whose memory is freed, as soon as it is computed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx

from meshweave.runtime.bindings import Bindings
from meshweave.runtime.executor import Compiled, Env, Task
from meshweave.runtime.state import Key, State


@dataclass(slots=True)
class Update:
    """New parameters and optimizer state on their way into `state`; `scalars` are the numbers of the optimizer. While
    it runs the state is torn."""

    state: State
    bindings: Bindings
    ranks: Sequence[Compiled]
    envs: Sequence[Env]
    scalars: Mapping[str, Tensor]
    # per device: slot -> the value's kind and name
    replaced: list[dict[int, list[tuple[Key, int]]]] = field(default_factory=list)
    new: dict[Key, list[Any]] = field(default_factory=dict)

    def begin(self) -> None:
        """Distribute the numbers, and open the state for new values."""
        for rank, env in zip(self.ranks, self.envs, strict=True):
            for item, slot in zip(rank.graph.inputs, rank.inputs, strict=True):
                if item.kind == "scalar" and item.name in self.scalars:
                    env[slot] = self.scalars[item.name]
            targets: dict[int, list[tuple[Key, int]]] = {}
            for key, slot in outputs(rank):
                if key[0] in ("param", "state"):
                    cells = self.new.setdefault(key, [])
                    targets.setdefault(slot, []).append((key, len(cells)))
                    cells.append(None)
            self.replaced.append(targets)
        self.state.torn = bool(self.new)
        self.state.pieces.update(self.new)

    def commit(self, i: int, task: Task) -> None:
        """Store what a task of device `i` has computed."""
        for slot in task.outs:
            self.keep(i, slot)

    def keep(self, i: int, slot: int) -> None:
        """Store a new value; if it is stored more than once, each copy gets its own storage. So does an empty piece:
        torch 2.13 cannot save a DTensor whose piece is a view with an offset (torch.save, "invalid python storage")."""
        for number, (key, index) in enumerate(self.replaced[i].pop(slot, ())):
            value = self.envs[i][slot]
            piece = value.clone() if number or not value.numel() else value
            self.state.pieces[key][index] = piece
            self.bindings.renew(key, piece)

    def finish(self, buffers: Sequence[tuple[Key, Tensor]]) -> None:
        """Store what no task of the update computes, and the buffers that the microbatches have left."""
        for i, targets in enumerate(self.replaced):
            for slot in list(targets):
                self.envs[i][slot] = self.envs[i][slot].clone()
                self.keep(i, slot)
        renewed: dict[Key, list[Tensor]] = {}
        for key, piece in buffers:
            # it may be a view of the batch, which belongs to the caller
            renewed.setdefault(key, []).append(piece.clone())
        self.state.pieces.update(renewed)


def outputs(rank: Compiled) -> Iterator[tuple[Key, int]]:
    """(kind, name) and slot of every output of a rank."""
    return zip(rank.graph.outputs, rank.outputs, strict=True)


def scalar(ranks: Sequence[Compiled], envs: Sequence[Env], kind: str) -> Tensor:
    """A scalar result of the step, as a 0-dim tensor with its own memory."""
    (slot,) = (slot for key, slot in outputs(ranks[0]) if key == (kind, ""))
    value: Tensor = envs[0][slot]
    return value.detach().clone()


def held(ranks: Sequence[Compiled], envs: Sequence[Env], kind: str) -> dict[str, list[Tensor]]:
    """Outputs of a kind by name: a piece for each local device that has it."""
    values: dict[str, list[Tensor]] = {}
    for rank, env in zip(ranks, envs, strict=True):
        for (its_kind, name), slot in outputs(rank):
            if its_kind == kind:
                values.setdefault(name, []).append(env[slot])
    return values


def nodes_of(rank: Compiled) -> tuple[dict[Key, fx.Node], dict[Key, fx.Node]]:
    """The nodes of a rank's inputs and of its outputs."""
    inputs = {(i.kind, i.name): rank.nodes[slot] for i, slot in zip(rank.graph.inputs, rank.inputs, strict=True)}
    return inputs, {key: rank.nodes[slot] for key, slot in outputs(rank)}
