"""Pieces as DTensors, on a DeviceMesh with the same axes as the mesh."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from meshweave.errors import LayoutError
from meshweave.interop.dtensor import dtensor_elsewhere
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import placements_from_layout


def device_mesh_from_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The DeviceMesh over the ranks of `mesh`, with its axes as named dims, on `device_type` ("cpu", "cuda").

    Creates one process group per axis, so every rank of the world must call it, in the same order as its other
    collective calls.
    """
    # Built on the CPU regardless of the default device: the ranks are metadata.
    ranks = torch.tensor(mesh.devices, dtype=torch.int, device="cpu").reshape(mesh.shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names)


def dtensor_from_piece(piece: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's `piece` of a tensor of `shape` as a DTensor that shares its memory. Nothing is sent.

    The first call for a mesh creates the process groups of its DeviceMesh, so all ranks call it together. Raises
    LayoutError if DTensor cannot express the layout.
    """
    layout = replace(layout, mesh=_with_axis(layout.mesh))
    placements = placements_from_layout(layout, shape)
    device_mesh = _device_mesh(layout.mesh, piece.device.type, _current_job())
    assert tuple(piece.shape) == layout.box_of(shape, dist.get_rank()).size, "the piece of this rank"
    return DTensor.from_local(
        piece, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=_stride(shape)
    )


def unheld_dtensor(layout: Layout, spec: Spec, device_type: str) -> DTensor:
    """The DTensor of a value on a rank that is not in its mesh. All ranks have created the mesh together already."""
    device_mesh = _device_mesh(_with_axis(layout.mesh), device_type, _current_job())
    placements = dtensor_placements(layout, spec.shape)
    nothing = torch.empty(0, dtype=spec.dtype, device=device_type)
    return dtensor_elsewhere(nothing, device_mesh, placements, torch.Size(spec.shape), _stride(spec.shape))


def make_device_meshes(layouts: Iterable[Layout], device_type: str) -> None:
    """Create the DeviceMeshes of all layouts. All ranks call it together, with the same layouts."""
    for mesh in dict.fromkeys(layout.mesh for layout in layouts):
        _device_mesh(_with_axis(mesh), device_type, _current_job())


def has_placements(layout: Layout, shape: Sequence[int]) -> bool:
    """Whether DTensor can express a layout."""
    try:
        dtensor_placements(layout, shape)
    except LayoutError:
        return False
    return True


def dtensor_placements(layout: Layout, shape: Sequence[int]) -> tuple[Placement, ...]:
    """The placements of a layout on its DeviceMesh. LayoutError if DTensor cannot express it."""
    return placements_from_layout(replace(layout, mesh=_with_axis(layout.mesh)), shape)


def _stride(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(prod(max(1, size) for size in shape[d + 1 :]) for d in range(len(shape)))


def _with_axis(mesh: Mesh) -> Mesh:
    """The mesh itself; for a single device without axes a mesh with an axis, which a DeviceMesh needs."""
    return mesh if mesh.axis_names else Mesh("rank=1", devices=mesh.devices)


def _current_job() -> weakref.ref[dist.ProcessGroup] | None:
    return weakref.ref(dist.group.WORLD) if dist.is_initialized() and dist.group.WORLD is not None else None


@lru_cache(maxsize=256)
def _device_mesh(mesh: Mesh, device_type: str, job: weakref.ref[dist.ProcessGroup] | None) -> DeviceMesh:
    """The DeviceMesh of a mesh in this job, cached, because each creates process groups."""
    return device_mesh_from_mesh(mesh, device_type)


def is_placed(tensor: DTensor, layout: Layout, shape: tuple[int, ...]) -> bool:
    """Whether a DTensor has a layout's placements on the layout's mesh."""
    ranks = tuple(tensor.device_mesh.mesh.flatten().tolist())
    return ranks == tuple(layout.mesh.devices) and tuple(tensor.placements) == dtensor_placements(layout, shape)
