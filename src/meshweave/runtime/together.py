"""The ranks of a job compile together: a difference between them, or a failure of any, is an error on every rank."""

from __future__ import annotations

import atexit
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from meshweave.errors import MeshError, MeshweaveError
from meshweave.runtime.calls import calls_of_job
from meshweave.runtime.cluster import init_from_env, shutdown
from meshweave.runtime.consensus import Exchange, named, ranks_of_job

_SHOWN = 300  # the most characters of a line that an error shows


@dataclass(slots=True)
class Ranks:
    """The ranks that compile together, through an exchange; without an exchange this process is alone. `ended` is what
    an exchange raised: every rank has it already."""

    exchange: Exchange | None = None
    ended: BaseException | None = None

    @property
    def is_alone(self) -> bool:
        return self.exchange is None

    @property
    def is_first(self) -> bool:
        return self.exchange is None or self.exchange.rank == self.exchange.ranks[0]

    def fail(self, error: MeshweaveError) -> None:
        """Raise this rank's error, which the other ranks raise too."""
        self.ended = error
        raise error

    def say(self, answer: Any, judge: Callable[[Mapping[int, Any]], Any]) -> Any:
        """What `judge` returns for the values of every rank (see `Exchange`)."""
        assert self.exchange is not None
        try:
            return self.exchange.exchange(answer, judge)
        except MeshweaveError as error:
            self.ended = error
            raise

    def meet(self) -> None:
        """Wait until every rank is here. Raises if a rank has failed."""
        if not self.is_alone:
            self.say(None, lambda answers: None)

    def agree(self, texts: Mapping[str, str]) -> None:
        """Check that every rank has the same texts. Each is a topic, described line by line.

        Digests are compared; the first topic that differs is then shown. Raises MeshweaveError with the topic, the
        ranks that differ from the first rank, and the first line that differs.
        """
        if self.exchange is None:
            return
        digests = {topic: hashlib.sha256(text.encode()).hexdigest()[:24] for topic, text in texts.items()}
        lead = self.exchange.ranks[0]

        def differing(answers: Mapping[int, dict[str, str]]) -> Any:
            for topic in dict.fromkeys(topic for its in answers.values() for topic in its):
                others = [rank for rank, its in answers.items() if its.get(topic) != answers[lead].get(topic)]
                if others:
                    return [topic, others]
            return None

        difference = self.say(digests, differing)
        if difference is not None:
            topic, others = difference
            shown = texts.get(topic, "") if self.exchange.rank in (lead, others[0]) else ""
            self.say(shown, lambda answers: _raise_difference(topic, others, answers, lead))


def _raise_difference(topic: str, others: Sequence[int], answers: Mapping[int, str], lead: int) -> None:
    expected, got = answers[lead].splitlines(), answers[others[0]].splitlines()
    lines = zip(expected, got, strict=False)
    longer = (expected[len(got) :] or ["nothing more"])[0], (got[len(expected) :] or ["nothing more"])[0]
    want, have = next(((a, b) for a, b in lines if a != b), longer)
    raise MeshweaveError(
        f"ranks compile with another {topic}: they would not train one model",
        where=named(others),
        got=f"{have[:_SHOWN]}, on rank {others[0]}",
        expected=f"{want[:_SHOWN]}, as on rank {lead}",
        hint="every rank runs the same script with the same arguments; only the rows of the batch depend on the rank",
    )


@contextmanager
def together(device: torch.device | str | None = None) -> Iterator[Ranks]:
    """A block that every rank of the job completes, or none: a failure on any rank is an error on all when they next
    meet, at the latest at the end of the block. If a step was compiled before, a rank that is in another call meanwhile
    is an error on all within seconds. Joins torchrun's job if this process has not done so."""
    join(device)
    job = ranks_of_job()
    if job is None:
        yield Ranks()
        return
    store, rank, members = job
    with calls_of_job().exchange("mw.compile") as check:
        exchange = Exchange(store, rank, members, purpose="compile", check=check)
        ranks = Ranks(exchange)
        try:
            yield ranks
            ranks.meet()
        except BaseException as error:
            if error is not ranks.ended:
                with suppress(RuntimeError):  # the store is gone, and that is how the others learn of it
                    exchange.leave(error)
            raise


def join(device: torch.device | str | None) -> None:
    """Initialise torch.distributed if torchrun (or another launcher that sets RANK and WORLD_SIZE) started several
    processes and the script has not: NCCL for CUDA, Gloo for cpu. The job is left when the process ends."""
    if not dist.is_available() or dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) < 2:
        return
    if "RANK" not in os.environ:
        return
    try:
        init_from_env("gloo" if str(device or "").startswith("cpu") else None)
    except dist.DistError as error:
        raise MeshError(
            "not all ranks joined the job",
            where=f"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}",
            got=str(error).splitlines()[0],
            hint="a rank has ended or hangs before mw.compile: see its log",
        ) from error
    atexit.register(shutdown)
