"""What the matmuls of a training framework do beside multiplying, when it is simulated.

They may take operands in a smaller dtype, such as float8: which values are cast, which move in the smaller dtype, and
the costs. The 2-D matmuls of repeated blocks use the dtype, and those of rows by expert. Each operand is cast once per
phase: its largest value is computed (by the kernel that produces it, if kernels are fused), then it is scaled and
rounded. Values that are gathered only for such matmuls are cast before they move, as in float8 FSDP and float8 sequence
parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from meshweave.cost.simulate.classify import known_kind
from meshweave.cost.simulate.kernels import Fusion, Kernel, is_in_block
from meshweave.ir.collectives import ALL_GATHER, WAIT
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph
from meshweave.ir.values import Local, Value
from meshweave.ir.work import Matmul, MemoryWork, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class MatmulStyle:
    """What the matmuls of a step do.

    dtype: of their operands in repeated blocks; None: that of the program. gathers: whether values that only they read
    are gathered in it. keeps: whether parameters that are gathered once a step for such matmuls are held in it, in as
    many copies as the machine needs. adds: what is added to a product is added by the matmul itself (GEMM with beta =
    1): sums of gradients of microbatches, and gradients of a value that several matmuls read, which are a matmul as
    wide as all. sum_dtype: in which gradients of microbatches are added up and reduced; None: that of the program.
    in_chunks: gathers of their operands and reductions of their products run beside them, in as many chunks as devices:
    but for a chunk.
    """

    dtype: torch.dtype | None = None
    gathers: bool = True
    keeps: bool = False
    adds: bool = False
    sum_dtype: torch.dtype | None = None
    in_chunks: bool = False


PLAIN = MatmulStyle()


def with_sums_in(local: Local, role: RankGraph, dtype: torch.dtype | None) -> Local:
    """The values of a role whose gradients of microbatches are added up, and reduced, in a dtype."""
    if dtype is None:
        return local
    values = dict(local.values)
    for node in _sums_of(role):
        values[node] = tuple(_in_dtype(x, dtype) for x in values[node])
    return replace(local, values=values)


def _sums_of(role: RankGraph) -> Iterator[fx.Node]:
    """The sums of gradients, and what their reduction makes of them."""
    known = {node for node, item in role.sources.items() if item.kind == "acc"}
    yield from known
    totals = {value for (kind, _), value in role.results.items() if kind == "acc"}
    for node in role.graph.nodes:
        if node.op != "call_function":
            continue
        if node in totals or (origin_of(node).phase == "reduce" and not known.isdisjoint(node.all_input_nodes)):
            known.add(node)
            yield node


def _in_dtype(value: Value, dtype: torch.dtype) -> Value:
    if not value.dtype.is_floating_point or value.dtype.itemsize <= dtype.itemsize:
        return value
    return replace(value, dtype=dtype, storage_bytes=value.storage_bytes * dtype.itemsize // value.dtype.itemsize)


def is_of_parameter(collective: fx.Node, role: RankGraph) -> bool:
    """Whether a collective gathers a parameter, or reduces a gradient of one: it has what it moves, or its result
    becomes that, by ops of a single operand and a last addition to earlier microbatches."""
    node = collective
    while node.op == "call_function" and len(node.all_input_nodes) == 1:
        (node,) = node.all_input_nodes
    if node.op == "placeholder":
        return role.sources[node].kind in ("param", "acc")
    gradients = {value for (kind, _), value in role.results.items() if kind in ("grad", "acc")}
    node = collective
    while node not in gradients and len(node.users) == 1 and (user := next(iter(node.users))).op == "call_function":
        if len(user.all_input_nodes) > 1:
            return user in gradients
        node = user
    return node in gradients


@dataclass(slots=True)
class Narrow:
    """A role's matmuls in a smaller dtype. `sources` are the storages of gathers in that dtype, with a device's operand
    elements; `done` the (storage, phase, microbatch) that have been cast."""

    style: MatmulStyle
    role: RankGraph
    local: Local
    fusion: Fusion
    sources: dict[int, int] = field(default_factory=dict)
    done: set[tuple[int, str, int]] = field(default_factory=set)

    @property
    def dtype(self) -> torch.dtype:
        assert self.style.dtype is not None
        return self.style.dtype

    def __post_init__(self) -> None:
        for node in self.role.graph.nodes:
            if node.target is ALL_GATHER.op and is_in_block(origin_of(node)) and self.style.gathers:
                operand = node.args[0]
                assert isinstance(operand, fx.Node)
                handed = sum(x.num_elements for x in self.local.values[operand])
                self.sources.update(dict.fromkeys(self._fed_to_matmuls(node), handed))

    def in_memory(self, copies: int) -> Local:
        """The values as the role holds them, with `copies` of parameters that are gathered once."""
        if not self.style.keeps:
            return self.local
        values = dict(self.local.values)
        for node, results in values.items():
            if node.op == "call_function" and origin_of(node).phase == "prepare":
                values[node] = tuple(self._in_memory(x, copies) for x in results)
        return replace(self.local, values=values)

    def _in_memory(self, value: Value, copies: int) -> Value:
        if value.storage not in self.sources or value.dtype.itemsize <= copies * self.dtype.itemsize:
            return value
        size = value.storage_bytes * copies * self.dtype.itemsize // value.dtype.itemsize
        return replace(value, storage_bytes=size)

    def moved_bytes(self, start: fx.Node, num_bytes: float) -> float:
        """Bytes of the operand of a collective in the dtype in which it moves."""
        results = self.local.values[start]
        if start.target is not ALL_GATHER.op or not results or results[0].storage not in self.sources:
            return num_bytes
        return num_bytes * self.dtype.itemsize / results[0].dtype.itemsize

    def works(self, kernel: Kernel, microbatch: int) -> Iterator[Work]:
        """The work of a kernel, with casts before matmuls in the smaller dtype."""
        product = kernel.nodes[0]  # a bias may be added to it
        for work in kernel.works:
            if not self._is_narrow(product, work):
                yield work
                continue
            assert isinstance(work, Matmul)
            factors = self._factors(product)
            for node in factors:
                yield from self._cast(node, origin_of(product).phase, microbatch)
            elements = sum(x.num_elements for node in factors for x in self.local.values[node])
            saved = elements * (work.dtype.itemsize - self.dtype.itemsize)
            yield replace(work, dtype=self.dtype, bytes=max(work.bytes - saved, 0))

    def _factors(self, product: fx.Node) -> tuple[fx.Node, ...]:
        """The operands of a matmul in its dtype: of rows by expert the first two, the ends of rows follow."""
        nodes = (n for n in product.all_input_nodes if self.local.values.get(n))
        floating = [n for n in nodes if self.local.values[n][0].dtype.is_floating_point]
        return tuple(floating[-2:])

    def _is_narrow(self, node: fx.Node, work: Work) -> bool:
        wide = isinstance(work, Matmul) and work.batch == 1 and work.dtype.itemsize > self.dtype.itemsize
        return wide and is_in_block(origin_of(node))

    def _cast(self, node: fx.Node, phase: str, microbatch: int) -> Iterator[MemoryWork]:
        for x in self.local.values[node]:
            key = (x.storage, phase, microbatch)
            if key in self.done:
                continue
            self.done.add(key)
            elements = self.sources.get(x.storage, x.num_elements)
            if self.fusion in ("ops", "eager"):
                yield MemoryWork("reduction", elements * x.dtype.itemsize, elements, x.dtype)
            yield MemoryWork("pointwise", elements * (x.dtype.itemsize + self.dtype.itemsize), elements, x.dtype)

    def _fed_to_matmuls(self, start: fx.Node) -> set[int]:
        """The storages of a gather's result and of copies of it, if only matmuls read them; else none."""
        waiting, seen, is_read = list(start.users), set[fx.Node](), False
        storages = {x.storage for x in self.local.values[start]}
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.op != "call_function":
                return set()
            is_view = node.target in (WAIT, ALL_GATHER.op) or any(
                x.storage in storages for x in self.local.values[node]
            )
            kind = "strided" if is_view else known_kind(node)
            if kind == "strided":  # a view or copy of the same elements, or a gather of a gathered value
                storages |= {x.storage for x in self.local.values[node]}
                waiting += node.users
            elif kind == "matmul":
                is_read = True
            else:
                return set()
        return storages if is_read else set()
