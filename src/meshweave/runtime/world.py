"""Where a program runs: which devices of the mesh this process holds, and how they talk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from meshweave.errors import MeshError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box
from meshweave.ir.rank import RankGraph
from meshweave.runtime.executor import Communicator
from meshweave.runtime.local import LocalCommunicator


class World(Protocol):
    """One process's part of a mesh. `positions` are the row-major positions of the devices that it holds."""

    @property
    def mesh(self) -> Mesh: ...

    @property
    def positions(self) -> tuple[int, ...]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def communicator(self) -> Communicator: ...

    @property
    def is_distributed(self) -> bool: ...

    def prepare(self, graph: RankGraph) -> None:
        """Make what the graph's collectives need; every process calls it, with every graph, before the first step."""
        ...

    def assemble(self, shape: Sequence[int], layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """The full tensor, on every process, of the pieces that all processes hold."""
        ...

    def guard(self) -> AbstractContextManager[None]:
        """A context in which a failure here reaches every other process."""
        ...


def boxes_of(layout: Layout, shape: Sequence[int], positions: Sequence[int]) -> list[Box]:
    return [layout.box(shape, layout.mesh.coordinates(p)) for p in positions]


class LocalWorld:
    """Every device of the mesh is a virtual one in this process."""

    is_distributed = False

    def __init__(self, mesh: Mesh, device: torch.device | str | None = None) -> None:
        self.mesh = mesh
        self.positions = tuple(range(mesh.num_devices))
        self.device = torch.device(device or "cpu")
        if self.device.type == "meta":
            raise MeshError("a step cannot run on the meta device", hint="leave device out, or name cpu or cuda")
        self.communicator = LocalCommunicator(mesh)

    def prepare(self, graph: RankGraph) -> None:
        pass

    def assemble(self, shape: Sequence[int], layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        full = pieces[0].new_empty(tuple(shape))
        for box, piece in zip(boxes_of(layout, shape, self.positions), pieces, strict=True):
            full[box.slices()] = piece
        return full

    @contextmanager
    def guard(self) -> Iterator[None]:
        yield
