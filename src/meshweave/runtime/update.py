"""The update of a step: each new value replaces the old value, whose memory is freed, as soon as it is computed."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from torch import Tensor

from meshweave.runtime.bindings import Bindings
from meshweave.runtime.executor import Compiled, Env, Task
from meshweave.runtime.state import Key, State


@dataclass(frozen=True, slots=True)
class Replacements:
    """Where new parameters and optimizer state (`keys`) come from, for each local device: `targets` are their kinds,
    names and indices among the pieces, by slot; `others` are the slots that no task of the update computes; `numbers`
    those of the optimizer's numbers, by name."""

    keys: Sequence[Key]
    targets: Sequence[Mapping[int, Sequence[tuple[Key, int]]]]
    others: Sequence[Sequence[int]]
    numbers: Sequence[Mapping[str, int]]

    @staticmethod
    def of(ranks: Sequence[Compiled]) -> Replacements:
        targets: list[dict[int, list[tuple[Key, int]]]] = []
        counts: Counter[Key] = Counter()
        for rank in ranks:
            its: dict[int, list[tuple[Key, int]]] = {}
            for key, slot in outputs(rank):
                if key[0] in ("param", "state"):
                    its.setdefault(slot, []).append((key, counts[key]))
                    counts[key] += 1
            targets.append(its)
        computed = [{slot for task in rank.tasks["update"] for slot in task.outs} for rank in ranks]
        others = [[slot for slot in its if slot not in own] for its, own in zip(targets, computed, strict=True)]
        numbers = [
            {
                item.name: slot
                for item, slot in zip(rank.graph.inputs, rank.inputs, strict=True)
                if item.kind == "scalar"
            }
            for rank in ranks
        ]
        return Replacements(tuple(counts), targets, others, numbers)


@dataclass(slots=True)
class Update:
    """An update of `state` while it runs: until `finish` the state is torn.

    Several devices release old values with their last use (`old` has them while they live). On a single device the
    module's tensors share their memory until the new values are there.
    """

    state: State
    bindings: Bindings
    replacements: Replacements
    envs: Sequence[Env]
    old: dict[tuple[Key, int], weakref.ref[Tensor]] = field(default_factory=dict)

    def begin(self, numbers: Mapping[str, Tensor]) -> None:
        """Distribute the numbers of the optimizer, and open the state for new values."""
        for slots, env in zip(self.replacements.numbers, self.envs, strict=True):
            for name, slot in slots.items():
                if name in numbers:
                    env[slot] = numbers[name]
        self.state.torn = any(self.replacements.targets)
        for targets in self.replacements.targets if len(self.envs) > 1 else ():
            for key, index in chain.from_iterable(targets.values()):
                cells = self.state.pieces[key]
                self.old[key, index] = weakref.ref(cells[index])
                cells[index] = None  # type: ignore[call-overload]

    def commit(self, i: int, task: Task) -> None:
        """Store what a task of device `i` has computed."""
        for slot in task.outs:
            self.keep(i, slot)

    def keep(self, i: int, slot: int) -> None:
        """Store a new value, unless it was written into the old value's memory; if it is stored more than once, each
        copy gets its own storage. So does an empty piece: torch 2.13 cannot save a DTensor whose piece is a view with
        an offset (torch.save, "invalid python storage")."""
        for number, (key, index) in enumerate(self.replacements.targets[i].get(slot, ())):
            value: Tensor = self.envs[i][slot]
            cells = self.state.pieces[key]
            is_in_place = value is (self.old[key, index]() if self.old else cells[index])
            is_copied = not is_in_place and (number > 0 or not value.numel())
            cells[index] = value.clone() if is_copied else value
            if not is_in_place:
                self.bindings.renew(key, cells[index])

    def finish(self, buffers: Sequence[tuple[Key, Tensor]]) -> None:
        """Store what no task of the update computes, and the new buffers."""
        for i, slots in enumerate(self.replacements.others):
            for slot in slots:
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


def has_scalar(ranks: Sequence[Compiled], envs: Sequence[Env], kind: str) -> bool:
    """Whether a scalar result is there."""
    return all(envs[0][slot] is not None for key, slot in outputs(ranks[0]) if key == (kind, ""))


def metrics_of(ranks: Sequence[Compiled], envs: Sequence[Env]) -> dict[str, Tensor]:
    """The numbers that the loss function returned beside the loss, as 0-dim tensors with their own memory."""
    return {key[1]: envs[0][slot].detach().clone() for key, slot in outputs(ranks[0]) if key[0] == "metric"}


def pieces_by_name(ranks: Sequence[Compiled], envs: Sequence[Env], kind: str) -> dict[str, list[Tensor]]:
    """Outputs of a kind by name: a piece for each local device that has it."""
    values: dict[str, list[Tensor]] = {}
    for rank, env in zip(ranks, envs, strict=True):
        for (its_kind, name), slot in outputs(rank):
            if its_kind == kind:
                values.setdefault(name, []).append(env[slot])
    return values
