"""Rank graphs run the plain way: every device by itself, on real tensors, meeting the others where they communicate.

What a device starts is matched by its number among the communications of the same group, as a process group does it; a
wait goes on when all members have started. No order of anything else is enforced.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.ir.collectives import STARTS, WAIT, functional, permute, transfer
from meshweave.ir.graph import map_nodes
from meshweave.ir.ops import KERNELS
from meshweave.ir.rank import SYMBOLS, RankGraph, bind_symbols

Outputs = dict[tuple[int, tuple[str, str]], Tensor]  # (device, output) -> piece


class Hang(Exception):
    """Devices wait for each other, or meet for different communications."""


def _reduce(parts: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack(list(parts))
    return {"sum": lambda: stacked.sum(0), "max": lambda: stacked.amax(0), "min": lambda: stacked.amin(0)}[op]()


def _exchange(target: Any, parts: list[Tensor], args: Sequence[Any], index: int) -> Tensor:
    """What member `index` of a group gets, from what all members hand in."""
    if target is functional.all_reduce.default:
        return _reduce(parts, args[0])
    if target is functional.all_gather_into_tensor.default:
        return torch.cat(parts)
    if target is permute:
        return parts[(index - args[0]) % len(parts) if isinstance(args[0], int) else list(args[0]).index(index)]
    rows = [part.unflatten(0, (len(parts), -1)) if part.numel() else part.new_zeros(0, *part.shape) for part in parts]
    if any(not part.numel() for part in parts):
        rows = [part.reshape(len(parts), part.shape[0] // len(parts), *part.shape[1:]) for part in parts]
    if target is functional.reduce_scatter_tensor.default:
        return _reduce([row[index] for row in rows], args[0])
    return torch.cat([row[index] for row in rows])


class _Meetings:
    """What has been started, and by whom."""

    def __init__(self) -> None:
        self.posted: dict[Any, dict[int, tuple[Any, ...]]] = {}
        self.counts: dict[Any, int] = {}

    def post(self, device: int, place: Any, content: tuple[Any, ...]) -> Any:
        number = self.counts.get((device, place), 0)
        self.counts[device, place] = number + 1
        self.posted.setdefault((place, number), {})[device] = content
        return place, number


def _started(rank: RankGraph, device: int, node: fx.Node, args: Sequence[Any], meetings: _Meetings) -> Any:
    if node.target is transfer:
        x, key = args
        return ("transfer", meetings.post(device, key, (x,)), key)
    members = rank.group_members(args[-1], device)
    mine = tuple(args[1:-1])
    return ("group", meetings.post(device, (members, args[-1]), (node.target, args[0], mine)), members)


def _finished(rank: RankGraph, device: int, started: Any, meetings: _Meetings) -> tuple[bool, Any]:
    kind, ticket, detail = started
    posted = meetings.posted[ticket]
    if kind == "transfer":
        made = rank.transfers[detail]
        if device not in made.target.mesh:
            return True, None
        messages = made.routes.received_by(device)
        if any(m.sender not in posted for m in messages):
            return False, None
        return True, _received(made, device, messages, posted)
    if any(d not in posted for d in detail):
        return False, None
    target, part, args = posted[device]
    if any((posted[d][0], posted[d][2], posted[d][1].shape) != (target, args, part.shape) for d in detail):
        raise Hang(f"members of {detail} meet for different communications")
    return True, _exchange(target, [posted[d][1] for d in detail], args, detail.index(device))


def _received(made: Any, device: int, messages: Sequence[Any], posted: dict[int, Any]) -> Tensor:
    shape = made.spec.shape
    box = made.target.pieces(shape)[device]
    sources = made.source.pieces(shape)
    out = torch.full(box.size, -77, dtype=made.spec.dtype)
    for m in messages:
        cut = [
            slice(o - b, o - b + s) for o, b, s in zip(m.box.offset, sources[m.sender].offset, m.box.size, strict=True)
        ]
        put = [slice(o - b, o - b + s) for o, b, s in zip(m.box.offset, box.offset, m.box.size, strict=True)]
        out[tuple(put)] = posted[m.sender][0][tuple(cut)]
    return out


def _device(rank: RankGraph, device: int, feeds: Sequence[Tensor], meetings: _Meetings, out: Outputs) -> Iterator[bool]:
    """Run one device; yields whether it has got on since the last time."""
    env: dict[fx.Node, Any] = dict(bind_symbols(rank.graph, rank.coordinates(device)))
    values, moved = iter(feeds), True
    for node in rank.graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
        elif node.op == "output":
            for key, value in zip(rank.outputs, node.args[0], strict=True):
                out[device, key] = env[value]
        elif node.target in SYMBOLS:
            continue
        elif node.target is WAIT:
            done, value = _finished(rank, device, env[node.args[0]], meetings)
            while not done:
                yield moved
                moved = False
                done, value = _finished(rank, device, env[node.args[0]], meetings)
            env[node], moved = value, True
        else:
            args, kwargs = map_nodes(node, env.__getitem__)
            if node.target in STARTS:
                env[node] = _started(rank, device, node, args, meetings)
            elif node.target is operator.getitem:
                env[node] = args[0][args[1]]
            else:
                env[node] = KERNELS.get(node.target, node.target)(*args, **kwargs)


def run_devices(roles: Sequence[RankGraph], full: dict[tuple[str, str], Tensor]) -> Outputs:
    """Run every device of every role on the pieces of the full inputs. Hang where they wait for ever."""
    meetings, out = _Meetings(), {}
    running = []
    for rank in roles:
        for device in rank.devices:
            boxes = [a.pieces(i.spec.shape)[device] for i, a in zip(rank.inputs, rank.layouts, strict=True)]
            feeds = [full[i.kind, i.name][b.slices()] for i, b in zip(rank.inputs, boxes, strict=True)]
            running.append(_device(rank, device, feeds, meetings, out))
    with torch.no_grad():
        while running:
            steps = [(process, next(process, None)) for process in running]
            running = [process for process, got_on in steps if got_on is not None]
            if running and len(running) == len(steps) and not any(got_on for _, got_on in steps):
                raise Hang(f"{len(running)} devices wait for ever")
    return out


def inputs_of(roles: Sequence[RankGraph], seed: int = 0) -> dict[tuple[str, str], Tensor]:
    """A full tensor for every input of any role: small random numbers, positive ones for optimizer state."""
    made = torch.Generator().manual_seed(seed)
    full: dict[tuple[str, str], Tensor] = {}
    for rank in roles:
        for item in rank.inputs:
            if (item.kind, item.name) in full:
                continue
            shape, dtype = item.spec.shape, item.spec.dtype
            if item.kind == "constant":
                value = rank.constants[item.name]
            elif item.kind == "scalar":
                value = torch.tensor({"draw": 2}.get(item.name, 0.25), dtype=dtype)
            elif dtype.is_floating_point:
                value = torch.rand(shape, generator=made, dtype=torch.float64).sub(0.0 if item.kind == "state" else 0.5)
                value = value.to(dtype)
            else:
                value = torch.randint(0, 7, shape, generator=made).to(dtype)
            full[item.kind, item.name] = value
    return full
