"""Mesh to and from `torch.distributed` DeviceMesh: the same axes over the same ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from meshweave.errors import MeshError
from meshweave.ir.mesh import Mesh


def mesh_from_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The Mesh with the axis names and ranks of `device_mesh`; where its dims have no names they become d0, d1, ...

    Raises MeshError for dim names that cannot name an axis.
    """
    ranks = device_mesh.mesh
    names = device_mesh.mesh_dim_names or tuple(f"d{i}" for i in range(ranks.ndim))
    return Mesh(dict(zip(names, ranks.shape, strict=True)), devices=ranks.flatten().tolist())


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
    # Built on the CPU whatever the default device is: the ranks are metadata.
    ranks = torch.tensor(mesh.devices, dtype=torch.int, device="cpu").reshape(mesh.shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=mesh.axis_names)
