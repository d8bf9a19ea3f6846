"""Compiled programs with one communication broken: dropped, doubled, moved, sent elsewhere or wired wrongly.

A mutant differs from its program in one place of one role. To break a communication on some devices only, a role is
split: the devices of both halves run the same graph, and one of the graphs is changed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations
from typing import Any

import torch
from torch import fx

from meshweave.ir import local_ops
from meshweave.ir.collectives import COLLECTIVES, STARTS, WAIT, functional
from meshweave.ir.rank import SYMBOLS, RankGraph, axis_index, linear, member_pieces, piece_offset, piece_size

aten = torch.ops.aten
Roles = tuple[RankGraph, ...]


@dataclass(frozen=True, slots=True)
class Mutant:
    """`roles` is the broken program; `kind` and `place` say what was done and where."""

    kind: str
    place: str
    roles: Roles

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}"


def copied(rank: RankGraph, devices: tuple[int, ...] | None = None) -> RankGraph:
    """The same rank graph with nodes of its own, for all its devices or some."""
    graph = fx.Graph()
    known: dict[fx.Node, fx.Node] = {}
    for node in rank.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
        known[node].meta = dict(node.meta)
    return replace(rank, graph=graph, devices=devices or rank.devices)


def split(roles: Roles, chance: random.Random) -> Roles:
    """The program with one role of several devices in two halves."""
    wide = [i for i, rank in enumerate(roles) if len(rank.devices) > 1]
    if not wide:
        return tuple(copied(rank) for rank in roles)
    at = chance.choice(wide)
    devices = roles[at].devices
    one = tuple(sorted(chance.sample(devices, chance.randrange(1, len(devices)))))
    rest = tuple(d for d in devices if d not in one)
    halves = (copied(roles[at], one), copied(roles[at], rest))
    return (*map(copied, roles[:at]), *halves, *map(copied, roles[at + 1 :]))


def _wait(start: fx.Node) -> fx.Node:
    (wait,) = start.users
    return wait


def _call(graph: fx.Graph, like: fx.Node, target: Any, args: Sequence[Any]) -> fx.Node:
    node = graph.call_function(target, tuple(args))
    node.meta = {"origin": like.meta["origin"]}
    return node


# Each breaks the communication that `start` begins; False where it cannot be broken so.


def _drop(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """Who waited for it takes what was handed in, under the name of the result or under its own."""
    wait, operand, at = _wait(start), start.args[0], _wait(start)
    if wait.users and not isinstance(operand, fx.Node):
        with rank.graph.inserting_after(wait):
            made = rank.transfers[start.args[1]]
            shape = made.target.local_shape(made.spec.shape)
            operand = _call(rank.graph, wait, aten.full.default, (list(shape), 0))
            operand.kwargs, at = {"dtype": made.spec.dtype}, operand
    if isinstance(operand, fx.Node):
        if chance.random() < 0.5:
            with rank.graph.inserting_after(at):
                operand = _call(rank.graph, wait, aten.contiguous.default, (operand,))
            operand.meta = dict(wait.meta)
        wait.replace_all_uses_with(operand)
    rank.graph.erase_node(wait)
    rank.graph.erase_node(start)
    return True


def _double(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """It runs again on its own result."""
    wait = _wait(start)
    users = list(wait.users)
    if not users:
        return False
    with rank.graph.inserting_after(wait):
        again = _call(rank.graph, start, start.target, (wait, *start.args[1:]))
    with rank.graph.inserting_after(again):
        second = _call(rank.graph, wait, WAIT, (again,))
    second.meta = dict(wait.meta)
    wait.meta.pop("global", None)
    for user in users:
        user.replace_input_with(wait, second)
    return True


def _repeat(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """It runs twice on the same operand, and the second result is used."""
    wait = _wait(start)
    with rank.graph.inserting_after(wait):
        again = _call(rank.graph, start, start.target, start.args)
    with rank.graph.inserting_after(again):
        second = _call(rank.graph, wait, WAIT, (again,))
    second.meta = dict(wait.meta)
    for user in [u for u in wait.users if u is not again]:
        user.replace_input_with(wait, second)
    return True


def _reorder(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """One of the communications that follow begins before this one."""
    order = {n: i for i, n in enumerate(rank.graph.nodes)}
    later = [n for n in rank.graph.nodes if n.target in STARTS and order[n] > order[start]][:4]
    chance.shuffle(later)
    for other in later:
        needed = _ancestors(other, lambda n: order[n] > order[start])
        if start in needed or _wait(start) in needed or any(n.target in STARTS for n in needed):
            continue
        for node in sorted({*needed, other}, key=order.__getitem__):
            start.prepend(node)
        return True
    return False


def _ancestors(node: fx.Node, inside: Callable[[fx.Node], bool]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    stack = [n for n in node.all_input_nodes if inside(n)]
    while stack:
        found.add(stack.pop())
        stack += [m for n in found for m in n.all_input_nodes if inside(m) and m not in {*found, *stack}]
    return found


def _wrong_group(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """It runs over other axes of its mesh; a size that it names is that of the new group."""
    if start.target not in COLLECTIVES:
        return False
    mesh, axes = rank.group_axes(start.args[-1])
    prefix = start.args[-1].split(",")[0].rpartition(axes[0])[0]
    names = [a for a in mesh.axis_names if mesh.size(a) > 1]
    sets = [c for n in range(1, len(names) + 1) for c in combinations(names, n) if set(c) != set(axes)]
    if not sets:
        return False
    other = chance.choice(sets)
    count = mesh.flat_size(other)
    args = [*start.args[:-1], ",".join(prefix + a for a in other)]
    if start.target in (functional.all_gather_into_tensor.default, functional.reduce_scatter_tensor.default):
        args[-2] = count
    elif start.target is functional.all_to_all_single.default:
        args[1] = args[2] = [args[1][0]] * count
    start.args = tuple(args)
    return True


def _wrong_op(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    if start.args[1] not in ("sum", "max", "min"):
        return False
    other = chance.choice([op for op in ("sum", "max", "min") if op != start.args[1]])
    start.args = (start.args[0], other, *start.args[2:])
    return True


def _wrong_operand(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """Another value of the same shape is handed in."""
    reader, value = start, start.args[0]
    while isinstance(value, fx.Node) and "spec" not in value.meta and value.args:
        reader, value = value, value.args[0]
    if not isinstance(value, fx.Node) or "spec" not in value.meta:
        return False
    like = [n for n in _before(rank.graph, reader) if n.meta.get("spec") == value.meta["spec"] and n is not value]
    if not like:
        return False
    reader.replace_input_with(value, chance.choice(like))
    return True


def _before(graph: fx.Graph, node: fx.Node) -> Iterator[fx.Node]:
    for other in graph.nodes:
        if other is node:
            return
        yield other


def _crossed(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """Who waited for it takes the result of another communication, of the same shape."""
    wait = _wait(start)
    order = {n: i for i, n in enumerate(rank.graph.nodes)}
    like = [
        n
        for n in rank.graph.nodes
        if n.target is WAIT and n is not wait and n.meta.get("spec") == wait.meta.get("spec") is not None
        and all(order[u] > order[n] for u in wait.users) and n.users
    ]  # fmt: skip
    if not like or not wait.users:
        return False
    other = chance.choice(like)
    for user in list(wait.users):
        user.replace_input_with(wait, other)
    return True


def _misplaced(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """A local step around it works along another dim, or cuts somewhere else."""
    near = [*_ancestors(start, lambda n: "global" not in n.meta and n.target not in SYMBOLS), *_chain(start)]
    steps = [n for n in near if n.target in (local_ops.join_blocks, local_ops.deal_blocks, aten.narrow.default)]
    if not steps:
        return False
    step = chance.choice(sorted(steps, key=lambda n: n.name))
    args = list(step.args)
    if step.target is aten.narrow.default:
        args[2] = 0 if isinstance(args[2], fx.Node) else args[2] + 1
    else:
        args[3] = 1 - args[3] if args[3] < 2 else 0
    step.args = tuple(args)
    return True


def _chain(start: fx.Node) -> list[fx.Node]:
    """What follows a communication up to the value that it is for."""
    found, node = [], _wait(start)
    while "global" not in node.meta and len(node.users) == 1:
        (node,) = node.users
        found.append(node)
    return found


# Arguments of steps that may be wrong, by position: a number, a tuple of numbers, an op, a group, a table or a symbol.
ARGUMENTS: dict[Any, tuple[int, ...]] = {
    local_ops.join_blocks: (1, 2, 3, 4),
    local_ops.deal_blocks: (1, 2, 3, 4, 5),
    local_ops.embed_part: (1, 2, 3, 4, 5),
    local_ops.keep_first: (1, 2),
    aten.constant_pad_nd.default: (1,),
    aten.narrow.default: (1, 2, 3),
    member_pieces: (0, 1, 2, 3, 4),
    piece_size: (0, 1, 2, 3),
    piece_offset: (0, 1, 2, 3),
    axis_index: (0, 1),
    linear: (0, 1),
    functional.all_gather_into_tensor.default: (1, 2),
    functional.reduce_scatter_tensor.default: (1, 2, 3),
    functional.all_reduce.default: (1, 2),
    functional.all_to_all_single.default: (1, 2, 3),
}


def _wrong_argument(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """One argument of a step of a move, or of a number that it depends on, is another."""
    nodes = [n for n in rank.graph.nodes if n.target in ARGUMENTS]
    if not nodes:
        return False
    node = chance.choice(nodes)
    position = chance.choice(ARGUMENTS[node.target])
    others = [n for n in _before(rank.graph, node) if n.target in SYMBOLS]
    given = node.args[position]
    made = _other(given, rank.mesh.axis_names, others, chance)
    node.update_arg(position, made)
    return bool(made != given)


def _other(given: Any, axes: Sequence[str], symbols: Sequence[fx.Node], chance: random.Random) -> Any:
    """Another argument of the same kind."""
    if isinstance(given, fx.Node):
        return chance.choice([0, 1, *symbols])
    if given is None:
        return chance.choice([given, *(n for n in symbols if n.target is member_pieces)])
    if given in ("sum", "max", "min"):
        return chance.choice(["sum", "max", "min"])
    if isinstance(given, str):
        some = [c for n in range(1, len(axes) + 1) for c in permutations(axes, n)]
        return ",".join(chance.choice(some)) if chance.random() < 0.5 or "," in given else chance.choice(axes)
    if isinstance(given, int):
        return given + chance.choice([-1, 1, 2])
    assert isinstance(given, (list, tuple))
    if chance.random() < 0.5:
        return type(given)(chance.sample(given, len(given)))
    at = chance.randrange(len(given))
    return type(given)([*given[:at], _other(given[at], axes, symbols, chance), *given[at + 1 :]])


def _wrong_transfer(rank: RankGraph, start: fx.Node, chance: random.Random) -> bool:
    """A transfer is over other axes, from or to other pieces."""
    if not rank.transfers:
        return False
    key = chance.choice(list(rank.transfers))
    made = rank.transfers[key]
    mesh = made.source.mesh
    sets = [c for n in range(len(mesh.axis_names) + 1) for c in combinations(mesh.axis_names, n)]
    moved = {
        "axes": lambda: chance.choice(sets),
        "source": lambda: replace(made.source, dims=tuple(chance.sample(made.source.dims, len(made.source.dims)))),
        "target": lambda: replace(made.target, dims=tuple(chance.sample(made.target.dims, len(made.target.dims)))),
    }
    name = chance.choice(list(moved))
    rank.transfers = {**rank.transfers, key: replace(made, **{name: moved[name]()})}
    return rank.transfers[key] != made


STEP_BREAKS = {"wrong argument": _wrong_argument, "wrong transfer": _wrong_transfer}
BREAKS: dict[str, Callable[[RankGraph, fx.Node, random.Random], bool]] = {
    "drop": _drop,
    "double": _double,
    "repeat": _repeat,
    "reorder": _reorder,
    "wrong group": _wrong_group,
    "wrong op": _wrong_op,
    "wrong operand": _wrong_operand,
    "crossed": _crossed,
    "misplaced": _misplaced,
}


def mutant(roles: Roles, kind: str, chance: random.Random) -> Mutant | None:
    """One seeded mutant of a kind, on all devices of a role or, in half of all cases, on a part of them."""
    broken = split(roles, chance) if chance.random() < 0.5 else tuple(copied(rank) for rank in roles)
    starts = [(i, n) for i, rank in enumerate(broken) for n in rank.graph.nodes if n.target in STARTS]
    for _ in range(8):
        at, start = chance.choice(starts)
        place = f"{start.name} of devices {broken[at].devices}"
        if (BREAKS | STEP_BREAKS)[kind](broken[at], start, chance):
            broken[at].graph.lint()
            return Mutant(kind, place, broken)
    return None


def mutants(roles: Roles, count: int, seed: int, breaks: Iterable[str] = BREAKS) -> Iterator[Mutant]:
    """`count` seeded mutants, every kind in turn as far as the program has what it breaks."""
    chance, kinds, made = random.Random(seed), list(breaks), 0
    while made < count and kinds:
        for kind in list(kinds):
            found = mutant(roles, kind, chance)
            if found is None:
                kinds.remove(kind)
            elif made < count:
                made += 1
                yield found
