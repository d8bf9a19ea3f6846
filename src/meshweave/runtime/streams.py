"""CUDA streams for the streams of a schedule, and the events between them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


class Streams:
    """On CUDA, a stream per stream of the schedule, and events between them; on CPU nothing.

    A task that needs others waits, on the device, for the events recorded after them; a tensor that crosses streams is
    recorded with the allocator. So the host runs ahead, and "done" on the host means enqueued.
    """

    def __init__(self, on: torch.device, count: int) -> None:
        self._cuda = [torch.cuda.Stream(on) for _ in range(count)] if on.type == "cuda" else []
        self._events: dict[int, torch.cuda.Event] = {}

    def reset(self) -> None:
        self._events = {}

    def follow(self) -> None:
        """Run after everything already enqueued on the caller's stream."""
        for stream in self._cuda:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    def entered(self, stream: int) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self._cuda[stream]) if self._cuda else nullcontext()

    def await_needs(self, needs: Sequence[int]) -> None:
        if self._cuda:
            for task in needs:
                torch.cuda.current_stream().wait_event(self._events[task])

    def record(self, task: int) -> None:
        """Record an event after a task that others may need: the last of a run."""
        if self._cuda:
            event = torch.cuda.Event()
            event.record()
            self._events[task] = event

    def share(self, tensors: Iterable[Any], streams: Iterable[int]) -> None:
        """Share tensors between the current stream and the others."""
        if self._cuda:
            used = [torch.cuda.current_stream(), *(self._cuda[i] for i in streams)]
            for tensor in tensors:
                for stream in used:
                    if isinstance(tensor, Tensor):
                        tensor.record_stream(stream)

    def join(self) -> None:
        """Make the caller's stream wait for all of these."""
        for stream in self._cuda:
            torch.cuda.current_stream(stream.device).wait_stream(stream)
