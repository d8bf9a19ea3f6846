"""DTensor beyond its public surface: strided shards, meshes without process groups, and its planners.

Held by torch 2.11 to 2.13. Source: torch/distributed/tensor/_redistribute.py, _collective_utils.py, _dtensor_spec.py.
Nothing public says what DTensor would do between two placements, nor has a DeviceMesh without process groups.
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

# What the planners plan between.
from torch.distributed.tensor._dtensor_spec import DTensorSpec as DTensorSpec
from torch.distributed.tensor._dtensor_spec import TensorMeta as TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

# Need not be a Shard in torch 2.11 and later; where it is, ask for it first.
StridedShard = _StridedShard


def joined_device_mesh(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the dims of `meshes`, which are slices of one root (torch 2.11 to 2.13: `DeviceMesh._concatenate`,
    as `fully_shard` has it)."""
    return DeviceMesh._concatenate([*meshes])


def bare_device_mesh(ranks: torch.Tensor, names: Sequence[str]) -> DeviceMesh | None:
    """A DeviceMesh as its first rank sees it, without process groups; None where this torch makes none."""
    options: dict[str, Any] = {"_init_backend": False, "_rank": int(ranks.flatten()[0])}
    try:
        return DeviceMesh("cpu", ranks, mesh_dim_names=tuple(names), **options)
    except TypeError:
        return None


def flatten_without_groups(mesh: DeviceMesh, names: tuple[str, ...]) -> None:
    """Let `merged_transforms` find these dims flattened: it looks for the layout of the flattened mesh and for nothing
    else (`_get_flattened_mesh_by_layout_impl`). Nothing where this torch looks elsewhere: then nothing is merged."""
    try:
        layout: Any = mesh._get_slice_mesh_layout(names)
        flattened: Any = SimpleNamespace(_layout=type(layout)([layout.collapse()]))
        mesh._flatten_mapping["_".join(names)] = flattened
    except (AttributeError, TypeError):
        return


def planner(mesh: DeviceMesh, meta: TensorMeta | None) -> Any:
    """DTensor's planner of redistributions; None where this torch has none."""
    planner_type = getattr(_redistribute, "DTensorRedistributePlanner", None)
    return None if planner_type is None else planner_type(mesh, meta)


def merged_transforms(
    transforms: Sequence[Any], mesh: DeviceMesh, before: Sequence[Placement], after: Sequence[Placement]
) -> list[Any] | None:
    """The steps of a planner with those of one kind that follow each other as one over a flattened mesh dim; None where
    this torch does not merge. Torch's warning that steps could not be merged is not logged."""
    merge = getattr(_redistribute, "_optimize_transform_infos", None)
    if merge is None:
        return None
    with _quiet(_redistribute.logger):
        return list(merge(transforms, mesh, before, after))


def link_priced_cost(
    mesh: DeviceMesh, bandwidths: Sequence[float], latencies: Sequence[float]
) -> Callable[[Placement, Placement, int, float], float] | None:
    """DTensor's own cost of going from one placement to another over a mesh dim, of a piece of so many GiB, where the
    links of the dims have these GB/s and us; None where this torch prices in another way."""
    price = getattr(_collective_utils, "_compute_placement_transition_cost", None)
    if price is None:
        return None
    topology = _collective_utils.MeshTopoInfo(mesh, [*mesh.shape], [*bandwidths], [*latencies])
    return lambda old, new, dim, gib: float(price(old, new, topology, dim, gib)[0])


def local_tensor(tensor: DTensor) -> torch.Tensor:
    """The memory of a DTensor's piece. `to_local` gives a view of it, with autograd."""
    return tensor._local_tensor


def set_local_tensor(tensor: DTensor, piece: torch.Tensor) -> None:
    """Give a DTensor another piece of the same size: the object stays the same, and nothing is copied. FSDP2 does so
    (torch/distributed/fsdp/_fully_shard/_fsdp_param.py)."""
    tensor._local_tensor = piece


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before
