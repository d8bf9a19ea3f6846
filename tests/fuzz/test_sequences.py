"""Random attention on random meshes, every way to do it, against eager PyTorch."""

from __future__ import annotations

import random

import pytest
import torch
from tests.sequences import Shape, difference, plain

from meshweave.ir.mesh import Mesh

MASKS = ("causal", "none", "bool", "float", "documents")
MESHES = ("cp=2", "cp=3", "cp=4", "dp=2,cp=2", "cp=2,tp=2", "fsdp=2,cp=2", "cp=2,fsdp=2")


def case(seed: int) -> tuple[Shape, str, str]:
    """A shape, a mesh and a plan."""
    pick = random.Random(seed)
    mesh, groups = pick.choice(MESHES), pick.choice([1, 2, 4])
    size = int(mesh.partition("cp=")[2][0])
    ways = ["auto", "gather", "ring"] + (["heads"] if "tp" not in mesh and groups % size == 0 else [])
    shape = Shape(
        heads=groups * pick.choice([1, 2]),
        key_heads=groups,
        size=pick.choice([4, 8]),
        batch=pick.choice([2, 4]),
        tokens=pick.randint(2, 13),
        mask=pick.choice(MASKS),
        layers=pick.choice([1, 2]),
    )
    others = {"dp": "dp:dp", "fsdp": "fsdp:fsdp", "tp": "auto_tp:tp", "cp": f"cp:cp:{pick.choice(ways)}"}
    plan = [others[axis] for axis in Mesh.parse(mesh).axis_names]
    return shape, mesh, "+".join(plan)


def check(seed: int) -> None:
    shape, mesh, plan = case(seed)
    error, _ = difference(plain(shape), mesh, torch.float64, plan=plan, profile="alpha-beta")
    assert error < 1e-9, f"seed {seed}: {shape} on {mesh} with {plan}: {error}"


@pytest.mark.slow_rows("3", "4", "5", "2")
@pytest.mark.parametrize("seed", range(6))
def test_gradients_are_exact(seed: int) -> None:
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6, 50))
def test_gradients_of_many_are_exact(seed: int) -> None:
    check(seed)
