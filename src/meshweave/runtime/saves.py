"""Asynchronous saves of the state, concurrent with steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import contextmanager

import torch.distributed as dist

from meshweave.runtime.progress import Progress
from meshweave.runtime.watch import POLL
from meshweave.runtime.world import World


class Saves:
    """Asynchronous saves of a state, at most a single save at a time.

    Every process makes the same calls. The threads that write communicate over their own Gloo group, so that their
    collectives never meet those of a step. Python waits for these threads before it exits.
    """

    def __init__(self) -> None:
        self._pending: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    @contextmanager
    def call(self, world: World, progress: Progress, name: str) -> Iterator[None]:
        """A call that saves or loads, between two steps, after the previous save is done."""
        progress.check_idle("a checkpoint")
        with world.call(name):
            self._wait(world)
            yield

    def begin(self, world: World, save: Callable[[dist.ProcessGroup | None], Future[None]]) -> Future[None]:
        """Begin a save over the group of these saves, in a `call`."""
        assert self._pending is None
        if world.is_distributed and self._group is None:
            self._group = dist.new_group(backend="gloo", group_desc="checkpoints")
        self._pending = save(self._group)
        return self._pending

    def _wait(self, world: World) -> None:
        """Wait for the current save. Raises its CheckpointError, once; StepError when another process has failed
        meanwhile."""
        if self._pending is None:
            return
        while not wait_for([self._pending], POLL).done:
            world.check()
        pending, self._pending = self._pending, None
        pending.result()
