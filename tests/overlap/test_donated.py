"""Which inputs of a graph are freed after their last use: what AOTAutograd or the caller says, whatever their names."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.overlap.graphs import ATEN, Builder
from torch import fx, nn

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.interop.aot_autograd import aot_autograd, boxed_nop, min_cut_partition
from meshweave.ir.device_program import donated_inputs

NAMES = [None, lambda node: f"tangents_of_{node.name}", lambda node: f"primals_of_{node.name}", lambda node: "x"]


def graphs_of(model: nn.Module, x: torch.Tensor) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph that AOTAutograd makes of a model."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        graphs.append(gm)
        return boxed_nop(gm, inputs)

    backend = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=min_cut_partition)
    torch.compile(model, backend=backend)(x).sum().backward()
    forward, backward = graphs
    return forward, backward


def overlapped(gm: fx.GraphModule, **options: Any) -> mw.OverlapReport:
    return mw.overlap(gm, cost=lambda node: 1.0, **options)[1]


@pytest.mark.parametrize("name", NAMES, ids=["its own", "tangents", "primals", "x"])
def test_names_of_inputs_mean_nothing(name: Callable[[fx.Node], str] | None) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
    forward, backward = graphs_of(model, torch.randn(32, 64))
    expected = overlapped(forward).peak_before, overlapped(backward).peak_before
    parameters = {n for n in backward.graph.find_nodes(op="placeholder") if n.name.startswith("primals")}
    owned = donated_inputs(backward.graph)
    assert owned
    assert owned == set(backward.graph.find_nodes(op="placeholder")) - parameters
    assert overlapped(backward, donated=()).peak_before > expected[1]  # nothing is freed
    for gm in (forward, backward) if name else ():
        for node in gm.graph.find_nodes(op="placeholder"):
            node.name = name(node)
        gm.recompile()
    assert (overlapped(forward).peak_before, overlapped(backward).peak_before) == expected
    assert not donated_inputs(forward.graph)


def chain() -> fx.GraphModule:
    """Three ops one after the other, of 256 bytes each."""
    b = Builder()
    (x,) = b.placeholders("x")
    return b.done(b.relu("last", b.call("middle", ATEN.neg.default, b.relu("first", x))))


@pytest.mark.parametrize(
    ("donated", "num_live"),
    [(None, 3), ((), 3), (("x",), 2), ("x", 2), (lambda node: node.name == "x", 2), (lambda node: False, 3)],
)
def test_what_the_caller_donates(donated: Any, num_live: int) -> None:
    assert overlapped(chain(), donated=donated).peak_before == 256 * num_live


def test_a_tighter_cap_is_kept_with_what_is_donated() -> None:
    with pytest.raises(MeshweaveError, match="no order was found"):
        overlapped(chain(), memory_cap_bytes=512)
    assert overlapped(chain(), memory_cap_bytes=512, donated=["x"]).peak_bytes == 512


def test_an_unknown_name_is_an_error() -> None:
    with pytest.raises(MeshweaveError, match="names what is not an input") as caught:
        overlapped(chain(), donated=("first",))
    assert (caught.value.got, caught.value.expected) == ("first", "names of its placeholders: x")
