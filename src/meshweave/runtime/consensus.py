"""Ranks exchange small values through the store of `torch.distributed`, and all get the same verdict.

No collective runs, so a rank that does not come is an error with its name, never a hang.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from meshweave.errors import MeshweaveError
from meshweave.interop.process_groups import store_of_job

TIMEOUT_SECONDS = 600.0  # ranks of one job compile at about the same pace; a graph of 10,000 nodes takes minutes
NOTE_SECONDS = 30.0  # of waiting after which a rank says so
_LOOK_SECONDS = 0.1  # the longest pause between two polls of the store
_SHOWN = 16  # the most ranks that an error names
_NOTES = logging.getLogger("meshweave")
_PARTS = ("what", "where", "got", "expected", "hint")


def nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Exchange:
    """Turns in which `ranks`, of which this process is `rank`, exchange values through `store`.

    In a turn every rank sends a value, the lowest rank judges all values, and every rank returns or raises its verdict.
    The lowest rank waits `timeout_seconds` for the others, they wait twice as long for it, so that all learn who is
    missing; `check`, which may raise, is called meanwhile. Each rank counts its turns in the store: the n-th turns of
    all ranks meet. `purpose` says what the ranks do, in errors and in the keys of the store.
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
        """What `judge` returns, on the lowest rank, for the values of all ranks; values are JSON.
        Raises MeshweaveError: the judge's error, or an error that names the rank that failed or the missing ranks."""
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
        except RuntimeError as error:  # what stores raise if their server is gone
            self.check()  # a known failure is the cause
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
        """Take this rank's next turn with its failure, which is then an error on every rank. Does not wait."""
        key, text = self._turn(), f"{type(error).__name__}: {error}".rstrip(": ")
        if self.rank == self.ranks[0]:
            self.store.set(f"{key}/verdict", json.dumps({"error": _parts(self._failed(self.rank, text))}))
        else:
            self.store.set(f"{key}/{self.rank}", json.dumps({"failed": text}))

    def _turn(self) -> str:
        """The keys of this turn. They are specific to these ranks, because others may have counted further."""
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
        """The names that are still unset after `seconds`; returns earlier if all are set."""
        keys, begun, pause, is_noted = [f"{key}/{name}" for name in names], time.monotonic(), 0.001, False
        end = begun + seconds
        while keys and not self.store.check(keys):  # `wait` with a short timeout would log every timeout
            if time.monotonic() > end:
                return [name for name, wanted in zip(names, keys, strict=True) if not self.store.check([wanted])]
            self.check()
            if not is_noted and time.monotonic() - begun > NOTE_SECONDS:
                is_noted = True
                _NOTES.warning(f"rank {self.rank} has waited {NOTE_SECONDS:g} s for other ranks to {self.purpose}")
            time.sleep(pause)
            pause = min(1.5 * pause, _LOOK_SECONDS)
        return []

    def _failed(self, rank: int, text: str) -> MeshweaveError:
        return MeshweaveError(
            f"rank {rank} failed while ranks {self.purpose}",
            got=text,
            expected=f"{named(self.ranks)} to succeed together",
            hint=f"fix what rank {rank} reports and restart the job",
        )

    def _absent(self, ranks: Sequence[int], seconds: float) -> MeshweaveError:
        return MeshweaveError(
            f"ranks did not come to {self.purpose}",
            where=named(ranks),
            got=f"nothing in {seconds:g} s",
            expected=f"{named(self.ranks)} compiling the same graphs in the same order",
            hint="a rank has failed, compiles other graphs (pass ranks=), has this graph for another shape already "
            "(torch.compile(dynamic=True)), or needs longer (pass timeout_seconds=)",
        )


def _parts(error: MeshweaveError) -> dict[str, str]:
    return {part: getattr(error, part) for part in _PARTS}


def named(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0, 1`: at most 16 ranks."""
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def ranks_of_job() -> tuple[Any, int, tuple[int, ...]] | None:
    """Store, rank and all ranks of this job; None if this process is alone: without torch.distributed, in a world of
    size 1, or on the `fake` backend, which has no other ranks."""
    store = store_of_job()
    return None if store is None else (store, dist.get_rank(), tuple(range(dist.get_world_size())))
