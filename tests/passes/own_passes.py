"""Passes as a user writes them, for any program: of roles, and of graphs that torch.compile has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from meshweave.ir.collectives import COLLECTIVES, WAIT
from meshweave.ir.device_program import DeviceProgram
from meshweave.ir.graph import op_name
from meshweave.passes import Pass

neg = torch.ops.aten.neg.default


@dataclass(frozen=True, slots=True)
class Counted:
    """How many sums over devices a graph has."""

    num_sums: int

    def left(self, reason: str) -> Counted:
        return Counted(0)

    def __str__(self) -> str:
        return f"{self.num_sums} sums of negated parts"


@dataclass(frozen=True, slots=True)
class Negated(Pass[Any]):
    """Sums over devices of what is negated, and negated again: other ops, the same bits."""

    name: ClassVar = "negated"
    numerics: ClassVar = "exact"
    stage: ClassVar = "written"
    scope: ClassVar = "graph"

    def run(self, program: Any, costs: Any) -> Any:
        return program.each(self.rewritten)

    def rewritten(self, device: DeviceProgram) -> tuple[fx.Graph | None, Counted]:
        sums = [n for n in device.graph.nodes if n.target in COLLECTIVES and "reduce" in op_name(n.target)]
        for start in sums:
            (wait,) = start.users
            with device.graph.inserting_before(start):
                start.replace_input_with(start.args[0], device.graph.call_function(neg, (start.args[0],)))
            with device.graph.inserting_after(wait):
                result = device.graph.call_function(neg, (wait,))
            wait.replace_all_uses_with(result, delete_user_cb=lambda user, result=result: user is not result)
        return device.graph if sums else None, Counted(len(sums))


@dataclass(frozen=True, slots=True)
class Impatient(Pass[Any]):
    """Does not wait for a communication."""

    name: ClassVar = "impatient"
    numerics: ClassVar = "exact"
    stage: ClassVar = "written"
    scope: ClassVar = "graph"

    def run(self, program: Any, costs: Any) -> Any:
        return program.each(self.rewritten)

    def rewritten(self, device: DeviceProgram) -> tuple[fx.Graph, Counted]:
        wait = next(n for n in device.graph.nodes if n.target is WAIT)
        wait.replace_all_uses_with(wait.args[0])
        device.graph.erase_node(wait)
        return device.graph, Counted(0)


@dataclass(frozen=True, slots=True)
class Doubled(Impatient):
    """Gives twice as many rows."""

    name: ClassVar = "doubled"

    def rewritten(self, device: DeviceProgram) -> tuple[fx.Graph, Counted]:
        end = next(iter(reversed(device.graph.nodes)))
        result = next(n for n in end.all_input_nodes)
        with device.graph.inserting_before(end):
            twice = device.graph.call_function(torch.ops.aten.cat.default, ([result, result],))
        end.replace_input_with(result, twice)
        return device.graph, Counted(0)


@dataclass(frozen=True, slots=True)
class Unreduced(Impatient):
    """Takes a device's part for the sum over devices, right after expansion."""

    name: ClassVar = "unreduced"
    stage: ClassVar = "expanded"

    def rewritten(self, device: DeviceProgram) -> tuple[fx.Graph, Counted]:
        start = next(n for n in device.graph.nodes if n.target in COLLECTIVES and "all_reduce" in op_name(n.target))
        (wait,) = start.users
        wait.replace_all_uses_with(start.args[0])
        device.graph.erase_node(wait)
        device.graph.erase_node(start)
        return device.graph, Counted(0)
