"""Ranks tell each other small things through the store of `torch.distributed`, and all learn the same verdict.

No collective runs, so that a rank that does not come is an error with its name, never a hang.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import default_store

TIMEOUT_SECONDS = 600.0  # ranks of one job compile at about the same pace; a graph of 10,000 nodes takes minutes
_LOOK_SECONDS = 0.1  # the longest pause between two looks at the store
_SHOWN = 16  # ranks that an error names
_PARTS = ("what", "where", "got", "expected", "hint")


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Exchange:
    """What `ranks`, of which this process is `rank`, say to each other through `store`, one turn after the other.

    In a turn every rank says something, the lowest of them judges what all said, and its verdict is what every rank
    returns or raises. It waits `timeout_seconds` for the others, they twice as long for it, so that all learn who is
    missing; `check`, which may raise, is called meanwhile. Which turn it is, each rank counts in the store itself:
    ranks come to their n-th turn together. `purpose` names what they do, in errors and in the keys of the store.
    """

    store: Any  # a torch.distributed.Store
    rank: int
    ranks: tuple[int, ...]
    timeout_seconds: float = TIMEOUT_SECONDS
    purpose: str = "agree on the order of a graph's communications"
    check: Callable[[], None] = nothing

    def __post_init__(self) -> None:
        if self.rank not in self.ranks or list(self.ranks) != sorted(set(self.ranks)) or not self.timeout_seconds > 0:
            raise MeshweaveError(
                "these ranks cannot agree",
                where=f"rank {self.rank}",
                got=f"ranks {self.ranks}, timeout {self.timeout_seconds:g} s",
                expected="ranks in rising order, this one among them, and a timeout above 0 s",
            )

    def exchange(self, own_answer: Any, judge: Callable[[Mapping[int, Any]], Any]) -> Any:
        """What `judge` makes, on the lowest rank, of what every rank said; values as JSON has them.

        Raises MeshweaveError: the judge's, or one that names the rank that failed or the ranks that did not come.
        """
        try:
            key = self._turn()
            if self.rank == self.ranks[0]:
                verdict = self._verdict(key, own_answer, judge)
                self.store.set(f"{key}/verdict", json.dumps(verdict))
            else:
                self.store.set(f"{key}/{self.rank}", json.dumps({"said": own_answer}))
                if self._missing(key, ["verdict"], 2 * self.timeout_seconds):
                    raise self._absent(self.ranks[:1], 2 * self.timeout_seconds)
                verdict = json.loads(self.store.get(f"{key}/verdict"))
        except RuntimeError as error:  # what stores raise where their server is gone
            raise MeshweaveError(
                "the store of torch.distributed cannot be reached",
                where=f"rank {self.rank}",
                got=str(error).splitlines()[0],
                expected=f"an answer from {named(self.ranks)}",
                hint="the process that serves it, usually that of rank 0, has ended: see its log",
            ) from error
        if "error" in verdict:
            raise MeshweaveError(**verdict["error"])
        return verdict["said"]

    def leave(self, error: BaseException) -> None:
        """Take this rank's next turn with its failure, which is then an error on every rank. It waits for nobody."""
        key, text = self._turn(), f"{type(error).__name__}: {error}".rstrip(": ")
        if self.rank == self.ranks[0]:
            self.store.set(f"{key}/verdict", json.dumps({"error": _parts(self._failed(self.rank, text))}))
        else:
            self.store.set(f"{key}/{self.rank}", json.dumps({"failed": text}))

    def _turn(self) -> str:
        """The keys of the turn that begins. They belong to these ranks alone: others may have counted further."""
        purpose = f"{self.purpose} {self.ranks!r}"
        prefix = f"meshweave/exchange/{hashlib.sha256(purpose.encode()).hexdigest()[:12]}"
        return f"{prefix}/{self.store.add(f'{prefix}/turn/{self.rank}', 1)}"

    def _verdict(self, key: str, own_answer: Any, judge: Callable[[Mapping[int, Any]], Any]) -> dict[str, Any]:
        others = self.ranks[1:]
        try:
            missing = self._missing(key, [str(rank) for rank in others], self.timeout_seconds)
            if missing:
                raise self._absent([int(rank) for rank in missing], self.timeout_seconds)
            answers = {rank: json.loads(self.store.get(f"{key}/{rank}")) for rank in others}
            failed = next((rank for rank, answer in answers.items() if "failed" in answer), None)
            if failed is not None:
                raise self._failed(failed, answers[failed]["failed"])
            mine = {self.ranks[0]: json.loads(json.dumps(own_answer))}
            return {"said": judge(mine | {rank: answer["said"] for rank, answer in answers.items()})}
        except MeshweaveError as error:
            return {"error": _parts(error)}

    def _missing(self, key: str, names: Sequence[str], seconds: float) -> list[str]:
        """The names that nobody has set after `seconds`, none if all are there before."""
        keys, end, pause = [f"{key}/{name}" for name in names], time.monotonic() + seconds, 0.001
        while keys and not self.store.check(keys):  # `wait` with a short timeout would log each time that it ends
            if time.monotonic() > end:
                return [name for name, wanted in zip(names, keys, strict=True) if not self.store.check([wanted])]
            self.check()
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK_SECONDS)
        return []

    def _failed(self, rank: int, text: str) -> MeshweaveError:
        return MeshweaveError(
            f"rank {rank} failed while ranks {self.purpose}",
            got=text,
            expected=f"{named(self.ranks)} to come through together",
            hint=f"mend what rank {rank} reports and start the job again",
        )

    def _absent(self, ranks: Sequence[int], seconds: float) -> MeshweaveError:
        return MeshweaveError(
            f"ranks did not come to {self.purpose}",
            where=named(ranks),
            got=f"nothing in {seconds:g} s",
            expected=f"{named(self.ranks)} compiling the same graphs in the same order",
            hint="a rank has failed, compiles other graphs (pass ranks=), or needs longer (pass timeout_seconds=)",
        )


def _parts(error: MeshweaveError) -> dict[str, str]:
    return {part: getattr(error, part) for part in _PARTS}


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`: at most 16 of them."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def ranks_of_job() -> tuple[Any, int, tuple[int, ...]] | None:
    """Store, rank and all ranks of this job; None where this process is alone.

    Alone is a process without torch.distributed, of a world of one, and one on the `fake` backend, which has no other
    ranks.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_backend() == "fake":
        return None
    if dist.get_world_size() == 1:
        return None
    return default_store(), dist.get_rank(), tuple(range(dist.get_world_size()))
