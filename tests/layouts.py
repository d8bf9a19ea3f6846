"""Every layout that there is, for tests of all pairs."""

from itertools import permutations, product

from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh


def all_layouts(mesh: Mesh, num_dims: int, op: str = "sum") -> list[Layout]:
    """Every layout over one reduce op: each axis shards a dim at some depth, is partial or replicated."""
    made = []
    for uses in product([*range(num_dims), "partial", "replicated"], repeat=len(mesh.axis_names)):
        axes = [[a for a, use in zip(mesh.axis_names, uses, strict=True) if use == d] for d in range(num_dims)]
        partial = {a: op for a, use in zip(mesh.axis_names, uses, strict=True) if use == "partial"}
        for order in product(*map(permutations, axes)):
            made.append(Layout.of(mesh, num_dims, dict(enumerate(order)), partial))
    return made
