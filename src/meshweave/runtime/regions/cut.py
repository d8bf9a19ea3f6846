"""Where the compute of a rank graph is cut into regions, each of which is compiled as a graph.

A region is a run of compute between communications, in the order of the graph. It is also cut where a repeated block of
the model begins, so that the regions of twin layers are the same graph. Views belong to no region: a region repeats the
views that it reads, which costs nothing, and so never returns a tensor that shares memory with another.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import block_name, is_prepared, origin_of
from meshweave.ir.rank import SYMBOLS
from meshweave.ir.traits import work_kind
from meshweave.ir.values import Values

# A region of the update ends when it has computed so many bytes of lasting values: old parameters and optimizer state
# are freed when it returns, so both are in memory until then. 4 MiB are the weights of a small layer.
UPDATE_BYTES = 4 << 20
LEAST_GENERATED = 2  # generated ops (those that a compiler writes loops for): with fewer, nothing can be fused
# and the border of a block never makes a region shorter than this, as for the layers of an nn.Sequential
LEAST_AT_BORDER = 16

_LIBRARY = frozenset({"matmul", "attention"})  # kinds of work for which a compiler calls a library


@dataclass(frozen=True, slots=True, eq=False)
class Region:
    """Compute that runs as a function of `inputs`, and returns `outputs`. `nodes` are its ops and the views that it
    repeats, in order; a view may be in several regions. `written`: outputs that are written into the memory of an
    input."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    written: Mapping[fx.Node, fx.Node] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Fused:
    """Several nodes that run as a single function of the values of `inputs` (in a list that it empties) and the device.
    It returns the values of `outputs`."""

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    function: Callable[[list[Any], int], Sequence[Any]]


Step = fx.Node | Region
Parts = Sequence[Sequence[fx.Node]]


def cut(
    parts: Parts,
    kept: Iterable[fx.Node],
    values: Mapping[fx.Node, Values],
    is_compiled: Callable[[fx.Node], bool] = lambda node: True,
) -> list[list[Step]]:
    """The parts of a step (nodes in order, without symbols) with regions in them. `kept` are the values that outlive
    the step's tasks; nodes that are not `is_compiled` run by themselves."""
    return _Cut(parts, frozenset(kept), values, is_compiled).run()


@dataclass(slots=True)
class _Cut:
    parts: Parts
    kept: frozenset[fx.Node]
    values: Mapping[fx.Node, Values]
    is_compiled: Callable[[fx.Node], bool]
    alone: set[fx.Node] = field(default_factory=set)  # views that run by themselves

    def run(self) -> list[list[Step]]:
        runs = [list(self.runs(part)) for part in self.parts]
        singles = [run for part in runs for run in part if isinstance(run, fx.Node)]
        for node in (*self.kept, *(n for single in singles for n in single.all_input_nodes)):
            self.keep_views(node)
        read = self.kept | {n for node in (*singles, *self.alone) for n in node.all_input_nodes}
        chains = {id(run): self.with_views(run) for part in runs for run in part if isinstance(run, list)}
        inputs = {key: _inputs(nodes) for key, nodes in chains.items()}
        read |= {n for nodes in inputs.values() for n in nodes}
        steps: list[list[Step]] = []
        for nodes, part in zip(self.parts, runs, strict=True):
            parts: list[Step] = []
            for run in part:
                if isinstance(run, fx.Node):
                    parts.append(run)
                    continue
                if outputs := tuple(n for n in run if n in read):  # else nothing uses it, as unread gradients
                    parts.append(Region(chains[id(run)], inputs[id(run)], outputs))
            steps.append(self.placed(parts, [n for n in nodes if n in self.alone]))
        return steps

    def is_view(self, node: fx.Node) -> bool:
        return is_view(node, self.values)

    def runs(self, part: Sequence[fx.Node]) -> Iterator[fx.Node | list[fx.Node]]:
        """The nodes of a part except views: runs of compute, and nodes that run by themselves."""
        run: list[fx.Node] = []
        for node in _elements_first(list(self.by_value(part))):
            if self.is_view(node):
                continue
            is_element = node.target is operator.getitem and node.all_input_nodes[0] not in run
            is_single = node.target in STARTS or node.target is WAIT or is_prepared(node)
            if is_single or is_element or not self.is_compiled(node):
                yield from self.closed(run)
                yield node
                run = []
                continue
            if run and self.ends_before(run, node):
                yield from self.closed(run)
                run = []
            run.append(node)
        yield from self.closed(run)

    def by_value(self, part: Sequence[fx.Node]) -> Iterator[fx.Node]:
        """The nodes of a part, those of the update value by value between two communications: whatever order they have,
        a region that ends has whole updates in it."""
        stretch: list[fx.Node] = []
        for node in part:
            if origin_of(node).phase == "update" and node.target not in STARTS and node.target is not WAIT:
                stretch.append(node)
                continue
            yield from _value_by_value(stretch)
            stretch = []
            yield node
        yield from _value_by_value(stretch)

    def ends_before(self, run: Sequence[fx.Node], node: fx.Node) -> bool:
        """Whether a new region begins: at another block of the model, or when the update has computed the allowed
        bytes."""
        if node.target is operator.getitem:
            return False
        origin = origin_of(node)
        if origin.phase == "update":
            return sum(x.storage_bytes for n in run if n in self.kept for x in self.values[n]) >= UPDATE_BYTES
        is_border = block_name(origin) != block_name(origin_of(run[-1]))
        return is_border and sum(map(is_generated, run)) >= LEAST_AT_BORDER

    def closed(self, run: list[fx.Node]) -> Iterator[fx.Node | list[fx.Node]]:
        """A run as a region, or node by node if a compiler would gain nothing."""
        if sum(map(is_generated, run)) >= LEAST_GENERATED:
            yield run
        else:
            yield from run

    def keep_views(self, node: fx.Node) -> None:
        """Let a view with readers outside of regions, and its bases, run by themselves."""
        if self.is_view(node) and node not in self.alone:
            self.alone.add(node)
            for operand in node.all_input_nodes:
                self.keep_views(operand)

    def with_views(self, run: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """A run and the views that it reads, each after its base."""
        nodes: dict[fx.Node, None] = {}

        def add(node: fx.Node) -> None:
            for operand in node.all_input_nodes:
                if operand not in nodes and self.is_view(operand):
                    add(operand)
            nodes[node] = None

        for node in run:
            add(node)
        return tuple(nodes)

    def placed(self, steps: Sequence[Step], views: Sequence[fx.Node]) -> list[Step]:
        """Items with views among them, each as soon as its base is available."""
        waiting, placed = list(views), list[Step]()
        pending = {n for step in steps for n in (step.outputs if isinstance(step, Region) else (step,))} | set(views)

        def settle() -> None:
            for view in list(waiting):
                if not pending.intersection(view.all_input_nodes):
                    waiting.remove(view)
                    pending.discard(view)
                    placed.append(view)

        settle()
        for step in steps:
            placed.append(step)
            pending.difference_update(step.outputs if isinstance(step, Region) else (step,))
            settle()
        assert not waiting, f"{waiting} read values that no item computes"
        return placed


def written_in_place(
    steps: Sequence[Sequence[Step]],
    renewed: Mapping[fx.Node, fx.Node],
    kept: Iterable[fx.Node],
    values: Mapping[fx.Node, Values],
) -> list[list[Step]]:
    """The items with updates in place: `renewed` are new values by the inputs that they replace. A new value is written
    into the old value's memory if no item after its region reads that, none of the values `kept` beyond the step is in
    it (an optimizer may keep a previous value), and both have the same form."""
    lasting = {x.storage for node in kept for x in values.get(node, ())}
    order = [step for part in steps for step in part]
    last: dict[int, Step] = {}  # by storage, its last reader
    for step in order:
        for node in step.inputs if isinstance(step, Region) else step.all_input_nodes:
            last.update((x.storage, step) for x in values.get(node, ()))

    def fits(region: Region, new: fx.Node, old: fx.Node) -> bool:
        (after,), (before,) = values[new], values[old]
        is_last = old in region.inputs and last[before.storage] is region and before.storage not in lasting
        return is_last and (after.shape, after.stride, after.dtype) == (before.shape, before.stride, before.dtype)

    def placed(step: Step) -> Step:
        if not isinstance(step, Region):
            return step
        pairs = {new: old for old, new in renewed.items() if new in step.outputs and fits(step, new, old)}
        return replace(step, written=pairs)

    return [[placed(step) for step in part] for part in steps]


def is_view(node: fx.Node, values: Mapping[fx.Node, Values]) -> bool:
    """Whether a node only returns a view. An element of a new tuple does not count, although it has no memory of its
    own: a region returns tensors, not tuples."""
    if node.op != "call_function" or node.target in SYMBOLS or node.target is WAIT or node.target in STARTS:
        return False
    results = values[node]
    if node.target is operator.getitem:
        return is_view(node.all_input_nodes[0], values)
    operands = {x.storage for n in node.all_input_nodes for x in values[n]}
    return bool(results) and all(x.storage in operands for x in results)


def is_generated(node: fx.Node) -> bool:
    """Whether a compiler writes loops for a node, instead of calling a library."""
    return node.target is not operator.getitem and work_kind(node.target) not in _LIBRARY


def _elements_first(part: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes of a part with the elements of a tuple right after the op that computes it."""
    own = set(part)
    for node in part:
        if node.target is operator.getitem and node.all_input_nodes[0] in own:
            continue
        yield node
        yield from (user for user in node.users if user.target is operator.getitem and user in own)


def _value_by_value(nodes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The nodes in an order in which all that a final value needs comes right before it; final values are those that no
    other of the nodes reads."""
    left = set(nodes)
    for final in [n for n in nodes if left.isdisjoint(n.users)]:
        stack = [final]
        while stack:
            node = stack[-1]
            needed = [n for n in node.all_input_nodes if n in left]
            if needed:
                stack += reversed(needed)
                continue
            stack.pop()
            if node in left:
                left.remove(node)
                yield node


def _inputs(nodes: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
    """The tensors that nodes read and none of them computes, in the order in which they are read."""
    own = set(nodes)
    read = (n for node in nodes for n in node.all_input_nodes)
    return tuple(dict.fromkeys(n for n in read if n not in own and n.target not in SYMBOLS))
