"""DTensor's private parts: strided shards, meshes without process groups, and its planners.

Holds for torch 2.11 to 2.13. Source: torch/distributed/tensor/_redistribute.py, _collective_utils.py, _dtensor_spec.py.
No public interface shows how DTensor converts between two placements, or creates a DeviceMesh without process groups.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, _collective_utils, _redistribute

# Source and target of the planners.
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# Not a Shard in every torch from 2.11 on; test for it first.
StridedShard = _StridedShard


def joined_device_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """A mesh with the dims of `meshes`, which are slices of the same root (torch 2.11 to 2.13:
    `DeviceMesh._concatenate`, as in `fully_shard`)."""
    return DeviceMesh._concatenate([*meshes])


def bare_device_mesh(ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh | None:
    """A DeviceMesh as on its first rank, without process groups; None if this torch cannot create one."""
    options: dict[str, Any] = {"_init_backend": False, "_rank": int(ranks.flatten()[0])}
    try:
        return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(names), **options)
    except TypeError:
        return None


def flatten_without_groups(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Make `merged_transforms` find these dims flattened: it looks up only the layout of the flattened mesh
    (`_get_flattened_mesh_by_layout_impl`). No effect if this torch looks elsewhere: then nothing is merged."""
    try:
        layout: Any = mesh._get_slice_mesh_layout(names)
        flattened: Any = SimpleNamespace(_layout=type(layout)([layout.collapse()]))
        mesh._flatten_mapping["_".join(names)] = flattened
    except (AttributeError, TypeError):
        return


def planner(mesh: DeviceMesh, meta: TensorMeta | None) -> Any:
    """DTensor's planner of redistributions; None if this torch has none."""
    planner_type = getattr(_redistribute, "DTensorRedistributePlanner", None)
    return None if planner_type is None else planner_type(mesh, meta)


def merged_transforms(
    transforms: Sequence[Any], mesh: DeviceMesh, before: Sequence[Placement], after: Sequence[Placement]
) -> list[Any] | None:
    """The steps of a planner, with successive steps of the same kind merged into a step over a flattened mesh dim; None
    if this torch does not merge. Torch's warning about steps that could not be merged is suppressed."""
    merge = getattr(_redistribute, "_optimize_transform_infos", None)
    if merge is None:
        return None
    with _quiet(_redistribute.logger):
        return list(merge(transforms, mesh, before, after))


def link_priced_cost(
    mesh: DeviceMesh, bandwidths: Sequence[float], latencies: Sequence[float]
) -> Callable[[Placement, Placement, int, float], float] | None:
    """DTensor's own cost of going from one placement to another over a mesh dim, of a piece of so many GiB, if the
    links of the dims have these GB/s and us; None if this torch prices differently."""
    price = getattr(_collective_utils, "_compute_placement_transition_cost", None)
    if price is None:
        return None
    topology = _collective_utils.MeshTopoInfo(mesh, [*mesh.shape], [*bandwidths], [*latencies])
    return lambda old, new, dim, gib: float(price(old, new, topology, dim, gib)[0])


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


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
