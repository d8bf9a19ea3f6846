"""The drop-in for torch.compile: a backend, and a context that adds the same pass to Inductor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Unpack

from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.interop.gloo import let_gathers_overlap
from meshweave.torch_compile.scheduling import BackendOptions, BackendSettings, settings

# In the form of aot_autograd: from a graph and its (fake) inputs to a callable.
GraphCompiler = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]
_INNER = ("inductor", "aot_eager")


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend of torch.compile: orders communication in forward and backward graphs, then lets `inner` compile
    them."""

    settings: BackendSettings
    inner: str | GraphCompiler

    @property
    def __name__(self) -> str:
        return "meshweave"

    def __call__(
        self,
        gm: fx.GraphModule,
        inputs: Sequence[Any],
        *,
        mode: str = "default",
        options: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch.compile, with its own `mode` and `options`, which are Inductor's.
        Raises MeshweaveError for either if something else compiles."""
        let_gathers_overlap()  # torch.compile runs its compiled or cached graph here
        if self.inner == "inductor":
            from meshweave.torch_compile.inductor import compile_with

            return compile_with(self.settings, gm, inputs, mode, options or {})
        if mode != "default" or options:
            raise MeshweaveError(
                "mode and options are Inductor's",
                where="torch.compile",
                got=f"mode={mode!r}, options={options!r} with inner={self.inner!r}",
                expected="neither, or inner='inductor'",
            )
        return self._aot(gm, list(inputs))

    def _aot(self, gm: fx.GraphModule, inputs: list[Any]) -> Any:
        from meshweave.interop.aot_autograd import aot_autograd, boxed, boxed_nop, min_cut_partition

        inner = boxed_nop if isinstance(self.inner, str) else self.inner

        def compiled(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
            self.settings.run(graph.graph, "graph")
            graph.recompile()
            return boxed(inner(graph, graph_inputs))  # type: ignore[arg-type]

        def without_backward(graph: fx.GraphModule, graph_inputs: Sequence[Any]) -> Callable[..., Any]:
            self.settings.run(graph.graph, "joint graph")
            return compiled(graph, graph_inputs)

        def partition(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            if self.settings.run(joint.graph, "joint graph"):
                joint.recompile()
            return min_cut_partition(joint, *args, **kwargs)

        compiler = aot_autograd(
            fw_compiler=compiled,
            bw_compiler=compiled,
            inference_compiler=without_backward,
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )
        return compiler(gm, inputs)


def backend(*, inner: str | GraphCompiler = "inductor", **options: Unpack[BackendOptions]) -> Backend:
    """A backend for `torch.compile(model, backend=mw.backend())` that overlaps communication with compute.

    `inner` compiles the ordered graph: "inductor", "aot_eager" (which runs it op by op) or a callable in the form of
    aot_autograd. Options: `cost`, `memory_cap_bytes` and `groups` are those of `mw.overlap`; `cost` may also be the
    name or file of a machine profile, by default it depends on the graph's device type. `report` is called with the
    reports of the passes on every graph that communicates: OverlapReport, DecomposeReport, SplitReport. With
    `fully_shard` none does, because torch keeps its hooks out of graphs: a warning says so, and what to write instead.

    `passes`: the passes over a graph, as in `compile`: "exact" (the default: overlap), "default" (overlap, split,
    decompose) or "overlap,split=2", and passes of your own whose `scope` is "graph" or "joint graph". After each pass
    the graph is verified. Split: before forward and backward are partitioned, row-wise ops run in so many chunks of the
    batch, so that the communication of a chunk runs under the compute of another. Decompose: collectives beside matmuls
    become rings of messages between chunks of the matmuls. With both, sums may round differently. Either is applied
    only if the graph in its best order is then faster by the costs (`mw.passes.Decompose(when="always")` needs none).

    In a job of several ranks all `ranks` (default: those of the graph's group if it communicates in a single one, else
    all of torch.distributed) compile the same graphs in the same order.
    They use the figures of the lowest of them, and prove that the order cannot deadlock; a rank that does not come in
    `timeout_seconds` is an error that names it. The stages of a pipeline compile different graphs: each passes its own
    ranks. With ranks=(rank,) nothing is agreed on and nothing proven, and compiled graphs may come from Inductor's
    cache, which is otherwise bypassed: ranks with a cached graph would not take part in the agreement. Raises
    MeshweaveError for invalid arguments.
    """
    if not (inner in _INNER or callable(inner)):
        raise MeshweaveError(
            "unknown inner compiler", got=repr(inner), expected=f"one of {', '.join(_INNER)}, or a callable"
        )
    return Backend(settings(**options), inner)


def by_name(gm: fx.GraphModule, inputs: Sequence[Any], **inductor: Any) -> Any:
    """`torch.compile(model, backend="meshweave")`, for code that takes a backend's name: `backend()` with defaults. An
    entry point of the package, available once it is installed."""
    return backend()(gm, inputs, **inductor)


def inductor_pass(**options: Unpack[BackendOptions]) -> AbstractContextManager[None]:
    """The pass of `backend`, with its options, in Inductor, for everything that is compiled in this thread while the
    context lasts.

        with mw.inductor_pass():
            loss = compiled(batch)  # the first call compiles, the backward graph too

    An earlier installed pass runs before it. Inductor's own reordering is off, and everything is restored when the
    context ends. Of nested contexts the innermost applies.
    """
    from meshweave.torch_compile.inductor import install_pass

    return install_pass(settings(**options))
