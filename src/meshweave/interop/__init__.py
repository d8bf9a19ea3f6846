"""What we know about torch's own distributed types: DTensor placements and DeviceMesh. Nobody else knows them."""

from meshweave.interop.device_mesh import device_mesh_from_mesh, mesh_from_device_mesh
from meshweave.interop.dtensor import dtensor_from_piece, layout_from_placements, placements_from_layout

__all__ = [
    "device_mesh_from_mesh",
    "dtensor_from_piece",
    "layout_from_placements",
    "mesh_from_device_mesh",
    "placements_from_layout",
]
