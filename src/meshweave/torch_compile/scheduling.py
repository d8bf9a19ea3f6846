"""What the drop-in does to one graph: settings, prices, agreement, order, proof, report."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import fx
from torch._subclasses.fake_tensor import unset_fake_temporarily

import meshweave.errors
from meshweave.errors import MeshweaveError
from meshweave.hardware.load import load_profile
from meshweave.hardware.profile import MachineProfile
from meshweave.overlap import OverlapOptions, OverlapReport, overlap_graph
from meshweave.overlap.vocabulary import collective_of
from meshweave.torch_compile.agreement import TIMEOUT_SECONDS, world_agreement

Cost = MachineProfile | Callable[..., float]
# The profile of a machine that nobody described, by the type of device that the graph is for.
_USUAL = {"cpu": "cpu-gloo", "cuda": "h100"}


@dataclass(frozen=True, slots=True)
class Settings:
    """What `backend` and `inductor_pass` are told, checked. `notes` are put into every report."""

    cost: Cost | None = None
    memory_cap_bytes: int | None = None
    options: OverlapOptions | None = None
    groups: tuple[tuple[str, tuple[int, ...]], ...] | None = None
    report: Callable[[OverlapReport], object] | None = None
    ranks: tuple[int, ...] | None = None
    timeout_seconds: float = TIMEOUT_SECONDS
    notes: tuple[str, ...] = ()

    def schedule(self, graph: fx.Graph) -> OverlapReport | None:
        """Order the communications of a graph in place. One without any stays as it is and has no report.

        Raises MeshweaveError as `overlap_graph` does, and where ranks do not agree.
        """
        if not any(n.op == "call_function" and collective_of(n) is not None for n in graph.nodes):
            return None
        cost, notes = self.cost, self.notes
        if cost is None:
            cost, note = _usual(graph)
            notes = (*notes, note)
        agreement = world_agreement(self.ranks, self.timeout_seconds)
        groups = None if self.groups is None else dict(self.groups)
        with unset_fake_temporarily():  # compilers run under the fake mode of what they compile, ours makes tensors too
            report = overlap_graph(
                graph,
                cost=cost,
                memory_cap_bytes=self.memory_cap_bytes,
                groups=groups,
                options=self.options,
                agree=None if agreement is None else partial(agreement.figures, told=self._told()),
            )
        if agreement is not None:
            agreement.prove(graph, groups)
        report = replace(report, notes=(*report.notes, *notes))
        if self.report is not None:
            self.report(report)
        return report

    def _told(self) -> str:
        """What else an order depends on and all ranks must have been told alike, as text."""
        options = replace(self.options or OverlapOptions(), releasable=None)
        return f"memory_cap_bytes={self.memory_cap_bytes}, {options}"

    def key(self) -> str | None:
        """Names everything that an order depends on besides the graph, for caches of compiled graphs; None where a
        graph from a cache would be wrong.

        It would be where other ranks wait for this one to agree, where a callable may cost something else by now, and
        where a report is due.
        """
        if world_agreement(self.ranks, self.timeout_seconds) is not None or self.report is not None:
            return None
        if not (self.cost is None or isinstance(self.cost, MachineProfile)) or (
            self.options and self.options.releasable
        ):
            return None
        said = [
            _sources(),
            torch.__version__,
            "" if self.cost is None else _figures(self.cost),
            repr((self.memory_cap_bytes, self.options, self.groups)),
            repr(_registered()),
        ]
        return hashlib.sha256("\n".join(said).encode()).hexdigest()


def settings(
    cost: Cost | str | Path | None,
    memory_cap_bytes: int | None,
    options: OverlapOptions | None,
    groups: Mapping[str, Sequence[int]] | None,
    report: Callable[[OverlapReport], object] | None,
    ranks: Sequence[int] | None,
    timeout_seconds: float,
) -> Settings:
    """The settings of what a user said. Raises MeshweaveError for a profile that there is not and a cost that is
    none."""
    found = load_profile(cost) if isinstance(cost, (str, Path)) else cost
    if not (found is None or isinstance(found, MachineProfile) or callable(found)):
        raise MeshweaveError(
            "this is no cost",
            got=repr(cost),
            expected="a machine profile, the name or file of one, or a callable that gives a node's seconds",
            hint="`meshweave calibrate -o machine.toml` measures the machine at hand",
        )
    table = None if groups is None else tuple((name, tuple(members)) for name, members in sorted(groups.items()))
    chosen = None if ranks is None else tuple(sorted(set(ranks)))
    return Settings(found, memory_cap_bytes, options, table, report, chosen, timeout_seconds)


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


def _registered() -> list[tuple[str, tuple[int, ...]]]:
    """The groups that torch.distributed knows: a compiled graph names them, and one name may be another group next
    time."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    known = dist.distributed_c10d._world.pg_names
    return sorted((str(name), tuple(dist.get_process_group_ranks(group))) for group, name in known.items())
