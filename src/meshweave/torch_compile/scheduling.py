"""What the drop-in does to one graph: settings, prices, agreement, split, rings, order, proof, report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

import meshweave.errors
from meshweave.errors import MeshweaveError
from meshweave.hardware.load import load_profile
from meshweave.hardware.profile import MachineProfile
from meshweave.interop.fake import unset_fake_temporarily
from meshweave.interop.process_groups import ranks_of_groups
from meshweave.ir.collectives import collective_of
from meshweave.passes import Carry, Decompose, Overlap, Pass, Split, pipeline_of
from meshweave.passes.options import Asked
from meshweave.problem.figures import Figures
from meshweave.rings import DecomposeOptions, DecomposeReport, decompose_graph
from meshweave.rows import SplitOptions, SplitReport, split_batch
from meshweave.runtime.exchange import TIMEOUT_SECONDS
from meshweave.schedule import OverlapOptions, OverlapReport, overlap, overlap_graph
from meshweave.schedule.decide import NoOrderError
from meshweave.torch_compile.agreement import Agreement, world_agreement
from meshweave.torch_compile.substitute import module_of, substitute

Report = OverlapReport | DecomposeReport | SplitReport
Cost = MachineProfile | Callable[..., float]
# The profile of a machine that nobody described, by the type of device that the graph is for.
_USUAL = {"cpu": "cpu-gloo", "cuda": "h100"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What `backend` and `inductor_pass` are told, checked. `notes` are put into every report on an order.

    `passes` are those over graphs: split, decompose, overlap.
    """

    cost: Cost | None = None
    memory_cap_bytes: int | None = None
    passes: tuple[Pass[Any], ...] = (Overlap(),)
    groups: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    report: Callable[[Any], object] | None = None
    ranks: tuple[int, ...] | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    notes: tuple[str, ...] = ()

    @property
    def overlap(self) -> Overlap | None:
        """How graphs are ordered; None: not at all."""
        return next((one for one in self.passes if isinstance(one, Overlap)), None)

    @property
    def decompose(self) -> Decompose | None:
        return next((one for one in self.passes if isinstance(one, Decompose)), None)

    @property
    def split(self) -> Split | None:
        return next((one for one in self.passes if isinstance(one, Split)), None)

    def schedule(self, graph: fx.Graph) -> OverlapReport | None:
        """Order the communications of a graph in place. One without any stays as it is and has no report.

        Raises MeshweaveError as `overlap_graph` does, and where ranks do not agree.
        """
        if not _communicates(graph):
            return None
        cost, notes = self._priced(graph)
        agreement = world_agreement(self.ranks, self.timeout_seconds)
        groups = None if self.groups is None else dict(self.groups)
        with unset_fake_temporarily():  # compilers run under the fake mode of what they compile, ours makes tensors too
            if self.decompose is not None:
                self._taken_apart(graph, self.decompose, cost, agreement)
            report = None
            if self.overlap is not None:
                report = overlap_graph(
                    graph,
                    cost=cost,
                    memory_cap_bytes=self.memory_cap_bytes,
                    groups=groups,
                    options=self.overlap,
                    agree=self._agree(agreement),
                )
        if agreement is not None:
            agreement.prove(graph, groups)
        if report is not None:
            report = replace(report, notes=(*report.notes, *notes))
            self._tell(report)
        return report

    def _taken_apart(self, graph: fx.Graph, options: DecomposeOptions, cost: Cost, agreement: Agreement | None) -> None:
        """Take collectives apart in place."""
        made, report = decompose_graph(
            module_of(graph),
            cost=cost,
            groups=None if self.groups is None else dict(self.groups),
            rank=None if dist.is_available() and dist.is_initialized() else (self.ranks or (0,))[0],
            options=options,
            memory_cap_bytes=self.memory_cap_bytes,
            overlap_options=self.overlap,
            agree=self._agree(agreement),
        )
        if report.num_taken:
            substitute(graph, made)
        self._tell(report)

    def split_rows(self, graph: fx.Graph) -> SplitReport | None:
        """Run the rows of a graph, forward with backward or by itself, in chunks, in place, where its simulated seconds
        are fewer then. A graph without communication stays as it is and has no report."""
        if self.split is None or not _communicates(graph):
            return None
        cost, _ = self._priced(graph)
        groups = None if self.groups is None else dict(self.groups)

        def seconds(one: fx.GraphModule) -> float:
            cap = self.memory_cap_bytes
            try:
                return overlap(one, cost=cost, memory_cap_bytes=cap, groups=groups, options=self.overlap)[1].seconds
            except NoOrderError:
                return float("inf")

        with unset_fake_temporarily():
            gm = module_of(graph)
            is_judged = self.split.when == "gain"
            counts = self.split.num_chunks if is_judged else self.split.num_chunks[:1]
            made, report = split_batch(gm, counts, seconds=seconds if is_judged else None)
            agreement = world_agreement(self.ranks, self.timeout_seconds)
            if agreement is not None:
                mine = report.num_chunks if report.is_taken else 0
                told = Figures(_shape_of(graph), (float(mine),))
                count = int(agreement.figures(told, self._told()).numbers[0])
                if count != mine:
                    made, report = split_batch(gm, count) if count else (gm, replace(report, is_taken=False))
            if report.is_taken:
                substitute(graph, made)
        self._tell(report)
        return report

    def _priced(self, graph: fx.Graph) -> tuple[Cost, tuple[str, ...]]:
        """The costs, and the notes on them."""
        if self.cost is not None:
            return self.cost, self.notes
        cost, note = _usual(graph)
        return cost, (*self.notes, note)

    def _agree(self, agreement: Agreement | None) -> Callable[[Figures], Figures] | None:
        return None if agreement is None else partial(agreement.figures, told=self._told())

    def _tell(self, report: Report) -> None:
        if self.report is not None:
            self.report(report)

    def _told(self) -> str:
        """What else an order depends on and all ranks must have been told alike, as text."""
        passes = tuple(replace(one, releasable=None) if isinstance(one, Overlap) else one for one in self.passes)
        return f"memory_cap_bytes={self.memory_cap_bytes}, {passes}"

    def key(self) -> str | None:
        """Names everything that an order depends on besides the graph, for caches of compiled graphs; None where a
        graph from a cache would be wrong.

        It would be where other ranks wait for this one to agree, where a callable may cost something else by now, and
        where a report is due.
        """
        if world_agreement(self.ranks, self.timeout_seconds) is not None or self.report is not None:
            return None
        if not (self.cost is None or isinstance(self.cost, MachineProfile)) or (
            self.overlap and self.overlap.releasable
        ):
            return None
        said = [
            _sources(),
            torch.__version__,
            "" if self.cost is None else _figures(self.cost),
            repr((self.memory_cap_bytes, self.passes, self.groups, self.ranks)),
            repr(ranks_of_groups()),  # a compiled graph names them, and one name may be another group next time
        ]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()


def settings(
    cost: Cost | str | Path | None,
    memory_cap_bytes: int | None,
    passes: tuple[Pass[Any], ...],
    groups: Mapping[str, Sequence[int]] | None,
    report: Callable[[Any], object] | None,
    ranks: Sequence[int] | None,
    timeout_seconds: float,
) -> Settings:
    """The settings of what a user said. Raises MeshweaveError for a profile that there is not, and a cost that is
    none."""
    known = load_profile(cost) if isinstance(cost, (str, Path)) else cost
    if not (known is None or isinstance(known, MachineProfile) or callable(known)):
        raise MeshweaveError(
            "this is no cost",
            got=repr(cost),
            expected="a machine profile, the name or file of one, or a callable that gives a node's seconds",
            hint="`meshweave calibrate -o machine.toml` measures the machine at hand",
        )
    table = None if groups is None else tuple((name, tuple(members)) for name, members in sorted(groups.items()))
    chosen = None if ranks is None else tuple(sorted(set(ranks)))
    return Settings(known, memory_cap_bytes, passes, table, report, chosen, timeout_seconds)


def graph_passes(
    passes: Asked,
    options: OverlapOptions | None,
    decompose: DecomposeOptions | bool | None,
    split: SplitOptions | int | bool | None,
) -> tuple[Pass[Any], ...]:
    """The passes over graphs that a caller asks for, the overlap pass where none is named. Raises MeshweaveError for
    what names no pass, or one over whole steps."""
    overlap = options or (OverlapOptions() if passes is None else None)
    asked = pipeline_of(passes, split=split, decompose=decompose, overlap=overlap).passes
    asked = tuple(one for one in asked if not isinstance(one, Carry))  # from step to step: of no graph by itself
    if others := [one.name for one in asked if not isinstance(one, (Split, Decompose, Overlap))]:
        raise MeshweaveError(
            "this pass is of whole training steps, which torch.compile does not see",
            where="passes=",
            got=", ".join(others),
            expected="split, decompose and overlap",
        )
    return asked


def _communicates(graph: fx.Graph) -> bool:
    return any(n.op == "call_function" and collective_of(n) is not None for n in graph.nodes)


def _shape_of(graph: fx.Graph) -> str:
    """The ops of a graph and what they make, as one number: the same on every rank that runs it."""
    lines = [f"{node.op} {node.target if node.op == 'call_function' else ''} {_size(node)}" for node in graph.nodes]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:24]


def _size(node: fx.Node) -> str:
    made = node.meta.get("val")
    return f"{made.dtype}{list(map(str, made.shape))}" if isinstance(made, torch.Tensor) else ""


def _usual(graph: fx.Graph) -> tuple[MachineProfile, str]:
    """The profile for a graph that came without one, and the note that says so."""
    kinds = {v.device.type for n in graph.nodes if isinstance(v := n.meta.get("val"), torch.Tensor)} - {"meta"}
    kind = "cuda" if "cuda" in kinds else "cpu" if kinds <= {"cpu"} else min(kinds - {"cpu"})
    if kind not in _USUAL:
        raise MeshweaveError(
            f"there is no usual profile for '{kind}'",
            got="no cost",
            expected="cost=, a machine profile or a callable",
            hint="`meshweave calibrate -o machine.toml` measures the machine at hand",
        )
    name = _USUAL[kind]
    return load_profile(
        name
    ), f"no cost was given: priced as {name}; `meshweave calibrate` measures the machine at hand"


@cache
def _sources() -> str:
    """The code of meshweave, as one number: another version may order otherwise."""
    package = Path(meshweave.errors.__file__).parent
    held = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        held.update(path.read_bytes())
    return held.hexdigest()


def _figures(profile: MachineProfile) -> str:
    """All figures of a profile, whose own repr is short."""
    return repr([(name, getattr(profile, name)) for name in profile.__dataclass_fields__])
