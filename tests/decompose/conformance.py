"""One conformance suite for every algorithm of the table, on any world: programs, and what they must give."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tests.decompose.programs import integers, program, run
from torch import Tensor, fx

from meshweave.ir import local_ops
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.ir.verify import verify_rank
from meshweave.optimize.decompose.algorithms import Algorithm
from meshweave.optimize.decompose.emit import write_gather, write_reduce
from meshweave.optimize.decompose.proof import prove_rings
from meshweave.optimize.decompose.writer import ChunkWriter, Ring
from meshweave.runtime.interfaces import World

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Case:
    """An algorithm along `dim` of a value of which every device of the mesh has another one."""

    row: Algorithm
    mesh: Mesh
    group: str
    dim: int
    dtype: torch.dtype

    @property
    def ring(self) -> Ring:
        return Ring(self.group, tuple(map(self.mesh.size, self.group.split(","))))

    def __str__(self) -> str:
        return f"{self.row} over {self.group} of {self.mesh}, dim {self.dim}, {self.dtype}"


def cases(row: Algorithm, mesh: Mesh, group: str = "d", dtype: torch.dtype = torch.float32) -> Iterator[Case]:
    yield from (Case(row, mesh, group, dim, dtype) for dim in range(3))


def check(case: Case, world: World | None = None) -> RankGraph:
    """Prove the case, run it on a world (by default virtual devices) and compare every held device, to the bit."""
    every = values(case)
    role = written(case, every)
    assert case.ring.size == 1 or prove_rings(role) == 1  # a group of one is never decomposed
    found = run(role, {"x": every.flatten(0, 1)}, world)
    groups = {device: group for group in case.mesh.groups(tuple(case.group.split(","))) for device in group}
    for device, outputs in found.items():
        group = groups[device]
        held = [every[case.mesh.index(member)] for member in group]
        expected = _EXPECTED[case.row.collective](held, group.index(device), case.dim)
        assert (outputs[0].shape, outputs[0].dtype) == (expected.shape, expected.dtype), str(case)
        assert torch.equal(outputs[0].cpu(), expected), f"{case} on device {device}"
    return role


def values(case: Case) -> Tensor:
    """What each device hands in: a piece of a gather, all chunks of a reduction."""
    shape = [2, 3, 2]
    if case.row.collective != "all_gather":
        shape[case.dim] *= case.ring.size
    return integers(case.mesh.num_devices, *shape, seed=case.dim).to(case.dtype)


def written(case: Case, every: Tensor) -> RankGraph:
    """A program of the case for the `values` of devices."""
    axes = ",".join(case.mesh.axis_names)
    rows = every.flatten(0, 1)
    role = program(case.mesh, {"x": (rows, "[{" + axes + "}, {}, {}]")}, lambda call, x: [call(aten.neg.default, x)])
    old = next(n for n in role.graph.nodes if n.target is aten.neg.default)
    write, (x,), ring = ChunkWriter(role.graph, old), old.args, case.ring
    write.follow(old, old)
    assert isinstance(x, fx.Node)
    write.begin(ring, "gather" if case.row.collective == "all_gather" else "sum")

    def chunk(number: object) -> fx.Node:
        return write.call(local_ops.take_chunk, x, case.dim, 1, ring.size, number)

    numbers: list[object] = []
    chunks: list[fx.Node] = []

    def keep(number: object, arrived: fx.Node) -> None:
        numbers.append(number)
        chunks.append(arrived)

    if case.row.collective == "all_gather":
        write_gather(write, case.row, ring, x, keep)
        made = write.call(local_ops.join_chunks, chunks, numbers, case.dim, 1)
    else:
        wide = torch.float32 if case.dtype is torch.bfloat16 else case.dtype
        made = write_reduce(write, case.row, ring, chunk, case.dtype, wide)
    old.replace_all_uses_with(made)
    role.graph.erase_node(old)
    return verify_rank(role)


def _gathered(held: list[Tensor], r: int, dim: int) -> Tensor:
    return torch.cat(held, dim)


def _scattered(held: list[Tensor], r: int, dim: int) -> Tensor:
    return torch.stack(held).sum(0, dtype=held[0].dtype).chunk(len(held), dim)[r]


_EXPECTED = {"all_gather": _gathered, "reduce_scatter": _scattered}
