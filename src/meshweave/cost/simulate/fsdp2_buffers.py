"""What FSDP2 allocates for the collectives of a block: flat buffers, in the memory pools of its streams.

A gather writes into a buffer of its own stream, and parameters are copied out of it where compute waits for it. In
forward the buffer is kept until the next gather has been copied out, parameters of a block until their last use in the
block. A reduce-scatter's input is kept until the next is issued; gradients are allocated in the memory of its
stream (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py and _fsdp_param_group.py, torch 2.5 to 2.13). The
parameters that `fully_shard` of the whole model leaves to its root (embedding, last norm and head, if only blocks are
wrapped) form a group, `blocks+root`: gathered together before forward, never resharded after it (`_lazy_init` of
_fsdp_state.py), their gradients reduced together after backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import fx

from meshweave.cost.simulate.clock import Times
from meshweave.cost.simulate.storage_intervals import Key, Life
from meshweave.cost.simulate.tasks import RoleTasks, Tasks
from meshweave.ir.collectives import ALL_GATHER, REDUCE_SCATTER
from meshweave.ir.graph import block_name, origin_of
from meshweave.ir.rank import RankGraph
from meshweave.ir.traits import CASTS

GATHER, REDUCE = ALL_GATHER.op, REDUCE_SCATTER.op


@dataclass(frozen=True, slots=True)
class Flat:
    """Collectives on a flat buffer: what they read and write, when they are issued, when compute first waits."""

    node: fx.Node
    operands: tuple[Key, ...]
    results: tuple[Key, ...]
    issued: float
    waited: float

    @property
    def phase(self) -> str:
        return origin_of(self.node).phase

    @property
    def microbatch(self) -> int:
        return self.results[0][1]


def hold_flat_buffers(
    tasks: Tasks,
    role_tasks: RoleTasks,
    times: Times,
    lives: MutableMapping[Key, Life],
    operands: Mapping[tuple[fx.Node, int], Sequence[Key]],
) -> None:
    """Give the tensors that a role gathers and reduces over its parameters' storage axes the lifetimes of FSDP2.
    `operands`: what each start reads. No effect if the program is simulated with a collective per tensor."""
    axes = _parameter_axes(role_tasks.role)
    flats = [
        _flat(tasks, role_tasks, times, bucket, operands)
        for bucket in tasks.flat
        if bucket[0][0] in role_tasks.tasks and str(tasks.tasks[bucket[0][0]].node.args[-1]) in axes
    ]
    if tasks.has_root_group:
        microbatches = sorted({f.microbatch for f in flats})
        flats = [f for number in microbatches for f in _with_root_group(flats, number, role_tasks, lives)]
    _hold_gathers(sorted((f for f in flats if f.node.target is GATHER), key=lambda f: f.waited), lives)
    _hold_reductions(sorted((f for f in flats if f.node.target is REDUCE), key=lambda f: f.issued), lives)


def _flat(
    tasks: Tasks,
    role_tasks: RoleTasks,
    times: Times,
    bucket: Sequence[tuple[int, int]],
    operands: Mapping[tuple[fx.Node, int], Sequence[Key]],
) -> Flat:
    """The bucket of starts and waits, which are task numbers."""
    starts = [tasks.tasks[start] for start, _ in bucket]
    read = [key for task in starts for key in operands[task.node, task.microbatch]]
    written = [(x.storage, task.microbatch) for task in starts for x in role_tasks.local.values[task.node]]
    issued = min(times.starts[start] for start, _ in bucket)
    return Flat(starts[0].node, tuple(read), tuple(written), issued, min(times.starts[wait] for _, wait in bucket))


def _with_root_group(
    flats: Sequence[Flat], microbatch: int, role_tasks: RoleTasks, lives: Mapping[Key, Life]
) -> Iterator[Flat]:
    """Those of a microbatch, with everything outside of blocks as a group: parameters live from the first gather until
    gradients are reduced, together with the last of them. Until then gradients are in their own dtype."""
    own = [f for f in flats if f.microbatch == microbatch]
    end = max((f.issued for f in own if f.node.target is REDUCE), default=0.0)
    of_root = [f for f in own if not block_name(origin_of(f.node))]
    gathers = [f for f in of_root if f.node.target is GATHER and f.phase != "backward"]
    reductions = [f for f in of_root if f.node.target is REDUCE]
    yield from (f for f in own if f not in gathers and f not in reductions)
    if gathers:
        yield _join(gathers, min(f.issued for f in gathers))
    if reductions:
        yield _join(reductions, end)
    for key in (key for f in gathers for key in f.results):
        lives[key].end = max(lives[key].end, end)
    done = max((f.waited for f in reductions), default=end)
    for key in (key for f in reductions for key in f.operands):
        node = lives[key].node
        sources = node.all_input_nodes if node.target in CASTS else []
        for source in ((x.storage, key[1]) for n in sources for x in role_tasks.local.values[n]):
            lives[source].end = max(lives[source].end, end)
        lives[key].begin = end if sources else lives[key].begin
        lives[key].end = max(lives[key].end, done)


def _join(flats: Sequence[Flat], issued: float) -> Flat:
    operands = tuple(key for f in flats for key in f.operands)
    results = tuple(key for f in flats for key in f.results)
    return Flat(flats[0].node, operands, results, issued, min(f.waited for f in flats))


def _hold_gathers(gathers: Sequence[Flat], lives: MutableMapping[Key, Life]) -> None:
    for number, flat in enumerate(gathers):
        following = gathers[number + 1] if number + 1 < len(gathers) else flat
        results = [lives[key] for key in flat.results]
        is_forward = flat.phase == following.phase == "forward"
        copied = following.waited if is_forward else flat.waited
        size = sum(life.bytes for life in results)
        lives[-1 - number, 0] = Life(flat.node, size, "gathered", flat.issued, copied, stream="gather")
        for life in results:
            life.begin, life.end = flat.waited, max(other.end for other in results)


def _hold_reductions(reductions: Sequence[Flat], lives: Mapping[Key, Life]) -> None:
    for flat in reductions:
        for key in flat.results:
            lives[key].stream = "reduce"
    for flat, following in pairwise(reductions):
        for key in flat.operands:
            lives[key].end = max(lives[key].end, following.issued)


def _parameter_axes(role: RankGraph) -> frozenset[str]:
    """The groups over which parameters are gathered."""
    kinds = role.sources

    def is_parameter(node: fx.Node) -> bool:
        while node.op == "call_function" and len(node.all_input_nodes) == 1:
            (node,) = node.all_input_nodes
        return node in kinds and kinds[node].kind == "param"

    gathers: Sequence[fx.Node] = [n for n in role.graph.nodes if n.target is GATHER]
    return frozenset(str(n.args[-1]) for n in gathers if is_parameter(n.all_input_nodes[0]))
