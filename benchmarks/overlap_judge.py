"""An independent judge of overlap: seconds, exposed seconds and true peak memory of any fx graph run in its order.

One compute stream in the order of the graph, one FIFO channel per process group, a wait holds compute until its
collective is done. It knows nothing of the passes that it judges (it imports neither optimize.overlap nor Inductor's
pass), and prices what they insert (copies, slices, concatenations) by the same rules as everything else.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from heapq import heappop, heappush
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from meshweave.cost.simulate.clock import Work, play
from meshweave.errors import MeshweaveError

aten, c10d = torch.ops.aten, torch.ops._c10d_functional
WAIT = c10d.wait_tensor.default
FACTORS = {  # bytes on the wire over the bytes of the larger end, times (n - 1) / n: ring algorithms of NCCL
    "all_gather": 1.0,
    "reduce_scatter": 1.0,
    "all_reduce": 2.0,
    "all_to_all": 1.0,
}
MATMULS = (aten.mm, aten.addmm, aten.bmm, aten.baddbmm)
# Names of pointwise ops that torch does not tag so, and of ops that Inductor makes part of a pointwise kernel.
FUSIBLE = (
    *("prims.convert_element_type", "prims.iota", "aten.full", "aten.empty", "aten.scalar_tensor", "aten.cat"),
    *("aten.slice_scatter", "aten.repeat", "aten.sum", "aten.mean", "aten.amax", "aten.embedding", "aten.gather"),
    *("aten.copy_", "aten.clone", "aten.where", "aten.arange", "aten.reshape", "aten._to_copy"),
)
FREE = ("aten.empty", "aten.sym_size", "aten.lift_fresh_copy")


@dataclass(frozen=True, slots=True)
class Link:
    """Seconds of a collective on bytes that cross: latency + bytes / bandwidth."""

    bandwidth: float  # bytes per second and rank
    latency: float  # seconds


# H100 SXM: 989 TFLOPS dense bf16 and HBM3 of 3.35 TB/s (NVIDIA H100 data sheet, 2023); matmuls reach 70% of the former.
# A rank of a group over nodes gets 45.5 GB/s of its 400 Gbit/s NIC, one on NVLink 335 of 450 GB/s: what NCCL tests
# measure as bus bandwidth of large messages.
FLOPS = 0.7 * 989e12
HBM = 3.35e12
INTER_NODE = Link(45.5e9, 60e-6)
NVLINK = Link(335e9, 20e-6)


def tensor_bytes(value: Any) -> int:
    """Bytes of all tensors in a value."""
    return sum(t.numel() * t.element_size() for t in tree_leaves(value) if isinstance(t, Tensor))


def op_name(node: fx.Node) -> str:
    """As `aten.mm`, without the overload."""
    return str(getattr(node.target, "_overloadpacket", node.target))


def collective_of(node: fx.Node) -> str | None:
    """Which collective a node starts, as a key of FACTORS."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.target is WAIT:
        return None
    if node.target.namespace not in ("_c10d_functional", "c10d_functional"):
        return None
    name = node.target._schema.name.split("::")[1]
    return next(key for key in FACTORS if name.startswith(key))


def group_of(node: fx.Node) -> str:
    """Name of the process group of a start."""
    return str(node.args[-1])


def start_of(node: fx.Node) -> fx.Node | None:
    """The start that a node waits for, if it waits."""
    if node.target not in (WAIT, torch.ops.c10d_functional.wait_tensor.default):
        return None
    of = node.args[0]
    while isinstance(of, fx.Node) and of.target is operator.getitem:
        of = of.args[0]
    assert isinstance(of, fx.Node)
    return of if collective_of(of) is not None else None


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of every node, from its meta["val"]. The same for every pass and for the judge.

    Matmul and attention: flops at 70% of the peak, at least the time of their bytes. A collective: its link's latency
    and the bytes that cross. Everything else moves memory: it reads those operands, and writes its result, that a
    compiler which fuses all pointwise neighbours would have in memory (see `_in_memory`); a view is free.
    `scale` multiplies the seconds of communication, `noise` spreads all seconds by up to that part, by the node's name.
    """

    links: Mapping[str, Link]
    sizes: Mapping[str, int]
    scale: float = 1.0
    noise: float = 0.0
    seed: int = 0

    def __call__(self, node: fx.Node, num_bytes: int | None = None) -> float:
        """Seconds; of a start that is handed `num_bytes` by one rank instead of what its operand holds."""
        kind = collective_of(node)
        seconds = self._kernel(node) if kind is None else self._collective(kind, node, num_bytes)
        return seconds * (1 + self.noise * _spread(node.name, self.seed)) if self.noise else seconds

    def _collective(self, kind: str, node: fx.Node, num_bytes: int | None) -> float:
        group = group_of(node)
        n = self.sizes[group]
        held = tensor_bytes([value_of(arg) for arg in tree_leaves(node.args[0])]) if num_bytes is None else num_bytes
        crossing = FACTORS[kind] * (n - 1) / n * held * (n if kind == "all_gather" else 1)
        return self.scale * (self.links[group].latency + crossing / self.links[group].bandwidth) if n > 1 else 0.0

    def _kernel(self, node: fx.Node) -> float:
        if node.op != "call_function" or start_of(node) is not None or is_free(node):
            return 0.0
        flops = flops_of(node)
        if flops:
            return max(
                flops / FLOPS, tensor_bytes([node.meta["val"], [value_of(n) for n in node.all_input_nodes]]) / HBM
            )
        operands = [n for n in node.all_input_nodes if node.target is not aten.copy_.default or n is not node.args[0]]
        read = sum(tensor_bytes(value_of(n)) for n in operands if not is_fusible(node) or _in_memory(n))
        written = tensor_bytes(node.meta["val"]) if not is_fusible(node) or _in_memory(node) else 0
        return (read + written) / HBM


def value_of(arg: Any) -> Any:
    return arg.meta.get("val") if isinstance(arg, fx.Node) else None


def is_free(node: fx.Node) -> bool:
    """Views, waits, allocation and Python's own functions launch nothing."""
    if not isinstance(node.target, torch._ops.OpOverload):
        if getattr(node.target, "__module__", None) in ("_operator", "builtins", "math"):
            return True
        raise MeshweaveError("the judge cannot price this op", where=node.name, got=str(node.target))
    if op_name(node) in FREE or node.target is WAIT:
        return True
    return _is_view(node.target) or (node.target is aten.reshape.default and _shares(node))


@cache
def _is_view(target: torch._ops.OpOverload) -> bool:
    """A result is in the storage of an operand that it does not write, by its schema."""
    returns = target._schema.returns
    return _is_alias(target) and not any(r.alias_info is not None and r.alias_info.is_write for r in returns)


@cache
def _is_alias(target: torch._ops.OpOverload) -> bool:
    """The result is in the storage of the first operand, be it written or not."""
    if target is aten._unsafe_view.default:  # its schema has it as a copy
        return True
    returns, arguments = target._schema.returns, target._schema.arguments
    return bool(returns) and all(r.alias_info is not None for r in returns) and arguments[0].alias_info is not None


def _shares(node: fx.Node) -> bool:
    """The result is in the storage of the first operand."""
    of = node.args[0]
    return isinstance(of, fx.Node) and storages(node.meta["val"]) == storages(of.meta["val"])


def is_fusible(node: fx.Node) -> bool:
    """A compiler makes it part of a kernel with its neighbours: pointwise ops, reductions, copies."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or op_name(node) in FUSIBLE


def _in_memory(node: fx.Node) -> bool:
    """Whether a value is written to memory when pointwise neighbours are fused: something else makes or reads it."""
    while node.op == "call_function" and is_free(node) and node.all_input_nodes and start_of(node) is None:
        node = node.all_input_nodes[0]  # a view is where its base is
    return not is_fusible(node) or any(not is_fusible(user) for user in _readers(node))


def _readers(node: fx.Node) -> Iterator[fx.Node]:
    """Users of a value or of views of it."""
    for user in node.users:
        if user.op == "call_function" and is_free(user):
            yield from _readers(user)
        else:
            yield user


def flops_of(node: fx.Node) -> float:
    """Of matmuls and attention (all of the square: as torch's flop counter has it; its backward is 2.5 times)."""
    packet = getattr(node.target, "overloadpacket", None)
    if packet in MATMULS:
        left, right = (value_of(arg) for arg in node.args[-2:])
        return 2.0 * prod(left.shape) * right.shape[-1]
    name = op_name(node)
    if not name.startswith("aten._scaled_dot_product_"):
        return 0.0
    q, k, v = (value_of(arg).shape for arg in node.args[slice(1, 4) if name.endswith("backward") else slice(0, 3)])
    return 2.0 * prod(q[:-1]) * k[-2] * (q[-1] + v[-1]) * (2.5 if name.endswith("backward") else 1.0)


def _spread(name: str, seed: int) -> float:
    """A number in [-1, 1) that depends on nothing but its arguments."""
    return int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7]) / 2**55 - 1


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a graph takes in its order. `exposed` is the time in which compute stands still, `channels` the seconds of
    each group's collectives."""

    seconds: float
    exposed: float
    compute: float
    channels: tuple[tuple[str, float], ...]
    peak_bytes: int
    num_collectives: int


def lower_bound(graph: fx.Graph, costs: Costs) -> float:
    """No order of the graph is faster, whatever it merges: the longest chain of dependent nodes; and each stream by
    itself, where a node has a head (what must run before it) and a tail (after it). Merging the collectives of a group
    saves latencies, never bytes, so they go in without theirs. Holds for links that are not shared."""
    nodes = [node for node in graph.nodes if node.op == "call_function"]
    seconds = {node: costs(node) for node in nodes}
    heads: dict[fx.Node, float] = {}
    tails: dict[fx.Node, float] = {}
    for node in nodes:
        heads[node] = max((heads[n] + seconds[n] for n in node.all_input_nodes if n in heads), default=0.0)
    for node in reversed(nodes):
        tails[node] = max((tails[n] + seconds[n] for n in node.users if n in tails), default=0.0)
    streams: dict[str | None, list[tuple[float, float, float]]] = {}
    for node in nodes:
        group = group_of(node) if collective_of(node) is not None else None
        latency = 0.0 if group is None else costs.scale * costs.links[group].latency
        if seconds[node] > 0:
            job = (heads[node], max(0.0, seconds[node] - latency), tails[node])
            streams.setdefault(group, []).append(job)
    chain = max((heads[node] + seconds[node] + tails[node] for node in nodes), default=0.0)
    return max(chain, *(_one_machine(jobs) for jobs in streams.values()), 0.0)


def _one_machine(jobs: list[tuple[float, float, float]]) -> float:
    """Least makespan of (head, seconds, tail) on one machine that may interrupt jobs: always the ready one of the
    longest tail (Jackson's preemptive schedule; Carlier, EJOR 1982). Interruptions only help."""
    waiting = sorted(jobs, reverse=True)
    ready: list[tuple[float, float]] = []  # (-tail, seconds left)
    now = end = 0.0
    while waiting or ready:
        if not ready:
            now = max(now, waiting[-1][0])
        while waiting and waiting[-1][0] <= now:
            _, seconds, tail = waiting.pop()
            heappush(ready, (-tail, seconds))
        tail, left = heappop(ready)
        until = min(now + left, waiting[-1][0] if waiting else now + left)
        if until < now + left:
            heappush(ready, (tail, now + left - until))
        else:
            end = max(end, until - tail)
        now = until
    return end


def judge(graph: fx.Graph, cost: Callable[[fx.Node], float], *, is_shared: bool = False) -> Verdict:
    """Play a graph. `is_shared`: all groups are on one link, whose bandwidth those that run at a time share."""
    work, compute, busy = Work(), list[int](), 0.0
    channels: dict[str, list[int]] = {}
    copies: dict[fx.Node, int] = {}
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if collective_of(node) is not None:
            compute.append(work.add(0.0))
            usage = (("link", 1.0),) if is_shared else ()
            copies[node] = work.add(cost(node), compute[-1:], usage)
            channels.setdefault(group_of(node), []).append(copies[node])
        elif (started := start_of(node)) is not None:
            compute.append(work.add(0.0, (copies[started],)))
        elif seconds := cost(node):
            busy += seconds
            compute.append(work.add(seconds))
    seconds = play(work, (compute, *channels.values()), 1, lambda levels: 1.0).seconds
    sums = tuple((group, sum(work.seconds[i] for i in queue)) for group, queue in channels.items())
    return Verdict(seconds, seconds - busy, busy, sums, peak_bytes(graph), len(copies))


def storages(value: Any) -> set[int]:
    """Which storages the tensors of a value are in."""
    return {t.untyped_storage()._cdata for t in tree_leaves(value) if isinstance(t, Tensor)}


def peak_bytes(graph: fx.Graph) -> int:
    """The most that is alive at a time: a storage from the node that makes it to the last that uses it or a view of it.

    Results are there before operands go. What a collective reads and writes lives until its wait. Parameters (primals)
    and what is returned stay; other placeholders go after their last use.
    """
    held: dict[fx.Node, set[int]] = {}
    sizes: dict[int, int] = {}
    made: dict[int, int] = {}
    last: dict[int, int] = {}
    nodes = list(graph.nodes)
    for i, node in enumerate(nodes):
        held[node] = _held(node, held, sizes)
        used = {s for n in node.all_input_nodes for s in held[n]} | held[node]
        if (started := start_of(node)) is not None:
            used |= {s for n in started.all_input_nodes for s in held[n]}
        stays = node.op == "output" or (
            node.op == "placeholder" and (node.name.startswith("primals") or not node.users)
        )
        for one in used:
            made.setdefault(one, 0 if node.op == "placeholder" else i)
            last[one] = max(last.get(one, 0), len(nodes) if stays else i)
    change = [0] * (len(nodes) + 2)
    for one, size in sizes.items():
        change[made[one]] += size
        change[last[one] + 1] -= size
    peak = now = 0
    for delta in change:
        now += delta
        peak = max(peak, now)
    return peak


def storage_bytes(graph: fx.Graph) -> dict[fx.Node, dict[int, int]]:
    """By node the storages of its result, with their bytes."""
    held: dict[fx.Node, set[int]] = {}
    sizes: dict[int, int] = {}
    for node in graph.nodes:
        held[node] = _held(node, held, sizes)
    return {node: {s: sizes[s] for s in storages} for node, storages in held.items()}


def _held(node: fx.Node, held: Mapping[fx.Node, set[int]], sizes: dict[int, int]) -> set[int]:
    """The storages of a node's result; new ones are entered with their bytes."""
    if start_of(node) is not None or (isinstance(node.target, torch._ops.OpOverload) and _is_alias(node.target)):
        first = node.args[0]
        assert isinstance(first, fx.Node)
        return held[first]
    if isinstance(out := node.kwargs.get("out"), fx.Node):
        return held[out]
    value = node.meta.get("val")
    if node.target is operator.getitem:  # what a pass writes there may be in a storage of its own
        base, index = node.args
        assert isinstance(base, fx.Node)
        if isinstance(base.target, torch._ops.OpOverload) and _is_alias(base.target):
            return held[base]
        value = base.meta["val"][index]
    for storage in (t.untyped_storage() for t in tree_leaves(value) if isinstance(t, Tensor)):
        sizes.setdefault(storage._cdata, storage.nbytes())
    return storages(value)


def check_by_hand() -> None:
    """A gather of 8 MB under a matmul, then a matmul that reads it; and what they hold."""
    graph = fx.Graph()

    def add(node: fx.Node, rows: int) -> fx.Node:
        node.meta["val"] = torch.empty(rows, 1024, dtype=torch.bfloat16, device="meta")
        return node

    shard = add(graph.placeholder("primals_1"), 512)
    x = add(graph.placeholder("x"), 1024)
    begun = add(graph.call_function(c10d.all_gather_into_tensor.default, (shard, 8, "a")), 4096)
    first = add(graph.call_function(aten.mm.default, (x, x)), 1024)
    weight = add(graph.call_function(WAIT, (begun,)), 4096)
    last = add(graph.call_function(aten.mm.default, (weight, first)), 4096)
    graph.output((last,))
    costs = Costs({"a": Link(100e9, 10e-6)}, {"a": 8})
    gather, matmul = 10e-6 + 7 / 8 * 8 * 2**20 / 100e9, 2 * 1024**3 / FLOPS
    found = judge(graph, costs)
    assert abs(found.seconds - (gather + 4 * matmul)) < 1e-12, found
    assert abs(found.exposed - (gather - matmul)) < 1e-12, found
    assert abs(lower_bound(graph, costs) - (gather + 4 * matmul)) < 1e-12, found
    # the shard stays, x goes after the first matmul; at the last one the shard, first, weight and the result are there
    assert found.peak_bytes == (512 + 1024 + 4096 + 4096) * 2048, found
    assert _one_machine([(0, 4, 0), (1, 2, 5)]) == 8  # the second interrupts the first
    assert _one_machine([(3, 1, 0), (0, 1, 4)]) == 5


if __name__ == "__main__":
    check_by_hand()
