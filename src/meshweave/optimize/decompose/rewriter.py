"""Replaces collectives beside matmuls by rings, as a choice function decides; each outcome has a reason."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import fx

from meshweave.cost.hardware.profile import MachineProfile
from meshweave.errors import MeshweaveError
from meshweave.ir.device_program import DeviceProgram, rewrite_role
from meshweave.ir.graph import place_of, wide_dtype
from meshweave.ir.rank import RankGraph, operands_of
from meshweave.optimize.decompose.algorithms import DecomposeOptions, algorithm
from meshweave.optimize.decompose.chains import Downstream, Shapes, Upstream
from meshweave.optimize.decompose.find import KINDS, after, gathered, nodes_to_hoist, reduced, starts_of, variants
from meshweave.optimize.decompose.price import Estimate, Kernels, RingPrices, gather_estimate, reduce_estimate
from meshweave.optimize.decompose.proof import prove_rings
from meshweave.optimize.decompose.report import (
    DecomposeReport,
    RingRow,
    gain_text,
    joined_reasons,
    no_gain_text,
)
from meshweave.optimize.decompose.rewrite import RingScheme, rewrite_gather, rewrite_sum, wait_of
from meshweave.optimize.decompose.writer import ChunkWriter, Ring, ring_of
from meshweave.optimize.overlap.prices import ProfilePrices
from meshweave.optimize.overlap.read import read_problem

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class RingChoice:
    """A possible decomposition, and its costs."""

    scheme: RingScheme
    chain: Downstream | Upstream
    num_steps: int
    estimate: Estimate | None
    more: float = 0.0  # gain of the second half of an all-reduce in that case

    @property
    def gain(self) -> float:
        return self.estimate.before - self.estimate.after + self.more if self.estimate is not None else 0.0

    @property
    def matmuls(self) -> tuple[fx.Node, ...]:
        chain = self.chain
        return tuple(chain.consumers) if isinstance(chain, Downstream) else tuple(chain.matmuls)


C = TypeVar("C", Downstream, Upstream)
# Among the choices for a start: that chosen, and the reason if it is not taken after all ("": it is taken).
Pick = Callable[[fx.Node, Sequence[RingChoice]], tuple[int, str]]


def first(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
    return 0, ""


def by_gain(margin: float) -> Pick:
    """Among the choices whose gain is within the margin of the best, that with the fewest steps (each has costs
    beyond the estimate, and nodes in the graph), the first of equals; not taken if it does not gain the margin."""

    def pick(start: fx.Node, choices: Sequence[RingChoice]) -> tuple[int, str]:
        most = max(choices, key=lambda choice: choice.gain)
        assert most.estimate is not None
        least = most.gain - margin * most.estimate.before
        near = [choice for choice in choices if choice.gain >= least]
        best = min(near, key=lambda choice: (choice.num_steps, -choice.gain))
        assert best.estimate is not None
        is_gain = best.gain > margin * best.estimate.before
        return choices.index(best), "" if is_gain else no_gain_text(best.scheme, best.estimate)

    return pick


@dataclass(slots=True)
class RingRewriter:
    """Visits the collectives of a graph in order; `pick` decides the outcome of each. `decisions` has for each
    decomposable collective the number of the choice, -1 if it was left."""

    program: DeviceProgram
    options: DecomposeOptions
    shapes: Shapes
    prices: RingPrices | None
    pick: Pick
    order_of_sums: str = ""  # over a group, if it differs from the algorithm's
    decisions: list[int] = field(default_factory=list)
    write: ChunkWriter = field(init=False)
    chains: dict[Hashable, Any] = field(default_factory=dict)  # of the present start, see `once`
    order: dict[fx.Node, int] = field(default_factory=dict)  # positions in the graph; empty after a change
    halves: list[fx.Node] = field(default_factory=list)  # gathers of decomposed all-reduces

    def __post_init__(self) -> None:
        self.write = ChunkWriter(self.program.graph, next(iter(self.program.graph.nodes)))

    def run(self) -> DecomposeReport:
        rows = list[RingRow]()
        for start in starts_of(self.program.graph):
            rows.append(self.collective(start))
            while self.halves:
                rows.append(self.collective(self.halves.pop()))
        prove_rings(self.program)
        return DecomposeReport(tuple(rows))

    def collective(self, start: fx.Node) -> RingRow:
        kind = KINDS[start.target]
        place = str(start.meta["origin"]) if "origin" in start.meta else place_of(start)
        if problem := self.program.refused(start):
            return RingRow(start.name, kind, str(start.args[-1]), place, reason=problem)
        ring, schemes = ring_of(self.program, start), self.schemes(kind)
        row = RingRow(start.name, kind, ring.group, place)
        if problem := self.refused(start, ring, schemes):
            return replace(row, reason=problem)
        order = self.order = self.order or {node: i for i, node in enumerate(self.program.graph.nodes)}
        why: list[str] = []
        choices = list(self.choices(start, ring, schemes, order, why))
        if not choices:
            return replace(row, reason=why[0])
        at, reason = self.pick(start, choices)
        self.decisions.append(-1 if reason else at)
        row = described(row, choices[at])
        if reason:
            return replace(row, reason=reason)
        best = choices[at]
        numerics, self.order = self.rewrite(start, ring, best, order), {}
        return replace(row, is_taken=True, reason=gain_text(best.scheme, best.estimate, best.more), numerics=numerics)

    def schemes(self, kind: str) -> list[RingScheme]:
        names: tuple[str, ...] = getattr(self.options, kind)
        table = "reduce_scatter" if kind == "all_reduce" else kind
        schemes = []
        for name in names:
            if name == "pipelined":
                schemes += [RingScheme(None, count) for count in self.options.num_chunks if count > 1]
            else:
                schemes.append(RingScheme(algorithm(table, name), 0))  # type: ignore[arg-type]
        return schemes

    def refused(self, start: fx.Node, ring: Ring, schemes: list[RingScheme]) -> str:
        """Why nothing is tried, if so."""
        if not schemes:
            return "the options exclude it"
        if ring.size == 1:
            return "its group has one device: nothing moves"
        if ring.size > self.options.most_devices:
            return f"its group has {ring.size} devices, and a ring would have as many steps"
        return ""

    def choices(
        self, start: fx.Node, ring: Ring, schemes: list[RingScheme], order: dict[fx.Node, int], why: list[str]
    ) -> Iterator[RingChoice]:
        kind = KINDS[start.target]
        self.forget()
        for scheme in schemes:
            steps = scheme.num_chunks if scheme.row is None else len(scheme.row.steps(ring.size))
            if kind == "all_gather":
                chain = self.once(scheme.num_chunks, gathered, start, scheme, ring, self.shapes, order)
                why.append(joined_reasons(chain.why))
                tried = variants(chain, wait_of(start), self.options.sums)
                for variant in tried[:1] if self.options.when == "always" else tried:
                    yield RingChoice(scheme, variant, steps, self.priced(gather_estimate, start, variant, ring, scheme))
                continue
            if scheme.row is not None and start.args[1] != "sum":
                why.append(f"a {start.args[1]} cannot be decomposed into messages")
                continue
            producers = self.once(scheme.num_chunks, reduced, start, scheme, ring, self.shapes, order)
            why.append(joined_reasons(producers.why))
            if producers.matmuls:
                more = self.second_half(start, producers, ring, order) if kind == "all_reduce" and scheme.row else 0.0
                factor = self.wide_factor(start, ring, scheme)
                estimate = self.priced(reduce_estimate, start, producers, ring, scheme, factor)
                yield RingChoice(scheme, producers, steps, estimate, more)

    def forget(self) -> None:
        """Forget what is valid only until the graph is rewritten."""
        self.chains.clear()
        if self.prices is not None:
            self.prices.known.clear()

    def once(self, key: Hashable, find: Callable[..., C], *args: Any) -> C:
        """What `find` returns, computed once for the present start: algorithms that cut alike have the same chains."""
        if (find, key) not in self.chains:
            self.chains[find, key] = find(*args)
        return self.chains[find, key]  # type: ignore[no-any-return]

    def priced(self, estimate: Callable[..., Estimate], *args: Any) -> Estimate | None:
        """An estimate; None without costs."""
        return estimate(self.prices, *args) if self.prices is not None else None

    def wide_factor(self, start: fx.Node, ring: Ring, scheme: RingScheme) -> float:
        """The bytes of a message per byte of the operand."""
        dtype, is_wide = self.dtype(start), scheme.row is not None and scheme.row.is_chain(ring.size)
        return self.wide(dtype).itemsize / dtype.itemsize if is_wide else 1.0

    def second_half(self, start: fx.Node, chain: Upstream, ring: Ring, order: dict[fx.Node, int]) -> float:
        """The possible gain of an all-reduce's final gather beside the matmuls after it."""
        if self.prices is None:
            return 0.0
        wait, (operand,) = wait_of(start), operands_of(start)
        cut = chain.cuts[operand]
        chain_after = self.once(cut, after, wait, cut, self.shapes, order)
        schemes = [scheme for scheme in self.schemes("all_gather") if scheme.row is not None]
        tried = [(variant, scheme) for scheme in schemes for variant in variants(chain_after, wait, self.options.sums)]
        gains = [0.0]
        for variant, scheme in tried:
            estimate = gather_estimate(self.prices, start, variant, ring, scheme, second_half=True)
            if estimate.before - estimate.after > self.options.margin * estimate.before:
                gains.append(estimate.before - estimate.after)
        return max(gains)

    def dtype(self, start: fx.Node) -> torch.dtype:
        return self.shapes.values[wait_of(start)][0].dtype

    def wide(self, dtype: torch.dtype) -> torch.dtype:
        return self.options.accumulate or wide_dtype(dtype)

    def rewrite(self, start: fx.Node, ring: Ring, best: RingChoice, order: dict[fx.Node, int]) -> str:
        """Rewrite; returns the effect on values."""
        scheme, chain, wide = best.scheme, best.chain, self.wide(self.dtype(start))
        kind, wait, write, shapes = KINDS[start.target], wait_of(start), self.write, self.shapes
        write.begin(ring, "gather" if kind == "all_gather" else "sum")
        if isinstance(chain, Downstream):
            for node in list(nodes_to_hoist(chain, wait, order)):
                wait.prepend(node)
            rewrite_gather(write, start, chain, ring, scheme, shapes, wide)
        else:
            begun = rewrite_sum(write, start, chain, ring, scheme, shapes, wide)
            if begun is not None:
                self.halves.append(begun)
                self.locate(begun, start, wait)
        return self.numerics(scheme, chain, wide)

    def locate(self, begun: fx.Node, start: fx.Node, wait: fx.Node) -> None:
        """For costs, a new collective is where the collective was that it comes from."""
        if self.prices is not None:
            order = self.prices.order
            order |= {begun: order[start], wait_of(begun): order[wait]}

    def numerics(self, scheme: RingScheme, chain: Downstream | Upstream, wide: torch.dtype) -> str:
        is_summed = "sum" in chain.consumers.values() if isinstance(chain, Downstream) else scheme.row is not None
        order = scheme.row.numerics if scheme.row is not None else "as by the collective"
        if is_summed and scheme.row is not None and not isinstance(chain, Downstream):
            order = self.order_of_sums or order
        sums = f"; sums in {str(wide).removeprefix('torch.')}" if is_summed else ""
        return f"{order}{sums}; a matmul of fewer rows may round differently than the whole"


def described(row: RingRow, best: RingChoice) -> RingRow:
    row = replace(row, matmuls=tuple(n.name for n in best.matmuls), scheme=str(best.scheme), num_steps=best.num_steps)
    if best.estimate is None:
        return row
    return replace(row, seconds_before=best.estimate.before, seconds_after=best.estimate.after)


def take_apart(
    program: DeviceProgram,
    options: DecomposeOptions,
    pick: Pick,
    profile: MachineProfile | None,
    order_of_sums: str = "",
) -> tuple[DecomposeReport, tuple[int, ...]]:
    """Rewrite the graph of a program in place; returns the outcome of each collective, and the decisions that reproduce
    it.
    `profile`: of the machine; None: no costs. `order_of_sums`: over a group, if it differs from the algorithm's."""
    shapes = Shapes(dict(program.values), dict(program.uneven))
    prices = None if profile is None else RingPrices(program, profile, shapes, _kernels(program, profile))
    rewriter = RingRewriter(program, options, shapes, prices, pick, order_of_sums)
    return rewriter.run(), tuple(rewriter.decisions)


def _kernels(program: DeviceProgram, profile: MachineProfile) -> Kernels:
    """Position and seconds of every op that computes, in the order of positions."""
    reading = read_problem(program)
    prices = ProfilePrices(reading, profile)
    order = {node: i for i, node in enumerate(program.graph.nodes)}
    nodes = sorted((n for i, n in enumerate(reading.nodes) if i not in reading.rows), key=order.__getitem__)
    return [(order[node], prices.compute(node)) for node in nodes]


def decompose(
    role: RankGraph, costs: object = None, options: DecomposeOptions | None = None
) -> tuple[RankGraph, DecomposeReport]:
    """A new rank graph in which collectives beside matmuls are decomposed, and the outcome of each; the role is not
    changed, and is itself returned if none is.

    An all-gather whose value is used by matmuls (possibly after views, casts and elementwise ops) becomes a ring of
    permutes with a product for each chunk; so does a reduce-scatter of matmuls' results, and an all-reduce as a
    reduce-scatter and an all-gather. Message i + 1 is started before product i. `costs` is a MachineProfile (unused
    with when="always"). Raises MeshweaveError for costs without compute, and for unknown algorithms.
    """
    options = options or DecomposeOptions()
    if options.when == "gain" and not isinstance(costs, MachineProfile):
        raise MeshweaveError(
            "decomposing collectives needs costs of compute and of links",
            got=type(costs).__name__,
            expected='a MachineProfile, such as load_profile("h100")',
            hint='or DecomposeOptions(when="always")',
        )
    profile = costs if isinstance(costs, MachineProfile) and options.when == "gain" else None
    pick = first if profile is None else by_gain(options.margin)

    def rewrite(program: DeviceProgram) -> tuple[fx.Graph | None, DecomposeReport]:
        report, _ = take_apart(program, options, pick, profile)
        return program.graph if report.num_taken else None, report

    return rewrite_role(role, rewrite)
