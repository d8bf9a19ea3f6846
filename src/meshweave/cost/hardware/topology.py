"""How the groups of a mesh map to nodes and network adapters, from their device ids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


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
