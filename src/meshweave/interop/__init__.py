"""What we know about torch's own types beyond its public surface: DTensor, DeviceMesh, schedulers. Nobody else does."""

from meshweave.interop.device_mesh import device_mesh_from_mesh, mesh_from_device_mesh
from meshweave.interop.dtensor import (
    dtensor_from_piece,
    layout_from_placements,
    placements_from_layout,
    prepare_device_meshes,
)
from meshweave.interop.optimizer import mark_stepped

__all__ = [
    "device_mesh_from_mesh",
    "dtensor_from_piece",
    "layout_from_placements",
    "mark_stepped",
    "mesh_from_device_mesh",
    "placements_from_layout",
    "prepare_device_meshes",
]
