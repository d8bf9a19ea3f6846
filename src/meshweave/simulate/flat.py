"""What FSDP2 allocates for the collectives of a block: flat buffers, in the memory pools of its streams.

A gather writes into one buffer of a stream of its own, and parameters are copied out of it where compute waits for it.
In forward the buffer is kept until the next gather has been copied out, parameters of a block until all are done with.
A reduce-scatter's input is kept until the next one is issued; gradients come out in the memory of its stream
(torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py, torch 2.5 to 2.13).
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from itertools import pairwise

from torch import fx

from meshweave.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from meshweave.ir.graph import origin_of
from meshweave.ir.rank import RankGraph
from meshweave.simulate.clock import Times
from meshweave.simulate.lives import Key, Life
from meshweave.simulate.tasks import RoleTasks, Tasks

GATHER, REDUCE = ALL_GATHER.op, REDUCE_SCATTER.op


def hold_flat_buffers(
    tasks: Tasks,
    role_tasks: RoleTasks,
    times: Times,
    lives: MutableMapping[Key, Life],
    operands: MutableMapping[tuple[fx.Node, int], list[Key]],
) -> None:
    """Let what a role gathers and reduces over the axes that its parameters are stored over live as FSDP2 has it.

    `operands`: what each start reads. Nothing where the program is simulated with a collective per tensor.
    """
    axes = _parameter_axes(role_tasks.role)
    mine = [b for b in tasks.flat if b[0][0] in role_tasks.tasks and str(tasks.tasks[b[0][0]].node.args[-1]) in axes]
    by_target = {t: [b for b in mine if tasks.tasks[b[0][0]].node.target is t] for t in (GATHER, REDUCE)}
    gathers = sorted(by_target[GATHER], key=lambda b: min(times.starts[wait] for _, wait in b))
    for number, bucket in enumerate(gathers):
        following = gathers[number + 1] if number + 1 < len(gathers) else bucket
        nodes = [(tasks.tasks[start].node, tasks.tasks[start].microbatch) for start, _ in bucket]
        gathered = [lives[x.storage, mb] for node, mb in nodes for x in role_tasks.local.values[node]]
        phases = {origin_of(tasks.tasks[b[0][0]].node).phase for b in (bucket, following)}
        copied = min(times.ends[wait] for _, wait in (following if phases == {"forward"} else bucket))
        size, begin = sum(life.bytes for life in gathered), min(times.starts[start] for start, _ in bucket)
        lives[-1 - number, 0] = Life(nodes[0][0], size, "gathered", begin, copied, stream="gather")
        for life in gathered:
            life.begin, life.end = (
                min(times.starts[w] for _, w in bucket),
                max(life_of_gather.end for life_of_gather in gathered),
            )
    reductions = sorted(by_target[REDUCE], key=lambda b: min(times.starts[start] for start, _ in b))
    for bucket in reductions:
        for start, _ in bucket:
            for x in role_tasks.local.values[tasks.tasks[start].node]:
                lives[x.storage, tasks.tasks[start].microbatch].stream = "reduce"
    for bucket, following in pairwise(reductions):
        issued = min(times.starts[start] for start, _ in following)
        for key in (k for s, _ in bucket for k in operands[tasks.tasks[s].node, tasks.tasks[s].microbatch]):
            lives[key].end = max(lives[key].end, issued)


def _parameter_axes(role: RankGraph) -> frozenset[str]:
    """The groups over which parameters are gathered."""
    kinds = dict(zip((n for n in role.graph.nodes if n.op == "placeholder"), role.inputs, strict=True))

    def is_parameter(node: fx.Node) -> bool:
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return node in kinds and kinds[node].kind == "param"

    gathers: Sequence[fx.Node] = [n for n in role.graph.nodes if n.target is GATHER]
    return frozenset(str(n.args[-1]) for n in gathers if is_parameter(n.all_input_nodes[0]))
