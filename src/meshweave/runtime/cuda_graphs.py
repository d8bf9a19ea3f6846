"""CUDA graphs: work of a GPU recorded once and replayed with a single launch, in memory that all recordings share."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class RecordingFailed(Exception):
    """The work cannot be recorded; nothing of it ran."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor is in memory, without keeping that memory from being used again."""

    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @staticmethod
    def of(value: Tensor) -> Place:
        return Place(value.data_ptr(), value.shape, value.stride(), value.dtype, value.device)


@dataclass(slots=True)
class CudaGraphs:
    """CUDA graphs in a private pool of PyTorch's allocator, recorded on a stream of their own. Recorded values are in
    memory that later recordings use again once their tensors are gone: replays are valid in the order of their
    recordings. `user` is the executor whose values are in that memory; None between two steps."""

    device: torch.device
    user: object | None = None
    _pool: Any = field(default=None, repr=False)
    _stream: Any = field(default=None, repr=False)
    _keeper: Any = field(default=None, repr=False)  # a graph for as long as the pool: without any a pool cannot be used

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """Record what `run` launches, without running it. Returns the replay. Raises RecordingFailed."""
        if self._pool is None:
            self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self.device)
            torch.cuda.empty_cache()  # memory of earlier steps, which the pool cannot use
            self._keeper = self._graph(lambda: torch.zeros((), device=self.device))
        replay: Callable[[], None] = self._graph(run).replay
        return replay

    def _graph(self, run: Callable[[], Any]) -> Any:
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.stream(self._stream):
                # other threads, such as a data loader's, may use the device meanwhile
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    run()
                finally:
                    graph.capture_end()
        except Exception as error:  # whatever an op does that cannot be recorded
            raise RecordingFailed(f"{type(error).__name__}: {error}") from error
        return graph

    def at(self, place: Place) -> Tensor:
        """A tensor in memory that it does not own."""
        if not place.shape.numel():
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype, device=place.device)
        steps = zip(place.shape, place.stride, strict=True)
        num_bytes = (1 + sum((size - 1) * step for size, step in steps)) * place.dtype.itemsize
        memory = torch.as_tensor(_Memory(place.address, num_bytes), device=place.device)
        return memory.view(place.dtype).as_strided(place.shape, place.stride)

    def is_here(self, value: Tensor) -> bool:
        """Whether a value is in the memory of the device that records."""
        return value.is_cuda

    def awaits(self, run: Callable[[], None]) -> bool:
        """Run something. Returns whether the host waited for the device meanwhile, which cannot be recorded."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                run()
            finally:
                torch.cuda.set_sync_debug_mode(before)
        return any("synchronizing CUDA operation" in str(warning.message) for warning in seen)


class _Memory:
    """Bytes of a GPU, as PyTorch takes them from other packages (the CUDA array interface of numba's documentation,
    version 3)."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
