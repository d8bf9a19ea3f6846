"""Random graphs with collectives through the pass: values, order, memory, seconds, and the same on all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest
import torch
from tests.overlap.graphs import (
    ATEN,
    CONVERT,
    MESH,
    RANKS,
    STARTS,
    WAIT,
    Builder,
    Cost,
    Ran,
    assert_same_results,
    assert_same_values,
    groups_of,
    handed_in,
    is_free,
    peak,
    peak_of,
    play,
    random_inputs,
    renamed,
    run,
    starts,
    waits_of,
)
from torch import fx

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.optimize.overlap import OverlapOptions, OverlapReport, overlap

ALL = 1000


@dataclass(frozen=True, slots=True)
class Known:
    """A value that ops may take. `is_exact`: small integers in any dtype, so that a matmul is exact in any order."""

    node: fx.Node
    base: int
    is_exact: bool = True

    @property
    def val(self) -> torch.Tensor:
        return self.node.meta["val"]


@dataclass(slots=True)
class Flying:
    """A communication in flight: what is waited for yet, and the storages of its operands."""

    parts: list[tuple[fx.Node, bool]]
    bases: set[int]
    hidden: list[Known] = field(default_factory=list)  # what may not be read until it has landed


class Grower:
    """Grows one graph from a seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.b = Builder()
        self.known: list[Known] = []
        self.flying: list[Flying] = []
        self.num_bases = 0
        self.inputs: list[Known] = []

    def grow(self) -> fx.GraphModule:
        self.placeholders()
        moves = (
            [self.matmul] * 4 + [self.pointwise] * 4 + [self.chain, self.diamond, self.convert, self.view, self.view]
        )
        moves += [self.communicate] * 7 + [self.land] * 4 + [self.draw, self.pair, self.write, self.coalesce]
        moves += self.more()
        for _ in range(self.random.randrange(6, 40)):
            self.random.choice(moves)()
        while self.flying:
            self.land()
        return self.finish()

    def more(self) -> list[Callable[[], None]]:
        """Further moves, each as often as it stands here."""
        return []

    def placeholders(self) -> None:
        is_backward = self.random.random() < 0.4
        for i in range(self.random.randrange(2, 6)):
            kind = self.random.choice(["primals", "tangents", "saved"]) if is_backward else "arg"
            rows, columns = self.random.choice([8, 8, 16, 4]), self.random.choice([8, 8, 4])
            dtype = self.random.choice([torch.float32] * 3 + [torch.bfloat16, torch.int64])
            self.inputs.append(self.keep(self.b.placeholder(f"{kind}_{i}", (rows, columns), dtype)))

    def keep(self, node: fx.Node, base: int | None = None, is_exact: bool = True) -> Known:
        if base is None:
            base, self.num_bases = self.num_bases, self.num_bases + 1
        self.known.append(Known(node, base, is_exact))
        return self.known[-1]

    def pick(self, *conditions: Any) -> Known | None:
        found = [k for k in self.known if all(c(k) for c in conditions)]
        # Mostly what is new, so that graphs get deep, at times what is old, so that lives get long.
        found = found[-6:] if self.random.random() < 0.6 else found
        return self.random.choice(found) if found else None

    def clamp(self, x: Known) -> fx.Node:
        return self.b.call(None, ATEN.clamp.default, x.node, -4, 4)

    def matmul(self) -> None:
        x = self.pick(_is_2d, _is_exact)
        y = x and self.pick(
            _is_2d, _is_exact, lambda k: k.val.shape[0] == x.val.shape[1] and k.val.dtype == x.val.dtype
        )
        if x and y:
            self.keep(self.b.mm(None, self.clamp(x), self.clamp(y)))

    def pointwise(self) -> None:
        x = self.pick()
        y = self.pick(lambda k: k.val.shape == x.val.shape and k.val.dtype == x.val.dtype)
        op = self.random.choice([ATEN.add.Tensor, ATEN.mul.Tensor, ATEN.maximum.default, ATEN.sub.Tensor])
        node = self.b.call(None, op, x.node, y.node)
        self.keep(self.b.call(None, ATEN.clamp.default, node, -8, 8), is_exact=x.is_exact and y.is_exact)

    def chain(self) -> None:
        """What a compiler fuses into one kernel."""
        x = self.pick()
        node = x.node
        for _ in range(self.random.randrange(2, 6)):
            op = self.random.choice([ATEN.relu.default, ATEN.neg.default, ATEN.abs.default])
            node = self.b.call(None, op, node)
        self.keep(node, is_exact=x.is_exact)

    def diamond(self) -> None:
        x = self.pick()
        left, right = self.b.relu(None, x.node), self.b.call(None, ATEN.neg.default, x.node)
        self.keep(self.b.call(None, ATEN.maximum.default, left, right), is_exact=x.is_exact)
        self.keep(left, is_exact=x.is_exact)

    def convert(self) -> None:
        x = self.pick(_is_exact)
        if x:
            clamped = self.clamp(x)
            dtype = self.random.choice([torch.float32, torch.bfloat16, torch.float16, torch.int64])
            self.keep(self.b.call(None, CONVERT, clamped, dtype))

    def view(self) -> None:
        x = self.pick(_is_2d, lambda k: k.val.shape[0] > 1)
        if not x:
            return
        rows, columns = x.val.shape
        kind = self.random.randrange(5)
        if kind == 0:
            node = self.b.call(None, ATEN.permute.default, x.node, [1, 0])
        elif kind == 1:
            node = self.b.call(None, ATEN.slice.Tensor, x.node, 0, 0, rows // 2)
        elif kind == 2 and x.val.is_contiguous():
            node = self.b.call(None, ATEN.view.default, x.node, [columns, rows])
        elif kind == 3:
            node = self.b.call(None, ATEN.select.int, x.node, 0, self.random.randrange(rows))
        else:
            parts = self.b.call(None, ATEN.split.Tensor, x.node, max(1, rows // 2))
            for i in range(len(parts.meta["val"])):
                self.keep(self.b.item(None, parts, i), x.base, x.is_exact)
            return
        self.keep(node, x.base, x.is_exact)

    def draw(self) -> None:
        """Random numbers: what is drawn depends on the order of the draws."""
        x = self.pick(lambda k: k.val.dtype.is_floating_point)
        if not x:
            return
        kind = self.random.randrange(3)
        if kind == 0:
            self.keep(self.b.call(None, ATEN.bernoulli.p, x.node, 0.5))
        elif kind == 1:
            self.keep(self.b.call(None, ATEN.rand_like.default, x.node), is_exact=False)
        else:
            both = self.b.call(None, ATEN.native_dropout.default, x.node, 0.5, True)
            self.keep(self.b.item(None, both, 0), is_exact=x.is_exact)

    def pair(self) -> None:
        x = self.pick(_is_2d)
        if x:
            both = self.b.call(None, ATEN.max.dim, x.node, 1)
            self.keep(self.b.item(None, both, 0), is_exact=x.is_exact)
            self.keep(self.b.item(None, both, 1))

    def write(self) -> None:
        """In place, rarely: an intermediate or a placeholder gets a new value, after what flies over it has landed."""
        if self.random.random() < 0.5:
            return
        x = self.pick(_owns_all)
        y = self.pick(lambda k: k.val.shape == x.val.shape and k.val.dtype == x.val.dtype) if x else None
        if not x or not y or x.is_exact > y.is_exact:
            return
        for flight in [f for f in self.flying if x.base in f.bases]:
            self.land_all(flight)
        op = self.random.choice([ATEN.copy_.default, ATEN.add_.Tensor])
        self.keep(self.b.call(None, op, x.node, y.node), x.base, x.is_exact)

    def communicate(self) -> None:
        group = self.random.choice("aaabbw")
        size = len(MESH[group][0])
        kind = self.random.choice(KINDS)
        conditions = [lambda k: k.val.dim() > 0, lambda k: k.val.nbytes < 4096]
        if kind in ("reduce_scatter_tensor", "all_to_all_single"):
            conditions.append(lambda k: k.val.shape[0] % size == 0 and k.val.shape[0] > 0)
        if kind in ("reduce_scatter_tensor", "all_reduce"):
            conditions.append(lambda k: k.val.dtype is not torch.float16)
        x = self.pick(*conditions)
        if not x:
            return
        base, node = self.contiguous(x)
        reduce = self.random.choice(["sum", "sum", "sum", "max"])
        start = self.b.start(None, kind, node, group, reduce)
        self.flying.append(Flying([(start, x.is_exact)], {base}))
        if self.random.random() < 0.3:
            self.land_all(self.flying[-1])

    def coalesce(self) -> None:
        group = self.random.choice("ab")
        kind = self.random.choice(KINDS[:3])
        picked = [
            self.pick(lambda k: k.val.dim() > 0 and k.val.shape[0] % 4 == 0 and k.val.nbytes < 4096) for _ in range(2)
        ]
        picked = [x for x in picked if x and x.val.dtype == picked[0].val.dtype and x.val.dtype is not torch.float16]
        if not picked:
            return
        bases, nodes = zip(*map(self.contiguous, picked), strict=True)
        start = self.b.start(None, kind, list(nodes), group)
        parts = [(self.b.item(None, start, i), x.is_exact) for i, x in enumerate(picked)]
        self.flying.append(Flying(parts, set(bases)))

    def contiguous(self, x: Known) -> tuple[int, fx.Node]:
        if x.val.is_contiguous():
            return x.base, x.node
        return -1, self.b.call(None, ATEN.clone.default, x.node, memory_format=torch.contiguous_format)

    def land(self) -> None:
        if self.flying:
            self.land_all(self.random.choice(self.flying))

    def land_all(self, flight: Flying) -> None:
        self.flying.remove(flight)
        for node, is_exact in flight.parts:
            known = self.keep(self.b.wait(None, node), is_exact=is_exact)
            if self.random.random() < 0.03:  # a second wait for the same, as two users of an async tensor leave it
                self.keep(self.b.wait(None, node), known.base, is_exact)

    def finish(self) -> fx.GraphModule:
        for x in self.inputs:
            y = self.pick(lambda k: k.val.shape == x.val.shape and k.val.dtype == x.val.dtype, _is_exact)  # noqa: B023
            if y and y.base != x.base and self.random.random() < 0.4:
                self.b.call(None, ATEN.copy_.default, x.node, y.node)
        unused = [k for k in self.known if not k.node.users and self.random.random() < 0.8]
        outputs = unused + self.random.choices(self.known, k=self.random.randrange(1, 4))
        gm = self.b.done(*dict.fromkeys(k.node for k in outputs))
        for node in reversed(gm.graph.nodes):  # views and items that nobody reads, which compilers drop
            if node.op == "call_function" and is_free(node) and node.target is not WAIT and not node.users:
                gm.graph.erase_node(node)
        return gm


KINDS = ["all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_gather_into_tensor", "all_to_all_single"]


def _is_2d(k: Known) -> bool:
    return k.val.dim() == 2


def _is_exact(k: Known) -> bool:
    return k.is_exact


def _owns_all(k: Known) -> bool:
    """Whether a value is the whole of its storage, each element once: what may be written to without surprise."""
    return k.val.is_contiguous() and k.val.untyped_storage().nbytes() == k.val.nbytes


def names_on(rank: int) -> dict[str, str]:
    """The names of the groups of a rank, other on every rank: torch.distributed numbers groups as they are made."""
    return {name: f"{name}{'abcd'[min(ranks)]}" for name, ranks in groups_of(rank).items()}


def costs_of(seed: int, gm: fx.GraphModule, is_affine: bool) -> Cost:
    """Random seconds by name; collectives by name too, or by start-up and bytes, which prices merged ones as well."""
    random = Random(seed + 10**6)
    table = {n.name: random.choice([0.0, 0.1, 0.5, 1.0, 2.0, random.random()]) for n in gm.graph.nodes}
    latency, rate = random.choice([0.0, 0.05, 1.0]), random.choice([1e-4, 1e-3, 1e-2])

    def affine(node: fx.Node, size: int | None = None) -> float:
        if node.target not in STARTS:
            return table.get(node.name, 0.0)
        return latency + rate * (handed_in(node) if size is None else size)

    return affine if is_affine else lambda node: 0.0 if is_free(node) else table.get(node.name, 0.0)


@dataclass(frozen=True)
class Case:
    """A graph, how it ran, and what the pass is asked for."""

    gm: fx.GraphModule
    ran: Ran
    cost: Any
    options: OverlapOptions
    cap: int | None

    def passed(self, rank: int) -> tuple[fx.GraphModule, OverlapReport]:
        """As one rank calls it: with its names of groups."""
        groups = {names_on(rank)[name]: ranks for name, ranks in groups_of(rank).items()}
        gm = renamed(self.gm, names_on(rank))
        before = str(gm.graph)
        found = overlap(gm, cost=self.cost, memory_cap_bytes=self.cap, groups=groups, options=self.options)
        assert str(gm.graph) == before, "the graph handed in has changed"
        return found


class Unsound(Exception):
    """A graph that PyTorch itself refuses to run: it writes into a tensor whose elements share memory."""


def case(seed: int, grower: type[Grower] = Grower) -> Case:
    gm = grower(seed).grow()
    random = Random(seed + 2 * 10**6)
    bucket = random.random() < 0.6
    is_priced = bucket and random.random() < 0.15 and all(_is_float(n) for n in gm.graph.nodes)
    cost = mw.load_profile("h100") if is_priced else costs_of(seed, gm, bucket)
    options = OverlapOptions(bucket=bucket, choose=random.choice(["regret", "nominal"]))
    slack = random.choice([None, 0, 0, 256, 4096])
    try:
        ran = run(gm, random_inputs(gm, seed), MESH, seed)
    except RuntimeError as error:
        if "refer to a single memory location" in str(error):
            raise Unsound from error
        raise
    return Case(gm, ran, cost, options, None if slack is None else peak_of(ran, releasable(gm)) + slack)


def _is_float(node: fx.Node) -> bool:
    """Machines have no figure for a matmul of integers."""
    return node.target is not ATEN.mm.default or node.meta["val"].dtype.is_floating_point


def releasable(gm: fx.GraphModule) -> Any:
    """The rule of backward graphs, said again: with tangents, all but primals may be freed after their last use.

    A placeholder without any use lives on.
    """
    has_tangents = any(n.op == "placeholder" and n.name.startswith("tangents") for n in gm.graph.nodes)
    return lambda n: has_tangents and bool(n.users) and not n.name.startswith("primals")


def check(seed: int, grower: type[Grower] = Grower) -> tuple[int, float]:
    """One graph through everything; returns how many merges were taken and the seconds that were saved."""
    one = case(seed, grower)
    passed = [one.passed(rank) for rank in range(RANKS)]
    check_ranks(one, passed)
    if seed % 8 == 0:
        again, second = one.passed(0)
        assert (str(again.graph), second) == (str(passed[0][0].graph), passed[0][1])
    after, report = renamed(passed[0][0], {name: group for group, name in names_on(0).items()}), passed[0][1]
    after.graph.lint()
    check_communications(one.gm, after, report)
    ran = run(after, random_inputs(one.gm, seed), MESH, seed)
    assert_same_results(one.ran, ran)
    check_memory(one, ran, report)
    check_seconds(one, after, report)
    if seed % 8 == 1:
        check_tight(one)
    if seed % 8 == 2:
        check_orders(one, after, report)
    return sum(m.is_taken for m in report.merges), report.seconds_before - report.seconds


def check_tight(one: Case) -> None:
    """Less memory than the input order takes: enough for another order, or the error says what would be."""
    cap = peak_of(one.ran, releasable(one.gm)) * 9 // 10
    groups = groups_of(0)
    try:
        after, report = overlap(one.gm, cost=one.cost, memory_cap_bytes=cap, groups=groups, options=one.options)
    except MeshweaveError as error:
        least = int(re.findall(r"\d+", error.got)[0])
        assert least > cap
        after, report = overlap(one.gm, cost=one.cost, memory_cap_bytes=least, groups=groups, options=one.options)
        cap = least
    assert_same_values(one.gm, after)
    assert peak_of(run(after, random_inputs(one.gm)), releasable(one.gm)) <= report.peak_bytes <= cap


def check_orders(one: Case, after: fx.GraphModule, report: OverlapReport) -> None:
    """The pass over its own result, and with its result handed in as an order, is never slower than that."""
    if any(merge.is_taken for merge in report.merges) or not callable(one.cost):
        return
    order = tuple(n.name for n in after.graph.nodes)
    options = OverlapOptions(bucket=False, orders=(order,))
    for gm, chosen in ((after, one.options), (one.gm, options)):
        _, again = overlap(gm, cost=one.cost, memory_cap_bytes=one.cap, groups=groups_of(0), options=chosen)
        assert again.seconds <= report.seconds * (1 + 1e-9)


def check_communications(gm: fx.GraphModule, after: fx.GraphModule, report: OverlapReport) -> None:
    """Each start is there once, itself or in one merge of its kind and group; each has its waits."""
    merged = [name for merge in report.merges if merge.is_taken for name in merge.names]
    there, by_name = ({n.name: n for n in starts(g)} for g in (after, gm))
    new = [name for name in there if name not in by_name]
    for start in starts(gm):
        assert (start.name in there) + merged.count(start.name) == 1, start.name
        if start.name in there:
            other = there[start.name]
            assert (other.target, other.args[1:]) == (start.target, start.args[1:])
            assert len(waits_of(other)) == len(waits_of(start))
    num_merges = sum(m.is_taken for m in report.merges)
    assert len(there) == len(starts(gm)) - len(merged) + num_merges
    assert all(waits_of(n) for name, n in there.items() if name in new or waits_of(by_name[name]))
    rows = [row.name for row in report.collectives]
    assert [name for name in rows if name in there] == [name for name in there if name not in new]
    assert sorted(name for name in rows if name not in there) == sorted(
        "+".join(m.names) for m in report.merges if m.is_taken
    )
    rest = [[n.target for n in g.graph.nodes if n.op == "call_function" and _draws(n)] for g in (gm, after)]
    assert rest[0] == rest[1]


def _draws(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def check_memory(one: Case, ran: Ran, report: OverlapReport) -> None:
    can_free = releasable(one.gm)
    assert peak_of(one.ran, can_free) == report.peak_before
    assert peak_of(ran, can_free) <= report.peak_bytes <= report.cap_bytes
    assert one.cap in (None, report.cap_bytes)


def check_seconds(one: Case, after: fx.GraphModule, report: OverlapReport) -> None:
    assert report.seconds <= report.seconds_before * (1 + 1e-9)
    assert report.bound_seconds <= report.seconds * (1 + 1e-9)
    (chosen,) = [c for c in report.candidates if c.is_chosen]
    assert chosen.seconds[0][1] == pytest.approx(report.seconds)
    if callable(one.cost):
        assert (report.seconds_before, report.exposed_before) == pytest.approx(play(one.gm, one.cost))
        # What packs a merged collective is priced by bytes: here nanoseconds.
        assert (report.seconds, report.exposed_seconds) == pytest.approx(play(after, one.cost), rel=1e-6, abs=1e-5)


def check_ranks(one: Case, passed: Sequence[tuple[fx.GraphModule, OverlapReport]]) -> None:
    """Every rank runs the pass by itself, with other names of groups: all get the same, and no queue waits for ever."""
    after, report = passed[0]
    for other, told in passed:
        assert [n.name for n in other.graph.nodes] == [n.name for n in after.graph.nodes]
        assert (told.seconds, told.peak_bytes, told.merges) == (report.seconds, report.peak_bytes, report.merges)
    match([queue(other) for other, _ in passed])


def queue(gm: fx.GraphModule) -> list[tuple[str, str]]:
    return [(str(n.args[-1]), f"{n.target} {n.args[1:-1]} {n.meta['val']}") for n in starts(gm)]


def match(queues: Sequence[Sequence[tuple[str, str]]]) -> None:
    """Each rank blocks in each communication until all of its group are in one just like it: the strictest runtime."""
    members = {names_on(r)[g]: ranks for r in range(RANKS) for g, ranks in groups_of(r).items()}
    heads = [0] * RANKS
    while any(head < len(q) for head, q in zip(heads, queues, strict=True)):
        now = [q[head] if head < len(q) else ("", "") for head, q in zip(heads, queues, strict=True)]
        ready = [group for group, ranks in members.items() if all(now[r][0] == group for r in ranks)]
        assert ready, f"deadlock: ranks stand in {now}"
        for rank in members[ready[0]]:
            assert now[rank] == now[members[ready[0]][0]]
            heads[rank] += 1


@pytest.mark.parametrize("seeds", [range(0, 24, 3), pytest.param(range(24, 48, 2), marks=pytest.mark.slow),
                                   pytest.param(range(25, 62, 2), marks=pytest.mark.slow)], ids=str)  # fmt: skip
def test_a_sample_of_random_graphs(seeds: range) -> None:
    """The sample holds merges and graphs made faster, so that it tests something."""
    found = [check(seed) for seed in seeds]
    assert sum(num for num, _ in found) > 0
    assert sum(saved > 1e-6 for _, saved in found) > len(found) // 3


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_random_graphs(part: int) -> None:
    for seed in range(part, ALL, 10):
        try:
            check(seed)
        except Exception as error:
            raise AssertionError(f"graph {seed}: {error}") from error


def written_and_gathered() -> tuple[fx.GraphModule, dict[str, fx.Node]]:
    b = Builder()
    x, y = b.placeholders("x y")
    new = b.call("new", ATEN.copy_.default, x, y)
    first, second = b.call("first", ATEN.bernoulli.p, x, 0.5), b.call("second", ATEN.rand_like.default, y)
    gm = b.done(b.relu("used", b.wait("full", b.gather("gather", x))), first, second, new)
    return gm, {n.name: n for n in gm.graph.nodes}


MUTANTS = {
    "draws swapped": lambda at: at["first"].prepend(at["second"]),
    "gathered before it is written": lambda at: at["new"].prepend(at["gather"]),
    "written while it is gathered": lambda at: at["gather"].append(at["new"]),
    "read before its wait": lambda at: (at["used"].update_arg(0, at["gather"]), at["full"].prepend(at["used"])),
    "another group": lambda at: at["gather"].update_arg(2, "b"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_graph_would_be_noticed(name: str) -> None:
    (gm, _), (broken, at) = written_and_gathered(), written_and_gathered()
    assert_same_values(gm, broken)
    MUTANTS[name](at)
    with pytest.raises(AssertionError):
        assert_same_values(gm, broken)


def test_the_ledger_and_the_clock_by_hand() -> None:
    gm, _ = written_and_gathered()
    # Two placeholders, two draws and the gathered value of twice their size live together; so does `used` once the
    # gathered value is waited for: 2 * 256 + 2 * 512 before the draws, 2 * 256 in draws after.
    assert peak(gm) == 256 * (2 + 2 + 2 + 2)
    assert play(gm, lambda node: 1.0) == (5.0, 1.0)


def test_queues_that_cannot_be_matched_are_noticed() -> None:
    """Rows first on two ranks, columns first on those across the mesh: each waits for the next in a circle."""
    names = [names_on(rank) for rank in range(RANKS)]
    queues = [[(n["a"], "gather"), (n["b"], "gather")] for n in names]
    match(queues)
    queues[0].reverse()
    queues[3].reverse()
    with pytest.raises(AssertionError, match="deadlock"):
        match(queues)
