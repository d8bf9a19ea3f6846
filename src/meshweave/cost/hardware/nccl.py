"""The time of NCCL's collectives: every algorithm and protocol is a line with start-up and slope, and the minimum
counts.

Follows `src/graph/tuning.cc` of NCCL 2.30, whose constants are in the profiles, with two differences. Bandwidths are
those of the profile's links (their line rate times an efficiency per level), not those of NCCL's channel search; and
NVLink SHARP is computed from the bytes that it moves, since NCCL's own figure for it is only good enough to choose by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import log2

from meshweave.cost.hardware.schema import Link, Links, Nccl
from meshweave.cost.hardware.volumes import bytes_received
from meshweave.errors import MeshweaveError

# How the groups of a mesh map to nodes and network adapters, from their device ids.


@dataclass(frozen=True, slots=True, order=True)
class Shape:
    """How a group of `size` devices uses its links, while all groups of the mesh do the same.

    `least` and `most` are the smallest and largest number of its devices on a node. `net_share` is the group's
    bandwidth, in adapters, on the node where it has the least, `device_share` the share of an adapter that a device
    has; an adapter is shared evenly by the devices that use it. On a single node both are 1.0 and have no meaning.
    """

    size: int
    num_nodes: int
    least: int
    most: int
    net_share: float
    device_share: float


def shapes(groups: Sequence[Sequence[int]], devices_per_node: int, ports: int) -> tuple[Shape, ...]:
    """The distinct shapes among groups of device ids, sorted. Device d is in node d // devices_per_node and uses
    adapter (d % devices_per_node) * ports // devices_per_node of it, so with an adapter per device every rail has its
    own."""
    crossing = [group for group in groups if len({d // devices_per_node for d in group}) > 1]
    adapters = {
        d: (d // devices_per_node, d % devices_per_node * ports // devices_per_node) for g in crossing for d in g
    }
    load = Counter(adapters.values())
    return tuple(sorted({_shape(group, devices_per_node, adapters, load) for group in groups}))


def _shape(
    group: Sequence[int], devices_per_node: int, adapters: dict[int, tuple[int, int]], load: Counter[tuple[int, int]]
) -> Shape:
    nodes: dict[int, list[int]] = {}
    for device in group:
        nodes.setdefault(device // devices_per_node, []).append(device)
    least, most = min(map(len, nodes.values())), max(map(len, nodes.values()))
    if len(nodes) == 1:
        return Shape(len(group), 1, least, most, 1.0, 1.0)
    shares = {device: 1.0 / load[adapters[device]] for device in group}
    # Adding in device order keeps equal shares equal to the bit.
    net_share = min(sum(shares[device] for device in inside) for inside in nodes.values())
    return Shape(len(group), len(nodes), least, most, net_share, min(shares.values()))


LL, LL128, SIMPLE = range(3)
# tuning.cc: LL sends a flag with every 4 bytes, LL128 uses 120 of 128 bytes and loses more to its barriers.
_RING_SHARE = (0.5, 0.92, 1.0)
_LONE_LL128_SHARE = 0.7  # tuning.cc: with fewer than 2 devices per node both directions use the same device
_TREE_SHARE = 0.92  # tuning.cc
_TREE_PROTOCOL_NODE = (1 / 3.8, 7 / 9, 1.0)  # tuning.cc: on one node
_TREE_PROTOCOL_NET = (1 / 3.8, 120 / 128, 1.0)  # tuning.cc: on several nodes
_PAT_SHARE = 0.75  # tuning.cc
_PAT_DIVISOR = 3.5  # tuning.cc: PAT overlaps the latencies of its log2(n) steps
_SIMPLE_POSTS = 3  # tuning.cc: network posts per step of the Simple protocol
_RINGS = ("all_gather", "reduce_scatter", "all_reduce")
_MESSAGES = ("all_to_all", "permute", "transfer")


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds = start + slope * local bytes; `node` and `net` are the shares of the links' bandwidth used meanwhile."""

    start: float
    slope: float
    node: float
    net: float


def lines(op: str, shape: Shape, nccl: Nccl, links: Links) -> tuple[Line, ...]:
    """The lines of all algorithms and protocols that can run `op`, without those that others dominate. A group on
    several nodes needs `links.net`. Raises MeshweaveError for an op that has no model here."""
    group = _NcclGroup(op, shape, nccl, links)
    if op in _MESSAGES:
        return envelope([*group.pairs()])
    if op not in _RINGS:
        raise MeshweaveError(
            f"NCCL's model has no cost of '{op}'",
            got=op,
            expected=f"one of {', '.join((*_RINGS, *_MESSAGES))}",
            hint="add its lines to cost/hardware/nccl.py, or name the `curve=` of another collective in its row",
        )
    return envelope([*group.ring(), *group.pat(), *group.tree(), *group.nvls()])


def envelope(lines: list[Line]) -> tuple[Line, ...]:
    """The lines that are the minimum somewhere from 0 bytes up, by falling slope."""
    kept: list[Line] = []
    for line in sorted(lines, key=lambda line: (line.start, line.slope)):
        if kept and line.slope >= kept[-1].slope:
            continue
        while len(kept) > 1 and _meet(kept[-2], line) <= _meet(kept[-2], kept[-1]):
            kept.pop()
        kept.append(line)
    return tuple(kept)


def _meet(line: Line, other: Line) -> float:
    return (other.start - line.start) / (line.slope - other.slope)


@dataclass(frozen=True, slots=True)
class _NcclGroup:
    """A group for an op. Rates are bytes per second that large messages reach."""

    op: str
    shape: Shape
    nccl: Nccl
    links: Links

    @property
    def node_rate(self) -> float:
        return self.links.node.bandwidth * self.links.node.efficiency

    @property
    def net_rate(self) -> float:
        """Rate of an adapter."""
        net = self.links.net
        assert net is not None, "a group on several nodes without a net was rejected earlier"
        return net.bandwidth * net.efficiency

    @property
    def received(self) -> float:
        """Bytes that a device receives per byte of local input."""
        return bytes_received(self.op, self.shape.size, 1.0, "nccl")

    @property
    def is_spread(self) -> bool:
        return self.shape.num_nodes > 1

    def line(self, start: float, slope: float, node: float = 0.0, net: float = 0.0) -> Line:
        """A line, from the bytes that a device moves on its node's links and that the group moves on a node's adapters,
        per byte of input."""
        node_share = node / slope / self.node_rate
        net_share = net / slope / (self.net_rate * self.shape.net_share) if net else 0.0
        return Line(start, slope, min(node_share, 1.0), min(net_share, 1.0))

    @property
    def bus(self) -> float:
        """Bytes per second through every device of a ring: the slower of its node's links and adapters."""
        if not self.is_spread:
            return self.node_rate
        net = self.net_rate * self.shape.net_share
        return net if self.shape.most == 1 else min(self.node_rate, net)

    def ll_cap(self) -> float:
        return self.nccl.ll_cap[min(self.shape.num_nodes, 3) - 1]

    def ring(self) -> Iterator[Line]:
        """n - 1 steps (twice for an all-reduce), of which those between nodes take longer."""
        shape, nccl = self.shape, self.nccl
        twice = 2 if self.op == "all_reduce" else 1
        steps = twice * (shape.size - 1)
        across = 0 if not self.is_spread else 2 * shape.num_nodes if twice == 2 else shape.num_nodes - 1
        for protocol in (LL, LL128, SIMPLE):
            rate = self.bus * _RING_SHARE[protocol]
            if protocol == LL:
                rate = min(rate, self.ll_cap())
            if protocol == LL128 and self.is_spread and shape.most == 1:
                rate = self.bus * _LONE_LL128_SHARE
            posts = nccl.net_overhead * (_SIMPLE_POSTS if protocol == SIMPLE else 1) if self.is_spread else 0.0
            inside = max(steps - across, 0) * max(nccl.node_ring[protocol], posts)
            start = nccl.base_ring[protocol] + inside + across * nccl.net_ring[protocol]
            node, net = (self.received if shape.most > 1 else 0.0), self.received if self.is_spread else 0.0
            yield self.line(start, self.received / rate, node, net)

    def pat(self) -> Iterator[Line]:
        """All-gather and reduce-scatter in log2(n) steps, if every node has a single device of the group."""
        if self.op == "all_reduce" or not self.is_spread or self.shape.most > 1:
            return
        nccl, size = self.nccl, self.shape.size
        hops = log2(size) * nccl.net_ring[SIMPLE] / _PAT_DIVISOR + size * nccl.pat_per_device
        yield self.line(nccl.pat_base + hops, self.received / (self.bus * _PAT_SHARE), 0.0, self.received)

    def tree(self) -> Iterator[Line]:
        """All-reduce up and down a double binary tree over the nodes, with a chain inside each."""
        if self.op != "all_reduce":
            return
        shape, nccl = self.shape, self.nccl
        share = _TREE_PROTOCOL_NET if self.is_spread else _TREE_PROTOCOL_NODE
        for protocol in (LL, LL128, SIMPLE):
            rate = self.bus * _TREE_SHARE * share[protocol]
            if protocol == LL:
                rate = min(rate, self.ll_cap())
            chain = (shape.most - 1) * nccl.node_tree[protocol]
            hops = log2(shape.num_nodes) * nccl.net_tree[protocol]
            slope = 2.0 / rate
            node, net = (2.0 if shape.most > 1 else 0.0), 2.0 if self.is_spread else 0.0
            yield self.line(nccl.base_tree[protocol] + 2 * (chain + hops), slope, node, net)

    def nvls(self) -> Iterator[Line]:
        """All-reduce in the switch.

        A device sends each byte once to be added and its part of the sums once, and receives as much, so (1 + 1/p)
        bytes go each way per byte of input; across nodes a tree connects equal parts. Chunks in flight overlap
        reduction and broadcast; while the whole input is in flight nothing overlaps, and each byte goes twice. Both
        cases are lines: the second starts later by the part that never overlaps.
        """
        shape, nccl = self.shape, self.nccl
        if self.op != "all_reduce" or not nccl.nvls_efficiency or shape.least < 2:
            return
        inside, rate = shape.least, self.node_rate * nccl.nvls_efficiency
        start, net = nccl.node_nvls, 0.0
        if self.is_spread:
            start += 2 * log2(shape.num_nodes) * nccl.net_nvls_tree
            # two nodes exchange; in a tree a node sends up, and down to others
            net = 1.0 if shape.num_nodes == 2 else 2.0
        across = net / (self.net_rate * shape.net_share) if net else 0.0
        moved = 1 + 1 / inside
        apart = (2 - moved) / rate
        in_flight = nccl.nvls_channels * nccl.nvls_chunk_bytes * inside
        slope = max(moved / rate, across)
        yield self.line(start, slope + apart, 2.0, net)
        yield self.line(start + in_flight * apart, slope, moved / nccl.nvls_efficiency, net)

    def pairs(self) -> Iterator[Line]:
        """Point to point: an all-to-all, or a message per device; the slowest goes over the farthest links."""
        shape, nccl = self.shape, self.nccl
        if self.op == "all_to_all":
            hops_near, hops_far = shape.most - 1, shape.num_nodes - 1
            near, far = hops_near / shape.size, (shape.size - shape.least) / shape.size
        else:
            hops_near, hops_far = int(not self.is_spread), int(self.is_spread)
            near, far = float(hops_near), float(hops_far)
        across = far / (self.net_rate * shape.device_share) if self.is_spread else 0.0
        slope = max(near / self.node_rate, across)
        for protocol in (LL, SIMPLE):
            start = nccl.base_ring[protocol]
            start += hops_near * nccl.node_ring[protocol] + hops_far * nccl.net_ring[protocol]
            yield self.line(start, slope / _RING_SHARE[protocol], near, far * shape.most if self.is_spread else 0.0)


def sharp_limit(nccl: Nccl | None, node: Link, num_inside: int) -> float:
    """The highest rate, in bytes per second and device, of an all-reduce in the switch, counted in ring bytes."""
    if nccl is None or num_inside < 2:
        return 0.0
    return node.bandwidth * node.efficiency * nccl.nvls_efficiency * 2 * (num_inside - 1) / (num_inside + 1)
