"""A rank graph as kernels: the ops of each launch, what it reads and writes, and its place in the order.

`ops`: every op by itself, as meshweave's executor runs them. `eager`: as PyTorch's eager mode, in which ops that
capture decomposes (log-softmax, an optimizer update, a matmul and its bias) are a single kernel. `compiled`: chains of
pointwise ops, copies, reductions over the innermost dims and gathers are fused, as by a compiler such as Inductor, and
equal ops in a phase run once. `blocks`: compiled in the repeated blocks of the model, eager elsewhere, as training
frameworks compile transformer blocks one by one. `blocks+loss`: the loss too, by itself. The update is a kernel per
parameter, as with `torch.optim.AdamW(..., fused=True)`; or, for a profile `with_update("foreach")`, one per op, as
PyTorch updates on GPUs by default: each op goes over memory by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, get_args

from torch import fx

from meshweave.cost.simulate.classify import is_closing, is_fusible, known_kind, memory_work, operand_values, work_of
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import STARTS, WAIT
from meshweave.ir.graph import Origin, block_name, map_nodes, origin_of, output_node
from meshweave.ir.rank import SYMBOLS, RankGraph
from meshweave.ir.traits import base_name
from meshweave.ir.values import Local, Value
from meshweave.ir.work import MemoryWork, Work

Fusion = Literal["ops", "eager", "compiled", "blocks", "blocks+loss"]

_INDEXED = re.compile(r"(^|\.)\d+(\.|$)")
_MOST_OPS = 64  # nodes in a kernel, as Inductor's max_fusion_size (torch/_inductor/config.py, 2.13)
_MOST_KEPT = 16  # the most values that another may be recomputed from
_AFTER = 1e-4  # a kernel comes after what it reads: positions of nodes are integers, those of kernels lie between them


@dataclass(frozen=True, slots=True)
class Kernel:
    """A launch. `nodes` in their order (without views), `position` among the positions of the role's nodes. `reads` and
    `writes` are the nodes whose values it reads from and leaves in device memory; values that only its own ops use stay
    in registers. What it reads may be a view, such as one of several results of an op."""

    nodes: tuple[fx.Node, ...]
    position: float
    works: tuple[Work, ...]
    reads: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]

    @property
    def node(self) -> fx.Node:
        """The node that names the kernel: the last."""
        return self.nodes[-1]


@dataclass(slots=True)
class _KernelGroup:
    """Ops that may become a kernel. `size` is the largest number of elements that any of them processes."""

    nodes: list[fx.Node]
    position: float
    size: int
    is_open: bool = True


@dataclass(slots=True)
class _Fusion:
    """Grows groups of ops that run together, in the order of the graph.

    Every edge between groups leads to a later position, so that a group can run as a unit: its operands come before it,
    its users after it (single ops and starts of communications keep their places).
    """

    local: Local
    order: dict[fx.Node, int]
    fusion: Fusion
    update: str = "fused"
    adds: bool = False  # whether matmuls add to a sum
    group_of: dict[fx.Node, _KernelGroup] = field(default_factory=dict)
    bases: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)  # what views are views of
    readers: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # ignoring views
    sources: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # in the reverse direction
    same: dict[fx.Node, fx.Node] = field(default_factory=dict)  # op -> the earlier op that it is equal to
    kinds: dict[fx.Node, str] = field(default_factory=dict)
    divided: set[tuple[str, int]] = field(default_factory=set)  # eager-mode calls that contain a collective
    remade: dict[tuple[fx.Node, fx.Node], tuple[fx.Node, ...]] = field(default_factory=dict)  # see _kept

    def run(self, nodes: Sequence[fx.Node]) -> list[_KernelGroup]:
        work = [node for node in nodes if not self._is_view(node)]
        for node in (n for n in nodes if n.target in STARTS):
            after = {(o.phase, o.call) for wait in node.users for user in wait.users for o in (origin_of(user),)}
            origin = origin_of(node)
            self.divided |= after & {(origin.phase, origin.call)}
        for node in work:
            self.sources[node] = self._operands(node)
            if not (node.target in STARTS or node.target is WAIT):
                self.kinds[node] = known_kind(node)
            for base in self.sources[node]:
                self.readers.setdefault(base, []).append(node)
        groups: dict[int, _KernelGroup] = {}
        for node in work:
            if node.target in STARTS or node.target is WAIT:
                continue
            joined = self._join(node) if self.fusion != "ops" else None
            if joined is None:
                joined = _KernelGroup([node], self.order[node], self.size(node), is_fusible(self.kinds[node]))
                self.group_of[node] = joined
            groups[id(joined)] = joined
            joined.is_open = joined.is_open and not self._closes(node)
        alive = {id(group) for group in self.group_of.values()}
        return sorted(
            (g for key, g in groups.items() if key in alive), key=lambda g: (g.position, self.order[g.nodes[0]])
        )

    def _is_view(self, node: fx.Node) -> bool:
        """Whether a node computes nothing: all of its results alias an operand."""
        if node.target in STARTS or node.target is WAIT:
            return False
        if node in self.same:
            first = self.same[node]
            self.bases[node] = self.bases.get(first, (first,))
            return True
        results = self.local.values[node]
        inputs = {x.storage for n in node.all_input_nodes for x in self.local.values.get(n, ())}
        if results and all(x.storage in inputs for x in results):
            self.bases[node] = tuple(
                base
                for n in node.all_input_nodes
                if any(x.storage in {y.storage for y in results} for x in self.local.values.get(n, ()))
                for base in self.bases.get(n, (n,))
            )
            return True
        return False

    def size(self, node: fx.Node) -> int:
        values = (*self._values(node.all_input_nodes), *self.local.values[node])
        return max((x.num_elements for x in values), default=0)

    def _operands(self, node: fx.Node) -> list[fx.Node]:
        """The nodes that computed what a node reads, looking through views; including placeholders, not symbols."""
        inputs = (n for n in node.all_input_nodes if n.target not in SYMBOLS)
        operands = dict.fromkeys(base for n in inputs for base in self.bases.get(n, (n,)))
        origin = origin_of(node)
        if origin.phase != "backward" or not self._is_compiled(origin):
            return list(operands)
        return list(dict.fromkeys(x for base in operands for x in self._saved_values(node, base)))

    def _saved_values(self, node: fx.Node, base: fx.Node) -> tuple[fx.Node, ...]:
        """What a compiled op of backward reads for `base` of its block's forward: `base`, or the values that it is
        pointwise of if they have fewer bytes, as AOTAutograd's min-cut partitioner decides (torch 2.13,
        _functorch/partitioners.py)."""
        region, kept = block_name(origin_of(node)), dict[fx.Node, None]()
        waiting = [base]
        while waiting and len(kept) < _MOST_KEPT:
            x = waiting.pop()
            is_cheap = self.kinds.get(x) in ("pointwise", "fill") and origin_of(x).phase in ("forward", "loss")
            if is_cheap and block_name(origin_of(x)) == region:
                waiting += self.sources[x]
            else:
                kept[x] = None
        if waiting or sum(x.bytes for x in self._values(kept)) >= sum(x.bytes for x in self._values([base])):
            return (base,)
        self.remade[node, base] = tuple(kept)
        return tuple(kept)

    def _closes(self, node: fx.Node) -> bool:
        if not is_fusible(self.kinds[node]):
            return True
        return is_closing(node, self._values(node.all_input_nodes), self.local.values[node])

    def _values(self, nodes: Iterable[fx.Node]) -> list[Value]:
        return [x for n in nodes for x in self.local.values.get(n, ())]

    def _join(self, node: fx.Node) -> _KernelGroup | None:
        """Add a node to the groups that it reads from: to all of them, else to the last possible."""
        if not is_fusible(self.kinds[node]):
            return None
        if (product := self._bias_group(node)) is not None:
            merged = self._merge([product], node)
            if merged is not None:
                merged.is_open = False
            return merged
        if self.adds and (product := self._sum_group(node)) is not None and (merged := self._merge([product], node)):
            return merged
        producers = [self.group_of[n] for n in self.sources[node] if n in self.group_of]
        joinable = list(
            {id(group): group for group in producers if group.is_open and self._belong(group, node)}.values()
        )
        joinable.sort(key=lambda group: group.position)
        for chosen in (joinable, *([group] for group in reversed(joinable))):
            if chosen and (merged := self._merge(chosen, node)):
                return merged
        return None

    def _bias_group(self, node: fx.Node) -> _KernelGroup | None:
        """The matmul to which an op of eager mode adds a vector: a single kernel does both (cublasLt's epilogue, which
        addmm uses: torch 2.13, aten/src/ATen/native/cuda/Blas.cpp)."""
        operands = node.all_input_nodes
        if self._is_compiled(origin_of(node)) or base_name(node.target) != "add" or len(operands) != 2:
            return None
        bases = self.bases.get(operands[0], (operands[0],))
        group = self.group_of.get(bases[0]) if len(bases) == 1 else None
        is_product = group is not None and self.kinds.get(group.nodes[0]) == "matmul" and len(group.nodes) == 1
        added = self.local.values[operands[1]]
        is_vector = len(added) == 1 and added[0].num_elements == prod(added[0].shape[-1:])
        is_alone = all(reader is node for reader in self.readers.get(bases[0], ()))
        return group if is_product and is_vector and is_alone else None

    def _sum_group(self, node: fx.Node) -> _KernelGroup | None:
        """The matmul that adds what `node` adds to its product, or that casts it for the addition: the last of those
        whose products it reads, if no other op reads that product."""
        name = base_name(node.target)
        if name not in ("add", "round_parts"):
            return None
        groups = [group for n in self.sources[node] if (group := self._product_group(n)) is not None]
        alone = [group for group in groups if self.readers.get(group.nodes[-1]) == [node]]
        return max(alone, key=lambda group: group.position, default=None)

    def _product_group(self, value: fx.Node) -> _KernelGroup | None:
        """The matmul with no other op, or a cast behind it, whose product a value is."""
        group = self.group_of.get(value)
        is_product = group is not None and self.kinds.get(group.nodes[0]) == "matmul" and group.nodes[-1] is value
        is_plain = is_product and all(base_name(n.target) != "add" for n in group.nodes[1:])  # type: ignore[union-attr]
        return group if is_plain else None

    def _belong(self, group: _KernelGroup, node: fx.Node) -> bool:
        """Whether the fusion mode lets both be in a kernel, whatever is between them."""
        first, second = origin_of(group.nodes[-1]), origin_of(node)
        if first.phase != second.phase or (self._is_compiled(first) and len(group.nodes) >= _MOST_OPS):
            return False
        if first.phase == "update" and self.update == "foreach":
            return first.module == second.module and self._is_term(group.nodes[-1], node)
        if self._is_compiled(first) != self._is_compiled(second):
            return False
        if self._is_compiled(first):  # a kernel reads a scalar, and does not recompute it
            return group.size == self.size(node) or min(group.size, self.size(node)) > 1
        if first.phase == "update":
            return first.module == second.module
        return first.call == second.call != 0 and (first.phase, first.call) not in self.divided

    def _is_term(self, product: fx.Node, node: fx.Node) -> bool:
        """Whether a kernel of PyTorch's foreach ops multiplies and continues with `node`: a further factor, or the sum
        (addcmul, addcdiv)."""
        if base_name(product.target) not in ("mul", "div") or self.readers.get(product) != [node]:
            return False
        name = base_name(node.target)
        return name in ("mul", "div") or (name == "add" and node.args[1] is product)

    def _is_compiled(self, origin: Origin) -> bool:
        return is_compiled(origin, self.fusion)

    def _merge(self, groups: Sequence[_KernelGroup], node: fx.Node) -> _KernelGroup | None:
        if len(groups) == 1:
            (group,) = groups
            if all(self.group_of.get(x) is group or self._position(x) < group.position for x in self.sources[node]):
                group.nodes.append(node)  # nothing moves
                group.size = max(group.size, self.size(node))
                self.group_of[node] = group
                return group
        nodes = sorted({*(n for group in groups for n in group.nodes), node}, key=self.order.__getitem__)
        inside = set(nodes)
        position = float(self.order[nodes[0]])
        for operand in (x for n in nodes for x in self.sources[n] if x not in inside):
            position = max(position, self._position(operand) + _AFTER)
        for reader in (r for n in nodes for r in self.readers.get(n, ()) if r not in inside):
            known = self.group_of.get(reader)
            is_fixed = known is None and (reader not in self.kinds or not is_fusible(self.kinds[reader]))
            limit = known.position if known is not None else self.order[reader] if is_fixed else float("inf")
            if limit <= position:
                return None
        merged = _KernelGroup(nodes, position, max(self.size(node), *(group.size for group in groups)))
        for n in nodes:
            self.group_of[n] = merged
        return merged

    def _position(self, node: fx.Node) -> float:
        group = self.group_of.get(node)
        return group.position if group is not None else float(self.order[node])


def is_in_block(origin: Origin) -> bool:
    """Whether an op belongs to a repeated block: to a module under an index, such as model.layers.3."""
    return origin.phase != "update" and _INDEXED.search(origin.module) is not None


def is_compiled(origin: Origin, fusion: Fusion) -> bool:
    """Whether an op is compiled: in a repeated block, or outside of all modules, where a loss is."""
    if fusion == "blocks+loss" and not origin.module and origin.phase != "update":
        return True
    return fusion == "compiled" or (fusion in ("blocks", "blocks+loss") and is_in_block(origin))


def kernels_of(
    role: RankGraph,
    local: Local,
    fusion: Fusion,
    with_views: bool = False,
    update: str = "fused",
    adds: bool = False,
) -> tuple[list[Kernel], Local]:
    """The kernels of a role in execution order, and its values, of which equal values are merged.
    `with_views`: a view is a kernel that moves nothing, as for a processor that runs the ops itself. `adds`: see
    `matmuls.MatmulStyle`."""
    if fusion not in get_args(Fusion):
        raise MeshweaveError("unknown fusion mode", got=repr(fusion), expected=", ".join(get_args(Fusion)))
    graph = role.graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    nodes = [n for n in graph.nodes if n.op == "call_function" and n.target not in SYMBOLS]
    compiled = [n for n in nodes if is_compiled(origin_of(n), fusion)]
    same = _equal_ops(compiled)
    local = _with_equal_merged(local, same)
    grouping = _Fusion(local, order, fusion, update, adds, same=same)
    groups = grouping.run(nodes)
    if with_views:
        grouping.sources.update((node, [*bases]) for node, bases in grouping.bases.items())
        groups += [_KernelGroup([node], order[node], 0, False) for node in grouping.bases if node not in same]
        groups.sort(key=lambda group: (group.position, order[group.nodes[0]]))
    returned = {base for n in output_node(graph).all_input_nodes for base in grouping.bases.get(n, (n,))}
    return [_kernel(group, grouping, returned, local) for group in groups], local


def _equal_ops(nodes: Sequence[fx.Node]) -> dict[fx.Node, fx.Node]:
    """Ops equal to an earlier op of their phase."""
    known: dict[Any, fx.Node] = {}
    same: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        if node.target in STARTS or node.target is WAIT:
            continue
        args, kwargs = map_nodes(node, lambda n: same.get(n, n))
        first = known.setdefault((node.target, repr(args), repr(kwargs), origin_of(node).phase), node)
        if first is not node:
            same[node] = first
    return same


def _with_equal_merged(local: Local, same: Mapping[fx.Node, fx.Node]) -> Local:
    """The values, with equal values in the same storage."""
    moved: dict[int, int] = {}
    for node, first in same.items():
        for mine, its in zip(local.values[node], local.values[first], strict=True):
            if mine.storage != its.storage:
                moved[mine.storage] = moved.get(its.storage, its.storage)
    if not moved:
        return local
    values = {
        node: tuple(replace(x, storage=moved.get(x.storage, x.storage)) for x in results)
        for node, results in local.values.items()
    }
    return replace(local, values=values)


def _kernel(group: _KernelGroup, grouping: _Fusion, returned: set[fx.Node], local: Local) -> Kernel:
    inside = set(group.nodes)
    reads = tuple(dict.fromkeys(x for n in group.nodes for x in _read_nodes(n, inside, grouping)))
    writes = [
        n for n in group.nodes if n in returned or any(reader not in inside for reader in grouping.readers.get(n, ()))
    ]
    if len(group.nodes) == 1:
        (node,) = group.nodes
        shown = operand_values(node, local.values)
        is_view = node in grouping.bases
        works = (MemoryWork("copy", 0, 0, shown[0].dtype),) if is_view else work_of(node, shown, local.values[node])
    else:
        operands = [x for n in group.nodes for x in _read_values(n, inside, grouping, local)]
        kinds = [grouping.kinds[n] for n in group.nodes]
        if kinds[0] == "matmul":  # with a bias, or a sum to which it adds
            product = group.nodes[0]
            works = work_of(product, operand_values(product, local.values), local.values[product])
            if grouping.adds:
                works = tuple(_with_sum(work, group, operands, local) for work in works)
            return Kernel(tuple(group.nodes), group.position, works, reads, tuple(writes))
        kind = next((k for k in ("reduction", "gather", "random") if k in kinds), "pointwise")
        works = (memory_work(kind, operands, [x for n in writes for x in local.values[n]]),)
    writes = writes or group.nodes[-1:]
    return Kernel(tuple(group.nodes), group.position, works, reads, tuple(writes))


def _with_sum(work: Work, group: _KernelGroup, operands: Sequence[Value], local: Local) -> Work:
    """The work of a matmul that adds: it reads the sum too, and writes that in place of its product."""
    product, total = (local.values[node] for node in (group.nodes[0], group.nodes[-1]))
    own = {x.storage for x in operand_values(group.nodes[0], local.values)}
    more = sum(x.bytes for x in operands if x.storage not in own) + sum(x.bytes for x in total)
    return replace(work, bytes=work.bytes + more - sum(x.bytes for x in product))


def _read_nodes(node: fx.Node, inside: set[fx.Node], grouping: _Fusion) -> Iterable[fx.Node]:
    """The operands of an op that its kernel does not compute, or what it reads instead."""
    for operand in (n for n in node.all_input_nodes if n.target not in SYMBOLS):
        for base in grouping.bases.get(operand, (operand,)):
            kept = grouping.remade.get((node, base), (operand,))
            yield from (x for x in kept if base not in inside and x not in inside)


def _read_values(node: fx.Node, inside: set[fx.Node], grouping: _Fusion, local: Local) -> Iterable[Value]:
    """What an op of a fused kernel reads from memory: operands (as it sees them) that are not computed inside."""
    for n in node.all_input_nodes:
        bases = grouping.bases.get(n, (n,))
        if remade := [x for base in bases for x in grouping.remade.get((node, base), ())]:
            yield from (value for x in remade for value in local.values.get(x, ()))
        elif not inside.issuperset(bases):
            yield from local.values.get(n, ())
