"""Which passes an earlier start chose for the same program, on disk: the next start takes them without a search."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import Any

import torch

from meshweave.disk_cache import CacheEntry, cache_directory, code_digest
from meshweave.hardware import MachineProfile
from meshweave.passes.base import MeshProgram, Pass, ProgramVariant

# Packages whose code a choice depends on.
_ROOMS = ("passes", "rings", "rows", "gathers", "schedule", "buckets", "problem", "simulate", "hardware", "ir")
_MOST_ENTRIES = 1024
Gathered = Callable[[int], Sequence[int]]  # this process's number to those of all processes that compile together


def alone(number: int) -> Sequence[int]:
    return (number,)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a search chose. path: for each compared pass the index of the alternative taken, -1 for none. seconds: of
    the chosen program, simulated. variants: all that were compared."""

    path: tuple[int, ...]
    seconds: float
    variants: tuple[ProgramVariant, ...]

    @staticmethod
    def of(text: str) -> Choice:
        """Raises ArithmeticError, LookupError, TypeError or ValueError for other text."""
        stored = json.loads(text)
        variants = tuple(ProgramVariant(str(n), float(s), str(why)) for n, s, why in stored["variants"])
        return Choice(tuple(map(int, stored["path"])), float(stored["seconds"]), variants)

    def text(self) -> str:
        variants = [(each.name, each.seconds, each.reason) for each in self.variants]
        return json.dumps({"path": self.path, "seconds": self.seconds, "variants": variants})


@dataclass(frozen=True, slots=True)
class Recall:
    """The choice of an earlier start, if `entry` has it on every process: they read, agree and write together."""

    entry: CacheEntry | None = None
    gathered: Gathered = alone

    def read(self) -> Choice | None:
        if self.entry is None:
            return None
        text, _ = self.entry.read()
        try:
            choice = Choice.of(text)
        except (ArithmeticError, LookupError, RecursionError, TypeError, ValueError):
            choice = None
        mark = 0 if choice is None else 1 + int.from_bytes(sha256(text.encode()).digest()[:7])
        return choice if len(set(self.gathered(mark))) == 1 else None

    def agreed(self, is_right: bool) -> bool:
        """Whether it is right on every process."""
        return all(self.gathered(int(is_right)))

    def write(self, choice: Choice) -> None:
        """A choice that cannot be stored is made again by the next start."""
        if self.entry is not None and not self.entry.write(choice.text()):
            self.entry.prune(_MOST_ENTRIES)


def recall_of(
    program: MeshProgram, passes: Sequence[Pass[Any]], costs: Any, least_gain: float, gathered: Gathered
) -> Recall:
    """The recall for a program, stored under all that a choice depends on. Passes of others than meshweave are not
    recalled, since their code is unknown."""
    is_own = all(type(each_pass).__module__.startswith("meshweave.") for each_pass in passes)
    if not is_own or not isinstance(costs, MachineProfile) or not any(each_pass.is_compared for each_pass in passes):
        return Recall()
    options = (program.microbatches, program.memory_cap_bytes, program.keeps_gradients, program.carry, least_gain)
    digest = sha256(repr((options, passes, asdict(costs), torch.__version__)).encode())
    for role in program.roles:
        digest.update(f"{role.devices} {role.mesh} {role.mesh.devices}\n{role.text()}\n".encode())
    key = f"{code_digest(_ROOMS)} {digest.hexdigest()}"
    return Recall(CacheEntry(cache_directory() / "passes", key, ".json"), gathered)
