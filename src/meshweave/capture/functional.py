"""Rewrites a traced graph without ops that write in place."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.capture.tracer import GraphTracer, Traced
from meshweave.errors import CaptureError
from meshweave.interop.fake import FakeTensor


def functional(traced: Traced, inputs: Sequence[Tensor]) -> Traced:
    """The same graph without in-place ops. No data is allocated: tensors computed from numbers alone are fake here."""
    module, modes = traced.module(), [x.fake_mode for x in inputs if isinstance(x, FakeTensor)]

    def again(tracer: GraphTracer, *values: Tensor) -> Sequence[Tensor]:
        try:
            return torch.func.functionalize(_Replay(module, tracer).run)(*values)  # type: ignore[no-any-return]
        except RuntimeError as error:
            raise CaptureError(
                "an in-place write of the step cannot be expressed by new tensors",
                where=tracer.origin.source,
                got=str(error).splitlines()[0][:200],
                hint="compute a new tensor in this line: torch.where, torch.cat, torch.diag_embed",
            ) from error

    with modes[0] if modes else nullcontext():  # type: ignore[attr-defined]
        return GraphTracer.trace(again, inputs)


class _Replay(fx.Interpreter):
    """Runs a graph under a second trace and gives each node's Origin to the nodes that it becomes."""

    def __init__(self, module: fx.GraphModule, tracer: GraphTracer) -> None:
        super().__init__(module)
        self.tracer = tracer

    def run_node(self, n: fx.Node) -> Any:
        self.tracer.origin = n.meta.get("origin", self.tracer.origin)
        return super().run_node(n)
