"""What the drop-in does to a graph: its passes run like those of whole steps, then ranks prove that their
communications match."""

from __future__ import annotations

import gc
import hashlib
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from torch import fx

from meshweave.cost.hardware.load import load_profile
from meshweave.cost.hardware.profile import MachineProfile
from meshweave.disk_cache import package_digest
from meshweave.errors import MeshweaveError, internal_cause
from meshweave.interop.fake import unset_fake_temporarily
from meshweave.interop.graphs import lazy_module_like
from meshweave.interop.process_groups import is_in_job, ranks_of_groups
from meshweave.ir.collectives import collective_of
from meshweave.ir.graph import copied_graph, output_node
from meshweave.optimize.batch_split import SplitReport
from meshweave.optimize.overlap import OverlapReport
from meshweave.optimize.overlap.decide import OverlapOptions
from meshweave.optimize.overlap.driver import warn_of_failure
from meshweave.passes import GraphProgram, Overlap, Pass, pass_list_of
from meshweave.passes.base import Scope
from meshweave.passes.candidates import run_passes
from meshweave.passes.options import PassesArgument
from meshweave.passes.table import GROUPS
from meshweave.search import Candidate
from meshweave.torch_compile.agreement import (
    TIMEOUT_SECONDS,
    Agreement,
    GraphsDifferError,
    only_group,
    world_agreement,
)

Cost = MachineProfile | Callable[..., float]
# The default profile, by the device type of the graph.
_USUAL = {"cpu": "cpu-gloo", "cuda": "h100"}


def fully_sharded_classes() -> list[str]:
    """The names of the classes of this process's modules that `fully_shard` has sharded."""
    fsdp = sys.modules.get("torch.distributed.fsdp")  # without it there are none, and importing it takes time
    if fsdp is None:
        return []
    classes = fsdp.FSDPModule.__subclasses__()
    modules = (x for x in gc.get_referrers(*classes) if isinstance(x, fsdp.FSDPModule)) if classes else ()
    return sorted({type(module).__name__.removeprefix("FSDP") for module in modules})


@dataclass(slots=True)
class HookNotice:
    """The warning, at most once, that communication is in no graph because `fully_shard` keeps it in hooks. The modules
    of the process are looked at when a drop-in is made (a graph break in a hook may keep torch from compiling anything,
    so that no backend is called) and when a graph does not communicate."""

    is_given: bool = False

    def look_at_modules(self) -> None:
        classes = () if self.is_given or not is_in_job() else fully_sharded_classes()
        if not classes:
            return
        self.is_given = True
        warnings.warn(
            "meshweave cannot overlap the communication of modules sharded by fully_shard "
            f"({', '.join(classes)}): torch runs it in hooks, on its own schedule, and no graph of torch.compile has "
            "it, so report= is not called for it. Sharded by mw.shard_in_graph(model, mesh) instead, before "
            "torch.compile, the model communicates in its graphs and takes the same steps",
            stacklevel=4,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendSettings:
    """The checked arguments of `backend` and `inductor_pass`. `notes` are put into every report on an order. `passes`
    are those over graphs, in the order in which they run."""

    cost: Cost | None = None
    memory_cap_bytes: int | None = None
    passes: tuple[Pass[Any], ...] = (Overlap(),)
    groups: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    report: Callable[[Any], object] | None = None
    ranks: tuple[int, ...] | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    notes: tuple[str, ...] = ()
    hooks: HookNotice = field(default_factory=HookNotice, compare=False, repr=False)

    def has(self, scope: Scope) -> bool:
        """Whether any pass applies to graphs of this kind."""
        return any(graph_pass.scope == scope for graph_pass in self.passes)

    def run(self, graph: fx.Graph, scope: Scope) -> bool:
        """Run the passes over graphs of this kind, in place; returns whether the graph has changed.

        A graph without communication is not changed.
        Raises VerifyError for what a pass broke, MeshweaveError if ranks do not agree or their communications would not
        match, and the errors of the passes.
        """
        passes = tuple(graph_pass for graph_pass in self.passes if graph_pass.scope == scope)
        communicates = any(n.op == "call_function" and collective_of(n) is not None for n in graph.nodes)
        if not communicates:
            self.hooks.look_at_modules()
        if not passes or not communicates:
            return False
        cost, notes = self._costs_with_notes(graph)
        agreement = self._agreement(graph)
        # compilers run under the fake mode of the graph, and meshweave creates tensors too
        with unset_fake_temporarily():
            program = self._program(graph, agreement)
            try:
                chosen, variants = run_passes(program, passes, cost)
            except GraphsDifferError as error:
                self._keep_order(graph, scope, program, agreement, error)
                return False
            except Exception as error:
                cause = internal_cause(error)
                if not cause:
                    raise
                warn_of_failure(cause)
                if agreement is not None and scope == "graph":
                    agreement.prove(graph, program.groups)
                return False
            if chosen.program is not program:
                _substitute(graph, chosen.program.module)
        if agreement is not None and scope == "graph":
            agreement.prove(graph, program.groups)
        for report in (report for reports in chosen.reports.values() for report in reports):
            self._tell(report, notes, variants)
        return chosen.program is not program

    def _agreement(self, graph: fx.Graph) -> Agreement | None:
        """The agreement of the ranks that compile this graph; None if this process is alone."""
        if world_agreement(self.ranks) is None:
            return None
        groups = None if self.groups is None else dict(self.groups)
        return world_agreement(self.ranks or only_group(graph, groups), self.timeout_seconds)

    def _keep_order(
        self,
        graph: fx.Graph,
        scope: Scope,
        program: GraphProgram,
        agreement: Agreement | None,
        difference: GraphsDifferError,
    ) -> None:
        """Leave a graph as it is where ranks have different compute (uneven shards are padded on some ranks only).
        Raises the difference if their communications do not match either."""
        if agreement is None or scope != "graph":
            return
        try:
            agreement.prove(graph, program.groups)
        except MeshweaveError as error:
            raise difference from error
        warnings.warn(
            f"meshweave leaves a graph in its order: {difference.where} and rank {agreement.ranks[0]} compute other "
            "things around the same communications (a dim that is not divided evenly is padded on some ranks only)",
            stacklevel=2,
        )

    def _program(self, graph: fx.Graph, agreement: Agreement | None) -> GraphProgram:
        is_job = is_in_job()
        # The other settings on which decisions depend and all ranks must agree.
        settings = f"memory_cap_bytes={self.memory_cap_bytes}, {self.passes}"
        return GraphProgram(
            _module_of(graph),
            None if self.groups is None else dict(self.groups),
            None if is_job else (self.ranks or (0,))[0],
            self.memory_cap_bytes,
            None if agreement is None else partial(agreement.figures, settings=settings),
            next((graph_pass for graph_pass in self.passes if isinstance(graph_pass, Overlap)), OverlapOptions()),
        )

    def _costs_with_notes(self, graph: fx.Graph) -> tuple[Cost, tuple[str, ...]]:
        """The costs, and the notes on them."""
        if self.cost is not None:
            return self.cost, self.notes
        cost, note = _usual(graph)
        return cost, (*self.notes, note)

    def _tell(self, report: Any, notes: tuple[str, ...], variants: Sequence[Candidate]) -> None:
        if self.report is None:
            return
        if isinstance(report, OverlapReport):
            report = replace(report, notes=(*report.notes, *notes))
        elif isinstance(report, SplitReport) and variants and report.is_taken:
            fastest = min(variant.seconds for variant in variants if not variant.reason)
            report = replace(report, seconds_before=variants[0].seconds, seconds_after=fastest)
        self.report(report)

    def key(self) -> str | None:
        """A key of everything that an order depends on besides the graph, for caches of compiled graphs; None if a
        cached graph would be wrong: if other ranks wait for this rank to agree, if a callable may have other costs by
        now, or a user's pass may behave differently, and if a report is requested."""
        if world_agreement(self.ranks, self.timeout_seconds) is not None or self.report is not None:
            return None
        if not (self.cost is None or isinstance(self.cost, MachineProfile)):
            return None
        if any(not type(graph_pass).__module__.startswith("meshweave.") for graph_pass in self.passes):
            return None
        parts = [
            package_digest(),  # another version may order differently
            torch.__version__,
            "" if self.cost is None else _figures(self.cost),
            repr((self.memory_cap_bytes, self.passes, self.groups, self.ranks)),
            repr(ranks_of_groups()),  # a compiled graph contains them, and the same name may be another group next time
        ]
        return hashlib.sha256("\n".join(parts).encode()).hexdigest()


class BackendOptions(TypedDict, total=False):
    """The options of `backend` and `inductor_pass`."""

    cost: Cost | str | Path | None
    memory_cap_bytes: int | None
    passes: PassesArgument
    groups: Mapping[str, Sequence[int]] | None
    report: Callable[[Any], object] | None
    ranks: Sequence[int] | None
    timeout_seconds: float


def settings(**options: Unpack[BackendOptions]) -> BackendSettings:
    """The settings for a user's options. Raises MeshweaveError for an unknown profile, an invalid cost, and the
    errors of `graph_passes`."""
    given: dict[str, Any] = dict(options)
    cost, groups, ranks = (given.get(name) for name in ("cost", "groups", "ranks"))
    known = load_profile(cost) if isinstance(cost, (str, Path)) else cost
    if not (known is None or isinstance(known, MachineProfile) or callable(known)):
        raise MeshweaveError(
            "not a cost",
            got=repr(cost),
            expected="a machine profile, the name or file of one, or a callable that gives a node's seconds",
            hint="`meshweave calibrate -o machine.toml` measures this machine",
        )
    given["cost"], given["passes"] = known, graph_passes(options.get("passes"))
    if groups is not None:
        given["groups"] = tuple((name, tuple(group)) for name, group in sorted(groups.items()))
    if ranks is not None:
        given["ranks"] = tuple(sorted(set(ranks)))
    checked = BackendSettings(**given)
    checked.hooks.look_at_modules()
    return checked


def graph_passes(passes: PassesArgument) -> tuple[Pass[Any], ...]:
    """The passes over graphs that a caller asks for, by default the overlap pass. Raises MeshweaveError for an unknown
    pass, or one over whole steps."""
    listed = pass_list_of("overlap" if passes is None else passes).passes
    # Groups bring passes that work between steps, or between forward and backward: they do not apply to a single graph.
    grouped = {name for names in GROUPS.values() for name in names}
    listed = tuple(p for p in listed if p.scope != "step" or p.name not in grouped)
    if whole_step := [graph_pass.name for graph_pass in listed if graph_pass.scope == "step"]:
        raise MeshweaveError(
            "this pass needs whole training steps, which torch.compile does not see",
            where="passes=",
            got=", ".join(whole_step),
            expected="split, decompose, overlap, or a pass with scope 'graph' or 'joint graph'",
            hint="a pass that changes its program only by program.each(...) can have that scope",
        )
    return listed


def _usual(graph: fx.Graph) -> tuple[MachineProfile, str]:
    """The default profile for a graph, and the note about it."""
    kinds = {v.device.type for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)} - {"meta"}
    kind = "cuda" if "cuda" in kinds else "cpu" if kinds <= {"cpu"} else min(kinds - {"cpu"})
    if kind not in _USUAL:
        raise MeshweaveError(
            f"no default profile for '{kind}'",
            got="no cost",
            expected="cost=, a machine profile or a callable",
            hint="`meshweave calibrate -o machine.toml` measures this machine",
        )
    name = _USUAL[kind]
    return load_profile(name), f"no cost was passed: priced as {name}; `meshweave calibrate` measures this machine"


def _figures(profile: MachineProfile) -> str:
    """All figures of a profile, whose own repr is short."""
    return repr([(name, getattr(profile, name)) for name in profile.__dataclass_fields__])


def _module_of(graph: fx.Graph) -> fx.GraphModule:
    """A module that runs a copy of the graph; its constants are those of the module that owns it."""
    owner = graph.owning_module or fx.GraphModule(torch.nn.Module(), graph)
    return lazy_module_like(owner, copied_graph(graph))


def _substitute(graph: fx.Graph, module: fx.GraphModule) -> None:
    """Turn `graph` into the graph of `module`, in place and with its names: placeholders and the output stay the same
    nodes."""
    output = output_node(graph)
    old = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    placeholders = module.graph.find_nodes(op="placeholder"), graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(*placeholders, strict=True))
    with graph.inserting_before(output):
        for node in module.graph.nodes:
            if node.op == "output":
                output.args = fx.map_arg(node.args, copies.__getitem__)
            elif node.op != "placeholder":
                copy = copies[node] = graph.node_copy(node, copies.__getitem__)
                copy.meta = dict(node.meta)
    for node in reversed(old):
        graph.erase_node(node)
    for node, copy in copies.items():  # the names of removed nodes
        copy.name = node.name
    graph.lint()
