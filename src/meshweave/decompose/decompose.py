"""The pass: collectives beside matmuls become rings, where that is worth it, and every one says why or why not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import fx

from meshweave.decompose.algorithms import algorithm, prove
from meshweave.decompose.chunks import Downstream, Shapes, Upstream
from meshweave.decompose.find import KINDS, gathered, hoisted, is_kept, reduced, starts_of, stays_in, variants
from meshweave.decompose.price import Estimate, Prices, gather_estimate, reduce_estimate
from meshweave.decompose.proof import prove_rings
from meshweave.decompose.rewrite import Way, rewrite_gather, rewrite_reduce, rewrite_scatter, wait_of, wide_dtype
from meshweave.decompose.share import share_gathers
from meshweave.decompose.writer import Ring, Writer, copied, ring_of
from meshweave.errors import MeshweaveError
from meshweave.hardware.profile import MachineProfile
from meshweave.ir.graph import Spec, origin_of
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.verify import verify_rank
from meshweave.simulate.shapes import local_values


@dataclass(frozen=True, slots=True)
class DecomposeOptions:
    """What may be taken apart, and how.

    when: "gain": where the costs say that it is faster; "always": wherever it can be, the first way that can, and costs
        are not asked.
    all_gather, reduce_scatter, all_reduce: the ways that are tried, in this order: names of the table of algorithms (an
        all-reduce has those of a reduce-scatter), or "pipelined": collectives of parts. None: stays as it is.
    num_chunks: the numbers of parts that "pipelined" tries.
    accumulate: the dtype in which sums are taken; None: float32 for half precision, else that of the operand.
    sums: whether a matmul that sums over what was gathered may be taken apart, into a sum of products.
    share: whether equal gathers of one phase become one first.
    most_devices: of a group; the graph grows with it.
    margin: the share of the time before that has to be gained.
    """

    when: Literal["gain", "always"] = "gain"
    all_gather: tuple[str, ...] = ("direct", "cyclic", "bidirectional", "broadcast", "pipelined")
    reduce_scatter: tuple[str, ...] = ("direct", "ring", "pipelined")
    all_reduce: tuple[str, ...] = ("direct", "ring", "pipelined")
    num_chunks: tuple[int, ...] = (2, 4, 8)
    accumulate: torch.dtype | None = None
    sums: bool = True
    share: bool = True
    most_devices: int = 64
    margin: float = 0.02


@dataclass(frozen=True, slots=True)
class Row:
    """A collective, and what became of it. Seconds are 0 where costs were not asked; `matmuls` are those of `way`, the
    best that there was ("" if there was none)."""

    name: str
    op: str
    group: str
    place: str
    matmuls: tuple[str, ...] = ()
    way: str = ""
    num_steps: int = 0
    seconds_before: float = 0.0
    seconds_after: float = 0.0
    is_taken: bool = False
    reason: str = ""
    numerics: str = ""

    def __str__(self) -> str:
        verdict = "taken apart" if self.is_taken else "left"
        return f"{self.name} ({self.op} over {self.group}) {verdict}: {self.reason}; {self.place}"


@dataclass(frozen=True, slots=True)
class DecomposeReport:
    """Every all-gather, reduce-scatter and all-reduce of a role: those for which an equal one stands, then in order."""

    rows: tuple[Row, ...]

    @property
    def num_taken(self) -> int:
        return sum(row.is_taken for row in self.rows)

    @property
    def saved_seconds(self) -> float:
        """What the estimates promise together."""
        return sum(row.seconds_before - row.seconds_after for row in self.rows if row.is_taken)

    def __str__(self) -> str:
        head = f"{self.num_taken} of {len(self.rows)} collectives taken apart"
        return "\n".join([head, *(f"  {row}" for row in self.rows)])


@dataclass(frozen=True, slots=True)
class _Choice:
    """A way that can be gone, and what it costs."""

    way: Way
    found: Downstream | Upstream
    estimate: Estimate | None

    @property
    def gain(self) -> float:
        return self.estimate.before - self.estimate.after if self.estimate is not None else 0.0


@dataclass(slots=True)
class _Pass:
    role: RankGraph
    options: DecomposeOptions
    shapes: Shapes
    prices: Prices | None
    write: Writer = field(init=False)

    def __post_init__(self) -> None:
        self.write = Writer(self.role.graph, next(iter(self.role.graph.nodes)))

    def run(self, shared: list[Row]) -> DecomposeReport:
        return DecomposeReport((*shared, *map(self.collective, starts_of(self.role))))

    def collective(self, start: fx.Node) -> Row:
        ring, kind = ring_of(self.role, start), KINDS[start.target]
        row = Row(start.name, kind, ring.group, str(origin_of(start)))
        ways = self.ways(kind)
        if problem := self.refused(start, ring, ways):
            return replace(row, reason=problem)
        order = {node: i for i, node in enumerate(self.role.graph.nodes)}
        why: list[str] = []
        choices = list(self.choices(start, ring, ways, order, why))
        if not choices:
            return replace(row, reason=why[0])
        best = max(choices, key=lambda choice: choice.gain)  # the first of equals
        row = self.described(row, best, ring)
        if best.estimate is not None and best.gain <= self.options.margin * best.estimate.before:
            return replace(row, reason=_no_gain(best))
        numerics = self.rewrite(start, ring, best, order)
        return replace(row, is_taken=True, reason=_gain(best), numerics=numerics)

    def ways(self, kind: str) -> list[Way]:
        names: tuple[str, ...] = getattr(self.options, kind)
        table = "all_gather" if kind == "all_gather" else "reduce_scatter"
        found = []
        for name in names:
            if name == "pipelined":
                found += [Way(None, count) for count in self.options.num_chunks if count > 1]
            else:
                found.append(Way(algorithm(table, name), 0))  # type: ignore[arg-type]
        return found

    def refused(self, start: fx.Node, ring: Ring, ways: list[Way]) -> str:
        """Why nothing is tried, if so."""
        if not ways:
            return "the options leave it as it is"
        if ring.size == 1:
            return "its group is of one device: nothing moves"
        if ring.size > self.options.most_devices:
            return f"its group is of {ring.size} devices, and a ring would have as many steps"
        if not stays_in(self.role, start):
            return "its group has devices of other roles"
        return ""

    def choices(
        self, start: fx.Node, ring: Ring, ways: list[Way], order: dict[fx.Node, int], why: list[str]
    ) -> Iterator[_Choice]:
        kind = KINDS[start.target]
        for way in ways:
            if way.row is not None:
                prove(way.row, ring.size)
            if kind == "all_gather":
                found = gathered(start, way, ring, self.shapes, order)
                why.append(_joined(found.why))
                tried = variants(found, wait_of(start), self.options.sums)
                for one in tried[:1] if self.prices is None else tried:
                    yield _Choice(way, one, self.gather_estimate(start, one, ring, way))
                continue
            if way.row is not None and start.args[1] != "sum":
                why.append(f"a {start.args[1]} is not taken apart into messages")
                continue
            made = reduced(start, way, ring, self.shapes, order)
            why.append(_joined(made.why))
            if made.matmuls:
                yield _Choice(way, made, self.reduce_estimate(start, made, ring, way))

    def gather_estimate(self, start: fx.Node, found: Downstream, ring: Ring, way: Way) -> Estimate | None:
        if self.prices is None:
            return None
        return gather_estimate(self.prices, start, found, ring, way, is_kept(found, wait_of(start)))

    def reduce_estimate(self, start: fx.Node, found: Upstream, ring: Ring, way: Way) -> Estimate | None:
        if self.prices is None:
            return None
        dtype = self.dtype(start)
        factor = self.wide(dtype).itemsize / dtype.itemsize if way.row is not None and way.row.name == "ring" else 1.0
        return reduce_estimate(self.prices, start, found, ring, way, factor)

    def dtype(self, start: fx.Node) -> torch.dtype:
        return self.shapes.local.values[wait_of(start)][0].dtype

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        return self.options.accumulate or wide_dtype(dtype)

    def described(self, row: Row, best: _Choice, ring: Ring) -> Row:
        found = best.found
        matmuls = tuple(n.name for n in (found.consumers if isinstance(found, Downstream) else found.matmuls))
        steps = best.way.num_chunks if best.way.row is None else len(best.way.row.steps(ring.size))
        row = replace(row, matmuls=matmuls, way=str(best.way), num_steps=steps)
        if best.estimate is None:
            return row
        return replace(row, seconds_before=best.estimate.before, seconds_after=best.estimate.after)

    def rewrite(self, start: fx.Node, ring: Ring, best: _Choice, order: dict[fx.Node, int]) -> str:
        """Do it; returns what becomes of values."""
        way, found, wide = best.way, best.found, self.wide(self.dtype(start))
        self.write.begin(ring, not isinstance(found, Downstream))
        told = way.row.numerics if way.row is not None else "as by the collective"
        if isinstance(found, Downstream):
            wait = wait_of(start)
            for node in list(hoisted(found, wait, order)):
                wait.prepend(node)
            rewrite_gather(self.write, start, found, ring, way, self.shapes, wide)
            is_summed = "sum" in found.consumers.values()
        else:
            kind = KINDS[start.target]
            write = rewrite_scatter if kind == "reduce_scatter" else rewrite_reduce
            write(self.write, start, found, ring, way, self.shapes, wide)
            is_summed = way.row is not None
        sums = f"; sums in {str(wide).removeprefix('torch.')}" if is_summed else ""
        return f"{told}{sums}; a matmul of fewer rows may round otherwise than the whole"


def _shared(name: str, group: str, kept: str) -> Row:
    reason, numerics = f"{kept} gathers the same", "exact: the same elements"
    return Row(name, "all_gather", group, "", way="shared", is_taken=True, reason=reason, numerics=numerics)


def _joined(reasons: list[str]) -> str:
    return "; ".join(dict.fromkeys(reasons)) or "no matmul stands beside it"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"


def _gain(best: _Choice) -> str:
    if best.estimate is None:
        return f"{best.way}, as the options ask"
    before, after = _microseconds(best.estimate.before), _microseconds(best.estimate.after)
    return f"{best.way}: {after} instead of {before}"


def _no_gain(best: _Choice) -> str:
    """Which of its parts makes the best way too slow."""
    made = best.estimate
    assert made is not None
    before, after = _microseconds(made.before), _microseconds(made.after)
    if made.hidden >= made.collective:
        return f"other work hides it: {_microseconds(made.hidden)} of {_microseconds(made.collective)}"
    parts = {
        "the matmuls are slower in chunks": made.num_steps * made.chunk - made.compute,
        "messages take longer than the collective": made.num_messages * made.message - made.collective,
        "not every message is hidden": made.played - made.num_steps * made.chunk,
        "results have to be put together": made.losses,
    }
    worst = max(parts, key=parts.__getitem__)
    return f"no gain: {best.way} takes {after} instead of {before}, {worst} ({_microseconds(parts[worst])})"


def decompose(
    role: RankGraph, costs: object = None, options: DecomposeOptions | None = None
) -> tuple[RankGraph, DecomposeReport]:
    """A new rank graph in which collectives beside matmuls are taken apart, and what became of each; the role is
    untouched.

    An all-gather whose value goes to matmuls (past views, casts and what goes element by element) becomes a ring of
    permutes with a product for each chunk; so does a reduce-scatter of matmuls' results, and an all-reduce as a
    reduce-scatter and an all-gather. Message i + 1 is started before product i. `costs` is a MachineProfile (with
    when="always": not asked). Raises MeshweaveError for costs that do not say what compute takes, and for unknown
    algorithms.
    """
    options = options or DecomposeOptions()
    if options.when == "gain" and not isinstance(costs, MachineProfile):
        raise MeshweaveError(
            "to take collectives apart needs costs of compute and of links",
            got=type(costs).__name__,
            expected='a MachineProfile, such as load_profile("h100")',
            hint='or DecomposeOptions(when="always")',
        )
    made = copied(role)
    gone = share_gathers(made) if options.share else ()
    shapes = Shapes(local_values(made))
    prices = None
    if options.when == "gain":
        order = {node: i for i, node in enumerate(made.graph.nodes)}
        prices = Prices(made, costs, shapes, order)  # type: ignore[arg-type]
    report = _Pass(made, options, shapes, prices).run([_shared(*one) for one in gone])
    _tell_specs(made)
    prove_rings(made)
    return verify_rank(made), report


def _tell_specs(role: RankGraph) -> None:
    """What the new nodes make, for people to read; that every op fits its operands shows on the way."""
    for node, values in local_values(role).values.items():
        if "spec" not in node.meta and len(values) == 1 and node.target not in SYMBOLS:
            node.meta["spec"] = Spec(values[0].shape, values[0].dtype)
