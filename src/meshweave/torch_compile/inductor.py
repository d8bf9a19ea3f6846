"""Inductor with meshweave's pass: Inductor's own overlap passes are off, and its later reordering is restricted.

After the post-grad passes Inductor turns the graph into scheduler nodes, in its order, fuses them, and reorders them
for peak memory. The last is switched off (the order was chosen under a memory cap). Fusion may pull a wait ahead of the
work that hides its communication: dependencies that cost no buffer prevent that, and allow all other fusions.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import fx

from meshweave.errors import MeshweaveError
from meshweave.interop.gloo import let_gathers_overlap
from meshweave.interop.inductor import (
    GraphPass,
    PostGradPass,
    SchedulerPass,
    add_dependency,
    backward_compiled_with_forward,
    compile_fx,
    config,
    contains_collective,
    contains_wait,
    is_library_call,
    list_mode_options,
)
from meshweave.passes import Decompose
from meshweave.passes.base import Scope
from meshweave.torch_compile.scheduling import BackendSettings

# Inductor's own overlap and bucketing (torch 2.13, _inductor/config.py), and the value that switches each off.
_OWN: Mapping[str, object] = {
    "aten_distributed_optimizations.enable_overlap_scheduling": False,
    "reorder_for_compute_comm_overlap": False,
    "bucket_all_gathers_fx": "none",
    "bucket_reduce_scatters_fx": "none",
    "bucket_all_reduces_fx": "none",
    "_fuse_ddp_communication": False,
    "_micro_pipeline_tp": False,
}
# On by default, and would undo any order: it considers only bytes.
_REORDERS: Mapping[str, object] = {"reorder_for_peak_memory": False}
_POST_GRAD, _PRE_FUSION = "post_grad_custom_post_pass", "_pre_fusion_custom_pass"
_JOINT = "joint_custom_post_pass"  # on forward and backward together, or on a graph without backward


class _Passes:
    """meshweave's passes as a single Inductor pass, after those installed before. Its uuid covers all of them."""

    scope: ClassVar[Scope]

    def __init__(self, settings: BackendSettings, before: Sequence[Any] = ()) -> None:
        self.settings, self.before = settings, tuple(before)

    def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
        for earlier in self.before:
            if isinstance(earlier, PostGradPass) and PostGradPass is not GraphPass:
                earlier(graph, is_inference)
            else:
                earlier(graph)
        self.settings.run(graph, self.scope)

    def uuid(self) -> Any | None:
        keys = (self.settings.key(), *(getattr(earlier, "uuid", lambda: None)() for earlier in self.before))
        return None if None in keys else keys

    def __deepcopy__(self, memo: object) -> Self:
        return self  # copies of Inductor's config are read-only


class GraphPasses(_Passes, PostGradPass):  # type: ignore[misc]
    scope = "graph"


class JointPasses(_Passes, GraphPass):  # type: ignore[misc]
    scope = "joint graph"


class HoldOrder(SchedulerPass):  # type: ignore[misc]
    """Scheduler nodes before fusion, with dependencies that keep work where it hides communication.

    An event is a start or a wait. Events keep their order; matmuls and other library calls stay between the same
    events; a generated kernel between a start and its wait stays before that wait. Nothing else is restricted: Inductor
    may fuse within these bounds.
    """

    def __init__(self, before: Callable[[list[Any]], list[Any]] | None = None) -> None:
        self.before = before

    def __call__(self, nodes: list[Any]) -> list[Any]:
        if self.before is not None:
            nodes = self.before(nodes)
        if _hold(nodes):
            scheduler = nodes[0].scheduler
            scheduler.nodes = nodes
            scheduler.compute_ancestors()  # fusion checks these for cycles
        return nodes

    def uuid(self) -> Any | None:
        if self.before is None:
            return "meshweave.hold_order.2"
        its = getattr(self.before, "uuid", lambda: None)()
        return None if its is None else ("meshweave.hold_order.2", its)

    def __deepcopy__(self, memo: object) -> HoldOrder:
        return self


def _hold(nodes: Sequence[Any]) -> bool:
    """Add the dependencies; returns whether any were added."""
    nodes = [node for node in nodes if node.get_buffer_names()]
    events = [i for i, node in enumerate(nodes) if contains_collective(node) or contains_wait(node)]
    if not events:
        return False
    begins = dict(_windows(nodes, [i for i in events if contains_wait(nodes[i])]))
    at = {i: place for place, i in enumerate(events)}
    place = 0  # of the next event
    for i, node in enumerate(nodes):
        if i in at:
            place = at[i] + 1
            if at[i]:
                _after(node, nodes[events[at[i] - 1]])
        elif is_library_call(node):
            if place:
                _after(node, nodes[events[place - 1]])
            if place < len(events):
                _after(nodes[events[place]], node)
        else:
            hides = next((e for e in events[place:] if begins.get(e, len(nodes)) < i), None)
            if hides is not None:
                _after(nodes[hides], node)
    _read_after(nodes, [nodes[i] for i in begins])
    return True


def _read_after(nodes: Sequence[Any], waits: Iterable[Any]) -> None:
    """Keep the readers of a result after its wait.

    A wait is a mutation to Inductor, and its C++ backend loses that dependency where it recomputes the loops of a
    reader to fuse it, unless the reader has another dependency that is not a read (torch 2.13,
    SchedulerNode.recompute_size_and_body)."""
    buffers = {name: wait for wait in waits for name in wait.get_buffer_names()}
    for node in nodes:
        for name in [
            dep.name for dep in node.unmet_dependencies if dep.name in buffers and buffers[dep.name] is not node
        ]:
            add_dependency(node, name, written=name)  # which fusion never makes redundant


def _windows(nodes: Sequence[Any], waits: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Each wait with its start, by position; -1 if the start is not found, which then covers everything before the
    wait."""
    makers = {name: i for i, node in enumerate(nodes) for name in node.get_buffer_names()}
    for i in waits:
        pending, start = [i], -1
        while pending and start < 0:
            for dep in nodes[pending.pop()].unmet_dependencies:
                source = makers.get(dep.name)
                if source is None or getattr(dep, "is_fake", False):
                    continue
                if contains_collective(nodes[source]):
                    start = max(start, source)
                else:  # one of several results of a start
                    pending.append(source)
        yield i, start


def _after(node: Any, earlier: Any) -> None:
    """Make `node` come after `earlier` without keeping any buffer alive."""
    own = next(iter(node.get_buffer_names()))
    for name in earlier.get_buffer_names():
        add_dependency(node, name, written=own)


def patches(settings: BackendSettings, options: Mapping[str, Any]) -> dict[str, Any]:
    """Inductor's options for meshweave's pass, over the user's `options`.

    Options that are switched off are listed in every report; those that the user had switched on, in a warning too.
    Raises MeshweaveError for rings if this torch's Inductor reads their results too early.
    """
    if (
        any(isinstance(graph_pass, Decompose) for graph_pass in settings.passes)
        and torch.torch_version.TorchVersion(torch.__version__) < "2.13"
    ):
        raise MeshweaveError(
            "rings in Inductor need torch 2.13: an earlier version (seen in 2.11) may read messages before they arrive",
            where="passes=",
            got=f"torch {torch.__version__}",
            expected="torch 2.13, inner='aot_eager', or passes without decompose",
        )

    def now(name: str, otherwise: object = None) -> Any:
        return options.get(name, getattr(config, name, otherwise))

    off = {name: value for name, value in {**_OWN, **_REORDERS}.items() if now(name, value) != value}
    own_options = [name for name in off if name in _OWN]
    if own_options:
        warnings.warn(
            f"meshweave orders communication instead of Inductor: {', '.join(own_options)} off while it compiles",
            stacklevel=3,
        )
    note = (f"off in Inductor while it compiles: {', '.join(off)}",) if off else ()
    other_passes, joint, before_fusion = _others(now(_POST_GRAD)), _others(now(_JOINT)), now(_PRE_FUSION)
    before_parting = {_JOINT: JointPasses(settings, joint)} if settings.has("joint graph") else {}
    return {
        **options,
        **off,
        **before_parting,
        _POST_GRAD: GraphPasses(replace(settings, notes=(*settings.notes, *note)), other_passes),
        _PRE_FUSION: HoldOrder(before_fusion.before if isinstance(before_fusion, HoldOrder) else before_fusion),
    }


def _others(installed_passes: Any) -> tuple[Any, ...]:
    """Passes without meshweave's: the innermost of nested contexts counts, once."""
    passes = (
        installed_passes
        if isinstance(installed_passes, (list, tuple))
        else ()
        if installed_passes is None
        else (installed_passes,)
    )
    return tuple(
        o
        for installed_pass in passes
        for o in (installed_pass.before if isinstance(installed_pass, _Passes) else (installed_pass,))
    )


@contextmanager
def install_pass(settings: BackendSettings) -> Iterator[None]:
    """Inductor with meshweave's pass for code that is compiled in this thread meanwhile, forward and backward.

    Backward graphs are compiled with their forward graphs: on a GPU autograd would compile them in another thread,
    which does not see this thread's options.
    """
    let_gathers_overlap()  # for graphs that are compiled, or found in Inductor's cache, and run meanwhile
    with config.patch(patches(settings, {})), backward_compiled_with_forward():
        yield


def compile_with(
    settings: BackendSettings, gm: fx.GraphModule, inputs: Sequence[Any], mode: str, options: Mapping[str, Any]
) -> Any:
    """torch.compile's Inductor compilation, with meshweave's pass."""
    chosen = {} if mode == "default" else list_mode_options(mode)
    named = {name.replace("-", "_"): value for name, value in options.items()}
    return compile_fx(gm, list(inputs), config_patches=patches(settings, {**chosen, **named}))
