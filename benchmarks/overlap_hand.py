"""Orders by hand against the search: Llama-3-8B on the 8 GPUs of a node, FSDP and TP (pytorch/pytorch#184236).

    python benchmarks/overlap_hand.py      # both graphs in both directions, a table: results/overlap_hand.md
    python benchmarks/overlap_hand.py --layers 4

The hand order is that of torchtitan's bucketing by transformer blocks: the gathers of a block start together when the
block before begins, its reductions when its last gradient is there. It is handed in as `orders=`. "merged": all
collectives of a block are one, and its copies cost nothing, which no graph reaches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence

from overlap_graphs import Direction, Groups, LocalLlama, Shape, trace, world
from overlap_judge import Costs, collective_of, group_of, judge, start_of, tensor_bytes, value_of
from overlap_list import reordered
from overlap_passes import costs_of, donated_of, remembered
from torch import fx

from meshweave.optimize.overlap import OverlapOptions, overlap

TITLES = ("graph", "nodes", "as traced ms", "by hand ms", "by hand, merged ms", "meshweave ms", "of the hand order")
BATCH, SEQUENCE = 2, 8192  # of the runs in the pull request


def blocks_of(graph: fx.Graph, shape: Shape, groups: Groups) -> dict[fx.Node, int]:
    """The block of each gather and reduction of parameters: that of the parameter. Gradients are returned in the order
    of parameters."""
    sizes = LocalLlama(shape, groups).parameters()
    per_layer = (len(sizes) - 3) // shape.layers
    blocks = [0, *(1 + k // per_layer for k in range(per_layer * shape.layers)), *[shape.layers + 1] * 2]
    of: dict[fx.Node, int] = {}
    for start in graph.nodes:
        if collective_of(start) is None or group_of(start) != groups.fsdp:
            continue
        source, node = start, start
        while source.op != "placeholder" and source.all_input_nodes and collective_of(start) == "all_gather":
            source = source.all_input_nodes[0]
        if source.name.startswith("primals_"):
            of[start] = blocks[int(source.name.split("_")[1]) - 1]
            continue
        results = next(iter(graph.find_nodes(op="output"))).args[0]
        while node not in results and node.users:
            node = next(iter(node.users))
        of[start] = blocks[list(results).index(node)]
    return of


def order_by_hand(graph: fx.Graph, blocks: dict[fx.Node, int]) -> list[fx.Node]:
    """The nodes without waits; those of parameters' collectives by block."""
    order: dict[fx.Node, None] = {}
    gathers, reductions = dict[int, list[fx.Node]](), dict[int, list[fx.Node]]()
    for node, block in blocks.items():
        (gathers if collective_of(node) == "all_gather" else reductions).setdefault(block, []).append(node)
    following = dict(zip(gathers, list(gathers)[1:], strict=False))
    begun: set[int] = set()

    def place(node: fx.Node) -> None:
        """A node after what it needs."""
        for n in node.all_input_nodes:
            if n not in order:
                place(n)
        order[node] = None

    for node in graph.nodes:
        if node.op == "call_function" and node not in order and node not in blocks and start_of(node) is None:
            needed = {blocks[s] for n in node.all_input_nodes if (s := start_of(n)) in blocks} - begun
            for block in sorted(needed, key=list(gathers).index):
                begun.add(block)
                for start in (*gathers[block], *gathers.get(following.get(block, -1), ())):
                    place(start)
        is_last = reductions.get(blocks.get(node, -1), [None])[-1] is node
        if node.op == "call_function" and start_of(node) is None and (node not in blocks or is_last):
            for member in reductions[blocks[node]] if is_last else (node,):
                place(member)
    return list(order)


def merged_costs(graph: fx.Graph, blocks: dict[fx.Node, int], costs: Costs) -> Callable[[fx.Node], float]:
    """The first collective of a kind in a block takes the time of all together, the others none."""
    together: dict[tuple[int, str], list[fx.Node]] = {}
    for node, block in blocks.items():
        together.setdefault((block, str(node.target)), []).append(node)
    seconds = {node.name: 0.0 for node in blocks}
    for members in together.values():
        seconds[members[0].name] = costs(members[0], sum(tensor_bytes(value_of(n.args[0])) for n in members))
    return lambda node: seconds[node.name] if node.name in seconds else costs(node)


def run(module: fx.GraphModule, shape: Shape, groups: Groups) -> tuple[float, float, float, float]:
    """Seconds as traced, by hand, by hand with merged blocks, and ours."""
    costs = costs_of(groups)
    blocks = blocks_of(module.graph, shape, groups)
    order = order_by_hand(module.graph, blocks)
    hand = reordered(module.graph, [node for node in order if node.op == "call_function"])
    names = tuple(node.name for node in order if start_of(node) is None)
    ours, _ = overlap(
        module,
        cost=remembered(module.graph, costs),
        groups=groups.ranks,
        options=OverlapOptions(orders=(names,)),
        donated=donated_of(module.graph),
    )
    return (
        judge(module.graph, costs).seconds,
        judge(hand, costs).seconds,
        judge(hand, merged_costs(module.graph, blocks, costs)).seconds,
        judge(ours.graph, costs).seconds,
    )


def rows(layers: int, directions: Sequence[Direction] = ("forward", "backward")) -> list[tuple[str, ...]]:
    table = []
    for name, sizes in (("FSDP 8", {"fsdp": 8, "tp": 1}), ("TP 8", {"fsdp": 1, "tp": 8})):
        shape = Shape(layers, BATCH, seq=SEQUENCE, **sizes)
        with world(shape) as groups:
            for direction, module in trace(shape, groups).items():
                if direction in directions:
                    seconds = run(module, shape, groups)
                    shown = [f"{s * 1e3:.2f}" for s in seconds]
                    case = f"{name}, {direction}, {layers} layers"
                    table.append((case, f"{len(module.graph.nodes):,}", *shown, f"{seconds[3] / seconds[1]:.3f}"))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=32)
    print(f"| {' | '.join(TITLES)} |\n{'|---' * len(TITLES)}|")
    for row in rows(parser.parse_args().layers):
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
