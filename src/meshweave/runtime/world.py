"""Where a program runs: which devices of the mesh this process has, and how they communicate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from meshweave.errors import MeshError
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box
from meshweave.ir.rank import RankGraph
from meshweave.runtime.executor import Compiled, Meter
from meshweave.runtime.serial import Alone, SerialExecutor
from meshweave.runtime.virtual import LocalExecutor

if TYPE_CHECKING:
    from meshweave.runtime.cluster import ClusterWorld

World: TypeAlias = "LocalWorld | ClusterWorld"  # a process's part of a mesh
Executor: TypeAlias = SerialExecutor | LocalExecutor


def boxes_of(layout: Layout, shape: Sequence[int], devices: Sequence[int]) -> list[Box]:
    return [layout.box_of(shape, device) for device in devices]


def home_of(model: nn.Module) -> torch.device | None:
    """The CUDA device of a model's parameters; None if they are elsewhere."""
    return next((x.device for x in model.parameters() if x.is_cuda), None)


def checked_device(device: torch.device | str) -> torch.device:
    """A device on which a step can run in this process. Raises MeshError for any other."""
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise _no_device(device, "unknown device") from error
    if chosen.type not in ("cpu", "cuda"):
        raise _no_device(device, f"a {chosen.type} device")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise _no_device(device, f"{torch.cuda.device_count()} CUDA devices on this machine")
    return chosen


def _no_device(device: object, got: str) -> MeshError:
    hint = "omit device, or pass cpu or cuda"
    return MeshError("a step cannot run on this device", where=f"device={str(device)!r}", got=got, hint=hint)


# The time of a step grows with the square of the number of virtual devices: that of examples/mlp.py is 2 s on 512,
# some 10 s on 1,024 and 50 s on 2,048 (2 cores, torch 2.13, 2026-11).
MAX_VIRTUAL_DEVICES = 1024


def check_virtual_devices(mesh: Mesh) -> None:
    """Raise MeshError if a mesh has too many devices to be virtual devices of this process."""
    if mesh.num_devices > MAX_VIRTUAL_DEVICES:
        raise MeshError(
            "too many virtual devices for a single process",
            where=f"mesh {mesh}",
            got=f"{mesh.num_devices:,} devices",
            expected=f"at most {MAX_VIRTUAL_DEVICES:,}",
            hint="run a smaller mesh with the same axes, or start one process per device with torchrun; "
            "meshweave plan and meshweave simulate take meshes of many thousands of devices",
        )


class LocalWorld:
    """Every device of the mesh is a virtual device in this process: `devices` are the ids of its devices."""

    is_distributed = False

    def __init__(self, mesh: Mesh, device: torch.device | str | None = None) -> None:
        check_virtual_devices(mesh)
        self.mesh, self.devices = mesh, mesh.devices
        self.device = checked_device(device or "cpu")

    def executor(self, roles: Sequence[RankGraph], ranks: Sequence[Compiled], meter: Meter | None) -> Executor:
        """The executor of `ranks[i]` on local device i. Every process calls it, with the same `roles`, before the first
        step."""
        if len(self.devices) == 1:
            return SerialExecutor(ranks[0], self.devices[0], Alone(), meter)
        return LocalExecutor(ranks, self.devices, self.device, meter)

    def assemble(self, spec: Spec, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """The full tensor from the pieces on the local devices in the layout's mesh."""
        full = pieces[0].new_empty(spec.shape)
        holders = [device for device in self.devices if device in layout.mesh]
        for box, piece in zip(boxes_of(layout, spec.shape, holders), pieces, strict=True):
            full[box.slices()] = piece
        return full

    @contextmanager
    def guard(self) -> Iterator[None]:
        yield

    def call(self, name: str, detail: Any = (), *, meets: bool = True) -> AbstractContextManager[None]:
        return nullcontext()

    def note(self, choice: str) -> None:
        pass

    def check(self) -> None:
        pass

    def has_whole(self, layout: Layout) -> bool:
        return True

    def meet(self) -> None:
        pass
