"""A graph of torch.compile, in the form that passes take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from meshweave.cost.simulate.step import StepSeconds
from meshweave.errors import VerifyError
from meshweave.ir.device_program import R, Rewrite, graph_program
from meshweave.ir.graph import output_node
from meshweave.optimize.decompose.lower import rewrite_graph
from meshweave.optimize.overlap import overlap
from meshweave.optimize.overlap.decide import NoOrderError, OverlapOptions
from meshweave.optimize.overlap.prices import Agree, CostNumbers, fingerprint
from meshweave.optimize.overlap.read import read_problem


@dataclass(frozen=True, slots=True)
class GraphProgram:
    """One graph of ATen ops and functional collectives with meta["val"], forward, backward or both.

    groups: ranks by name of group; None: from torch.distributed. rank: the rank that runs it; None: the rank in
    torch.distributed. memory_cap_bytes: the most that may be live at once. agree: makes all ranks use the same figures.
    order: how it is ordered when compared with other programs. ordered_seconds: its time in its present order, if a
    pass has ordered it.
    """

    module: fx.GraphModule
    groups: Mapping[str, Sequence[int]] | None = None
    rank: int | None = None
    memory_cap_bytes: int | None = None
    agree: Agree | None = None
    order: OverlapOptions = field(default_factory=OverlapOptions)
    ordered_seconds: float | None = None

    @property
    def graphs(self) -> tuple[fx.Graph, ...]:
        return (self.module.graph,)

    def with_module(self, module: fx.GraphModule) -> GraphProgram:
        return replace(self, module=module, ordered_seconds=None)

    def each(self, rewrite: Rewrite[R]) -> tuple[GraphProgram, tuple[R, ...]]:
        module, report = rewrite_graph(self.module, rewrite, self.groups)
        return self if module is self.module else self.with_module(module), (report,)

    def verify(self, before: GraphProgram) -> None:
        """Check that the graph is well-formed (as `mw.overlap` requires), takes the same inputs, and returns results of
        the same shapes."""
        self.module.graph.lint()
        read_problem(graph_program(self.module.graph, self.groups))
        now, then = _ends(self.module.graph), _ends(before.module.graph)
        if now != then:
            wrong = next((x, y) for x, y in zip_longest(now, then) if x != y)
            raise VerifyError(
                "a pass has changed the inputs or outputs of a graph",
                got=f"{wrong[0]}",
                expected=f"{wrong[1]}, as before",
            )

    def seconds(self, costs: Any) -> StepSeconds:
        if self.ordered_seconds is not None:
            return StepSeconds(self.ordered_seconds)
        cap = self.memory_cap_bytes
        try:
            report = overlap(self.module, cost=costs, memory_cap_bytes=cap, groups=self.groups, options=self.order)[1]
        except NoOrderError:
            return StepSeconds(float("inf"))
        return StepSeconds(report.seconds)

    def agreed(self, choice: int) -> int:
        if self.agree is None:
            return choice
        mark = fingerprint(read_problem(graph_program(self.module.graph, self.groups)))
        return int(self.agree(CostNumbers(mark, (float(choice),))).numbers[0])


def _ends(graph: fx.Graph) -> list[str]:
    """The inputs of a graph, then its results, as text."""
    inputs = [(node.name, node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
    results: list[Any] = []
    fx.map_arg(output_node(graph).args, lambda n: results.append(("result", n.meta.get("val"))))
    return [f"{name} {_text(val)}" for name, val in [*inputs, *results]]


def _text(val: Any) -> str:
    return f"{val.dtype} {list(map(str, val.shape))}" if isinstance(val, torch.Tensor) else type(val).__name__
