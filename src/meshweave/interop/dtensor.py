"""DTensor's private parts: strided shards, joined meshes, local tensors.

Holds for torch 2.11 to 2.13. Source: torch/distributed/tensor/placement_types.py, _dtensor_spec.py.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# Not a Shard in every torch from 2.11 on; test for it first.
StridedShard = _StridedShard


def joined_device_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh with the dims of `meshes`, which are slices of the same root (torch 2.11 to 2.13:
    `DeviceMesh._concatenate`, as in `fully_shard`)."""
    return DeviceMesh._concatenate([*meshes])


def dtensor_elsewhere(
    nothing: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size, stride: tuple[int, ...]
) -> DTensor:
    """A DTensor on a rank outside of its mesh, with an empty local tensor. `DTensor.from_local` takes the shape of a
    tensor without dims for a missing argument, and uses that of the local tensor."""
    meta = TensorMeta(shape, stride, nothing.dtype)
    return DTensor(nothing, DTensorSpec(mesh, tuple(placements), tensor_meta=meta), requires_grad=False)


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The memory of a DTensor's piece. `to_local` returns a view of it, with autograd."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, piece: torch.Tensor) -> None:
    """Give a DTensor another piece of the same size: the object stays the same, and nothing is copied. FSDP2 does the
    same (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    tensor._local_tensor = piece
