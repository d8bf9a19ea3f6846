"""What compiling a region may save, and when Inductor is prepared for it."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import Any

import pytest
import torch
from torch import fx

from meshweave.interop import inductor
from meshweave.ir.mesh import Mesh
from meshweave.ir.values import Value
from meshweave.runtime.fuse import prepare_compiler
from meshweave.runtime.regions import profitability
from meshweave.runtime.regions.cut import Region
from meshweave.runtime.regions.profitability import BYTES_PER_S, OP_S, saved_seconds
from meshweave.runtime.world import LocalWorld

aten = torch.ops.aten
SHAPE, BYTES = (1000, 250), 1_000_000


def region(*calls: tuple[Any, ...], read: tuple[int, ...]) -> tuple[Region, dict[fx.Node, tuple[Value, ...]]]:
    """Calls (op, numbers of operands, is a view) of one matrix, numbered 0 as an input; `read`: what is given out."""
    graph = fx.Graph()
    nodes = [graph.placeholder("x")]
    values = {nodes[0]: (Value(SHAPE, (250, 1), torch.float32, 0, BYTES),)}
    for op, operands, is_view in calls:
        nodes.append(graph.call_function(op, tuple(nodes[i] for i in operands)))
        storage = values[nodes[operands[0]]][0].storage if is_view else len(nodes)
        values[nodes[-1]] = (Value(SHAPE, (250, 1), torch.float32, storage, BYTES),)
    return Region(tuple(nodes[1:]), (nodes[0],), tuple(nodes[i] for i in read)), values


@pytest.mark.parametrize(
    ("calls", "read", "moved", "num_ops"),
    [
        (((aten.tanh.default, (0,), False), (aten.exp.default, (1,), False)), (2,), 2, 2),  # written and read no more
        (((aten.tanh.default, (0,), False), (aten.exp.default, (1,), False)), (1, 2), 1, 2),  # read no more
        (
            ((aten.slice.Tensor, (0,), True), (aten.clone.default, (1,), False)),
            (2,),
            0,
            2,
        ),  # as before
        (((aten.tanh.default, (0,), False), (aten.mm.default, (1, 1), False)), (2,), 0, 1),  # a library reads it
        # Through a view, and read twice: tanh is written, read and read.
        (
            ((aten.tanh.default, (0,), False), (aten.view.default, (1,), True), (aten.mul.Tensor, (2, 2), False)),
            (3,),
            2,
            3,
        ),
    ],
)
def test_what_stays_in_registers_is_saved(
    calls: tuple[tuple[Any, ...], ...], read: tuple[int, ...], moved: int, num_ops: int
) -> None:
    assert saved_seconds(*region(*calls, read=read)) == pytest.approx(moved * BYTES / BYTES_PER_S + num_ops * OP_S)


@pytest.mark.parametrize(
    ("backend", "mesh", "elements", "expected"),
    [("auto", "", 2_000_000, 1), ("inductor", "dp=2", 2_000_000, 1), ("auto", "dp=2", 2_000_000, 0),
     ("eager", "", 2_000_000, 0), ("auto", "", 1000, 0)],
)  # fmt: skip
def test_inductor_is_prepared_where_regions_may_be_compiled(
    monkeypatch: pytest.MonkeyPatch, backend: Any, mesh: str, elements: int, expected: int
) -> None:
    prepared: list[str] = []
    monkeypatch.setattr(inductor, "find_instructions", lambda: prepared.append(threading.current_thread().name))
    prepare_compiler(backend, LocalWorld(Mesh.of(mesh)), elements)
    for thread in threading.enumerate():
        if thread.name == "meshweave: C++ compiler":
            thread.join()
    assert prepared == ["meshweave: C++ compiler"] * expected


def test_loading_inductor_draws_no_random_numbers_of_the_user() -> None:
    code = "import random; from meshweave.interop.lazy import load_inductor; a = random.getstate(); load_inductor(); "
    code += "assert a == random.getstate()"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_operands_of_a_measurement_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profitability, "_POOL_BYTES", 4096)
    pool = profitability._Pool(torch.device("cpu"))
    forms = [
        ((8, 16), (16, 1), torch.float32),
        ((16, 8), (1, 16), torch.float32),
        ((3, 5), (8, 1), torch.bfloat16),
        ((0, 4), (4, 1), torch.float32),
        ((), (), torch.float64),
    ]
    for form in forms * 10:
        x = pool.take(*form)
        assert (tuple(x.shape), x.stride(), x.dtype) == form
        assert bool((x == 1).all())
        assert x.untyped_storage().data_ptr() == pool.memory.data_ptr()
    indices, large = pool.take((4,), (1,), torch.int64), pool.take((2000,), (1,), torch.float32)
    assert bool((indices == 1).all())
    assert bool((large == 1).all())
    own = {x.untyped_storage().data_ptr() for x in (indices, large)}
    assert pool.memory.data_ptr() not in own
