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

from meshweave.errors import LayoutError, MeshError
from meshweave.interop.dtensor import dtensor_elsewhere
from meshweave.ir.graph import Input, Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.placements import placements_from_layout


def device_mesh_from_mesh(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The DeviceMesh over the ranks of `mesh`, with its axes as named dims, on `device_type` ("cpu", "cuda").

    Creates one process group per axis, so every rank of the world must call it, in the same order as its other
    collective calls. Raises MeshError when torch.distributed is not initialised, when the world lacks a rank of
    the mesh, and for a mesh without axes.
    """
    where = f"mesh {mesh}"
    if not mesh.axis_names:
        raise MeshError("a DeviceMesh needs at least one axis", where=where, got="no axes", expected="1 or more")
    if not dist.is_initialized():
        raise MeshError(
            "torch.distributed is not initialised",
            where=where,
            got="no default process group",
            expected=f"a world of at least {max(mesh.devices) + 1} ranks",
            hint="run under torchrun and call torch.distributed.init_process_group() first",
        )
    if max(mesh.devices) >= dist.get_world_size():
        raise MeshError(
            "the mesh names ranks that the world does not have",
            where=where,
            got=f"rank {max(mesh.devices)} in a world of {dist.get_world_size()}",
            expected=f"ranks 0 to {dist.get_world_size() - 1}",
            hint="start more processes or use a smaller mesh",
        )
    # Built on the CPU regardless of the default device: the ranks are metadata.
    ranks = torch.tensor(mesh.devices, dtype=torch.int, device="cpu").reshape(mesh.shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names)


def dtensor_from_piece(piece: Tensor, layout: Layout, shape: Sequence[int]) -> DTensor:
    """This rank's `piece` of a tensor of `shape` as a DTensor that shares its memory. Nothing is sent.

    The first call for a mesh creates the process groups of its DeviceMesh, so all ranks call it together. Raises
    LayoutError if DTensor cannot express the layout or the piece has another shape than in the layout, and MeshError
    when torch.distributed is not initialised or the mesh lacks this rank.
    """
    layout = replace(layout, mesh=_with_axis(layout.mesh))
    placements = placements_from_layout(layout, shape)
    device_mesh = _device_mesh(layout.mesh, piece.device.type, _current_job())
    box = layout.pieces(shape).get(dist.get_rank())
    if box is None or tuple(piece.shape) != box.size:
        raise LayoutError(
            "not the piece of this rank",
            where=f"rank {dist.get_rank()}, layout {layout} of shape {tuple(shape)}",
            got=f"shape {tuple(piece.shape)}",
            expected="no piece: the mesh lacks this rank" if box is None else f"shape {box.size}",
        )
    return _dtensor(piece, device_mesh, placements, shape)


def dtensors_from_pieces(
    values: Iterable[tuple[Input, Layout, Sequence[Tensor]]], device_type: str
) -> dict[str, DTensor]:
    """DTensors by name of the values of which this rank has a piece. All ranks call it together, with the same values
    in the same order, and create the DeviceMeshes of all, even of meshes that they are not part of."""
    listed = list(values)
    make_device_meshes((layout for _, layout, _ in listed), device_type)
    return {v.name: dtensor_from_piece(pieces[0], layout, v.spec.shape) for v, layout, pieces in listed if pieces}


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


def _dtensor(piece: Tensor, device_mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    return DTensor.from_local(
        piece, device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=_stride(shape)
    )


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
