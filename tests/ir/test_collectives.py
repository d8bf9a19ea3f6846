"""The table of collectives: its rows agree with PyTorch and with themselves, and nobody else spells an op."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch
from torch import fx

import meshweave.errors
from meshweave.errors import VerifyError
from meshweave.ir.collectives import OURS, RECEIVED, TABLE, TRANSFER, Collective, collective_of

PACKAGE = Path(meshweave.errors.__file__).parent
# The table; the proof, whose semantics are its own; the two faults of torch and Gloo that interop mends.
SPELLED_IN = {"ir/collectives.py", "replay/communication.py", "interop/gloo.py"}
ROWS = [row for row in OURS if row is not TRANSFER]
GROUP = 3
READERS = torch.ones((GROUP, 6), dtype=torch.bool)
CALLS = {  # arguments of the ops that have no sample
    "permute": [1],
    "sparse_gather": [READERS, GROUP, 1.0],
    "sparse_scatter": [READERS, GROUP, 1.0],
}


def arguments(row: Collective, rows: int) -> list[object]:
    return row.sample(rows, GROUP) if row.sample is not None else CALLS[row.name]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_shape_of_a_row_is_that_of_what_members_get(row: Collective) -> None:
    parts = [torch.arange(18.0).reshape(6, 3) + 100 * member for member in range(GROUP)]
    args = arguments(row, 6)
    received = row.exchange(parts, args)
    assert len(received) == GROUP
    assert {tuple(x.shape) for x in received} == {row.shape((6, 3), args)}
    assert row.problem(args, GROUP) == ""


@pytest.mark.parametrize("row", [row for row in ROWS if row.name != "permute"], ids=lambda row: row.name)
def test_positions_of_arguments_are_those_of_the_schema(row: Collective) -> None:
    for target, other in TABLE.items():
        if other.name == row.name and isinstance(target, torch._ops.OpOverload):
            names = [argument.name for argument in target._schema.arguments]
            assert names[other.group] == "group_name"
            assert (names.index("group_size") if "group_size" in names else -1) == other.size


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
@pytest.mark.parametrize("group", [2, 3, 8])
def test_a_collective_moves_on_its_curve_what_a_device_must_receive(row: Collective, group: int) -> None:
    """Whatever curve prices an op, it receives there what it receives itself."""
    graph = fx.Graph()
    node = graph.call_function(row.op, (graph.placeholder("x"), *arguments(row, 6 * group), "g"))
    num_bytes = row.cost_bytes(node, group, 96.0)
    assert RECEIVED[row.cost_name](group, num_bytes) == pytest.approx(row.received(group, 96.0))


def test_a_collective_without_a_row_is_an_error() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    reduced = graph.call_function(torch.ops.c10d.alltoall_base_.default, (x, x))
    with pytest.raises(VerifyError, match="no row in the table of collectives"):
        collective_of(reduced)
    assert collective_of(x) is None


def spelled(source: str) -> list[int]:
    """The lines that reach for an op of torch's functional collectives."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        names = [node.attr] if isinstance(node, ast.Attribute) else []
        names += [a.name for a in node.names] if isinstance(node, ast.ImportFrom) else []
        is_ours = isinstance(node, ast.ImportFrom) and node.module == "meshweave.ir.collectives"
        if any("c10d_functional" in name or (is_ours and name == "functional") for name in names):
            lines.append(node.lineno)
    return lines


def test_ops_are_spelled_in_the_table_alone() -> None:
    """A new op touches the table, its proof, what runs it on torch.distributed, and what writes it: four files."""
    sources = {str(path.relative_to(PACKAGE)): path.read_text() for path in PACKAGE.rglob("*.py")}
    found = {name for name, source in sources.items() if "functional" in source and spelled(source)}
    assert found == SPELLED_IN


@pytest.mark.parametrize(
    "source",
    [
        "torch.ops._c10d_functional.all_reduce.default",
        "getattr(torch.ops._c10d_functional_autograd, name)",
        "from meshweave.ir.collectives import WAIT, functional",
    ],
)
def test_the_check_sees_each_way_to_spell_an_op(source: str) -> None:
    assert spelled(source) == [1]
