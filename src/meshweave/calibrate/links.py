"""Times communications as in a step: through the cluster's communicator, sums and copies included."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from meshweave.calibrate.ops import LEAST_ROUNDS, Effort, Peers, time_run, typical
from meshweave.cost.hardware.fitted import along
from meshweave.cost.hardware.volumes import bytes_received
from meshweave.ir.collectives import OURS, RECEIVED
from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import Transfer
from meshweave.runtime.process_groups import ClusterCommunicator, sends_from_gpu

_COLLECTIVES = {row.name: (row.op, row.sample) for row in OURS if row.sample}
OPS = tuple(RECEIVED)
MOST_SLOWDOWN = 20.0
_COVER = 1.5  # compute beside communications lasts so many times as long
_IN_FLIGHT_S = 0.02  # communications that are in flight at once beside compute, to be long against noise
_MOST_IN_FLIGHT = 16
_MOST_SLEEP_S = 0.5
_WIDTH = 16  # columns of the operands: collectives cut rows
# Links shaped by a token bucket (those of virtual machines, `tc tbf`) let so many bytes pass at once after a pause, and
# then their rate: 512 KiB took 2.75 ms on a link of 1 Gbit/s with a bucket of 256 KiB, but 4.4 in a step. A step keeps
# its link busy, so as many bytes precede the measurement; negligibly small messages need none.
_BUCKET_BYTES = 1 << 20
_LEAST_LED = 16 << 10


@dataclass(frozen=True, slots=True)
class MeasuredGroup:
    """A group to measure in: `mesh` flattened over `axes` has groups of `size` on links of `level`, all of which run at
    once."""

    level: str
    size: int
    mesh: Mesh
    axes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredLink:
    """`op` in groups of `group_size` takes `seconds` for a local input of `local_bytes`."""

    op: str
    level: str
    group_size: int
    local_bytes: int
    seconds: float
    host: float = 0.0  # share of the seconds that the caller spends on starting and finishing it

    @property
    def received(self) -> float:
        """Bytes per second that a device receives."""
        return bytes_received(self.op, self.group_size, self.local_bytes, "calibrate") / self.seconds


@dataclass(frozen=True, slots=True)
class Contention:
    """Beside a communication on links of `level` compute takes `slowdown` times as long, and of the processor a
    communication of any size takes `seconds` more."""

    level: str
    slowdown: float = 1.0
    seconds: float = 0.0


def places(num_ranks: int, per_node: int) -> list[MeasuredGroup]:
    """Groups of sizes that halve the node and the job: inside a node, and over nodes with a process of each. Ranks r *
    per_node to (r + 1) * per_node - 1 are on node r, as torchrun numbers them."""
    candidates = []
    size = per_node
    while size > 1:
        mesh = Mesh(outer=num_ranks // size, inner=size)
        candidates.append(MeasuredGroup("node", size, mesh, ("inner",)))
        size = size // 2 if size % 2 == 0 else 1
    size = num_ranks // per_node
    while size > 1:
        mesh = Mesh(outer=num_ranks // per_node // size, nodes=size, inner=per_node)
        candidates.append(MeasuredGroup("net", size, mesh, ("nodes",)))
        size = size // 2 if size % 2 == 0 else 1
    return candidates


class LinkTimer:
    """The communications of this rank. All ranks of the job construct it, and time the same things in the same
    order."""

    def __init__(self, mesh: Mesh, rank: int, device: torch.device, peers: Peers) -> None:
        self.rank, self.device, self.peers = rank, device, peers
        self.communicator = ClusterCommunicator(mesh, rank, device.type == "cuda")
        can_send = device.type == "cpu" or sends_from_gpu(str(dist.get_backend_config()))
        self.ops = OPS if can_send else tuple(op for op in OPS if op in _COLLECTIVES)

    def start(self, place: MeasuredGroup, op: str, local_bytes: int) -> Callable[[], Any]:
        """A function that begins `op` on an operand of about `local_bytes`, and returns the argument of `wait`."""
        if op not in _COLLECTIVES:
            return self._message(place, op, local_bytes)
        group = self.communicator.group(place.axes, place.mesh)
        rows = max(1, local_bytes // 4 // _WIDTH // place.size) * place.size
        operand = torch.ones((rows, _WIDTH), dtype=torch.float32, device=self.device)
        target, arguments = _COLLECTIVES[op]
        args = arguments(rows, place.size)
        return lambda: self.communicator.collect(target, group, operand, args)

    def _message(self, place: MeasuredGroup, op: str, local_bytes: int) -> Callable[[], Any]:
        """In each group, every member sends to the next (permute), or the first to the second (transfer)."""
        members = next(g for g in place.mesh.groups(place.axes) if self.rank in g)
        count = max(1, local_bytes // 4)
        if op == "transfer":
            source, target = (Layout.replicated(Mesh("", devices=[m]), 1) for m in members[:2])
            transfer_entry = Transfer(source, target, Spec((count,), torch.float32))
        else:
            source, target = (
                Layout.parse("[{d}]", Mesh(f"d={len(ids)}", devices=ids))
                for ids in (members, (*members[1:], members[0]))
            )
            transfer_entry = Transfer(source, target, Spec((count * len(members),), torch.float32))
        if self.rank not in (*transfer_entry.source.mesh.devices, *transfer_entry.target.mesh.devices):
            return lambda: None
        operand = (
            torch.ones(count, dtype=torch.float32, device=self.device)
            if self.rank in transfer_entry.source.mesh
            else None
        )
        return lambda: self.communicator.transfer(transfer_entry, operand, 0)

    def wait(self, started: Any) -> Tensor | None:
        return self.communicator.wait(started)

    def close(self) -> None:
        """Release NCCL's memory for the groups. All ranks call it together."""
        if self.communicator.is_native:
            self.communicator.destroy_groups()

    def sample(self, start: Callable[[], Any], repeats: int, lead: int = 0) -> float:
        """Wall time of a communication, the mean of `repeats` successive ones after `lead` others."""

        def run(count: int) -> None:
            for _ in range(count):
                self.wait(start())
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)

        self.peers.meet()
        run(lead)
        return time_run(partial(run, repeats), repeats)

    def host_seconds(self, start: Callable[[], Any], seconds: float) -> float:
        """The caller's time in a communication: starting it, and finishing it when the bytes have arrived."""
        self.peers.meet()
        began = time.perf_counter()
        started = start()
        posted = time.perf_counter()
        time.sleep(min(_MOST_SLEEP_S, 3 * seconds + 1e-3))
        resumed = time.perf_counter()
        self.wait(started)
        return posted - began + time.perf_counter() - resumed


def lead_of(received: int) -> int:
    """How many communications, each of which gives a device so many bytes, run before the measurement."""
    return math.ceil(_BUCKET_BYTES / received) if received >= _LEAST_LED else 0


def local_bytes_of(op: str, size: int, received: int) -> int:
    """Local input at which a device receives about `received` bytes: ops are measured at equal loads of links."""
    return max(64 * size, round(received / bytes_received(op, size, 1.0, "calibrate")))


# place, op, size, the call, communications before it, repeats, rounds
_Case = tuple[MeasuredGroup, str, int, Callable[[], Any], int, int, int]


def time_links(
    links: LinkTimer, link_places: Sequence[MeasuredGroup], sizes: Sequence[int], effort: Effort
) -> list[MeasuredLink]:
    """Typical seconds of every op in every place where a device receives about so many bytes, to their end on the
    device; sizes that would take too long are omitted. The slowest rank counts."""
    began = time.perf_counter()
    on_gpu = links.device.type == "cuda"  # there the caller only enqueues
    cases: list[_Case] = []
    for place in link_places:
        for op in links.ops:
            curve: list[tuple[float, float]] = []
            largest, is_late = sizes[-1], False
            for received, following in zip(sizes, [*sizes[1:], math.inf], strict=True):
                if is_late and received < largest:
                    continue  # the largest tells the rate: start-up may dominate all before it
                size = local_bytes_of(op, place.size, received)
                start = links.start(place, op, size)
                began += links.sample(start, 1)  # which also sets connections up
                lead = 0 if on_gpu else lead_of(received)
                first, elapsed = links.peers.most(
                    [min(links.sample(start, 1, lead) for _ in range(2)), time.perf_counter() - began]
                )
                repeats = max(1, min(effort.max_repeats, round(effort.block_seconds / first)))
                rounds = max(LEAST_ROUNDS, min(effort.rounds, round(effort.case_seconds / (first * repeats))))
                cases.append((place, op, size, start, lead, repeats, rounds))
                curve.append((received, first))
                is_late = elapsed > effort.most_seconds and len(curve) > 1
                expected = along(curve, largest if is_late else following) if len(curve) > 1 else first
                if LEAST_ROUNDS * expected > effort.case_seconds:
                    break
    return _time_cases(links, cases, effort, began)


def _time_cases(links: LinkTimer, cases: Sequence[_Case], effort: Effort, began: float) -> list[MeasuredLink]:
    """All cases in turn, as often as time allows."""
    on_gpu = links.device.type == "cuda"
    samples: list[list[float]] = [[] for _ in cases]
    for turn in effort.turns(max((case[-1] for case in cases), default=0), began, links.peers):
        for case, sample in zip(cases, samples, strict=True):
            if turn < case[-1]:
                start, lead, repeats = case[3:6]
                sample.append(links.sample(start, repeats, lead))
    middle = median if on_gpu else typical  # a device of its own has no other load: what is far out is a start-up
    seconds = links.peers.most([middle(sample) for sample in samples])
    host = links.peers.mean(
        [
            0.0 if on_gpu else median(links.host_seconds(case[3], total) for _ in range(effort.host_rounds))
            for case, total in zip(cases, seconds, strict=True)
        ]
    )
    return [
        MeasuredLink(
            op=op,
            level=place.level,
            group_size=place.size,
            local_bytes=size,
            seconds=total,
            host=min(1.0, own / total),
        )
        for (place, op, size, *_), total, own in zip(cases, seconds, host, strict=True)
    ]


def contention(
    links: LinkTimer, place: MeasuredGroup, compute: Callable[[], Any], effort: Effort, received: tuple[int, int]
) -> Contention:
    """What communications cost the compute beside them, from small and from large ones, of so many bytes received.

    Such that a model in which communication keeps its own duration has the right total: compute that takes C alone and
    T beside communications that take D alone has lost T - C. Of this a communication takes a fixed time, what its
    caller spends on its bytes, and a share of its duration, so that compute runs at 1 - share of its rate. `compute` is
    a small part of it. The factor is at most MOST_SLOWDOWN: if communication takes the whole processor, it would be
    unbounded.
    """
    small, large = (_lost(links, place, compute, effort, size) for size in received)
    longer = large.seconds - small.seconds
    share = (large.lost - small.lost - (large.host - small.host)) / longer if longer > 0 else large.lost / large.seconds
    share = min(1 - 1 / MOST_SLOWDOWN, max(0.0, share))
    on_gpu = links.device.type == "cuda"  # there the caller only enqueues
    own = 0.0 if on_gpu else max(0.0, small.lost - share * small.seconds)
    return Contention(place.level, 1.0 / (1.0 - share), own)


class _Lost(NamedTuple):
    """Of a communication: seconds of compute that it costs, its own, and those of its caller."""

    lost: float
    seconds: float
    host: float


def _lost(links: LinkTimer, place: MeasuredGroup, compute: Callable[[], Any], effort: Effort, received: int) -> _Lost:
    """Measured with several in flight at once. Compute alone and beside them take turns and are compared in pairs, as
    machines change their speed."""
    start = links.start(place, "all_gather", local_bytes_of("all_gather", place.size, received))
    part, first = (
        min(links.peers.most([_time_beside(links, run, ()) for _ in range(3)]))
        for run in (compute, lambda: links.wait(start()))
    )
    starts = [start] * max(1, min(_MOST_IN_FLIGHT, round(_IN_FLIGHT_S / first)))
    whole = min(links.peers.most([_time_beside(links, lambda: None, starts) for _ in range(2)]))
    count = max(1, round(_COVER * whole / part))

    def all_parts() -> None:
        for _ in range(count):
            compute()

    lost, alone = [], []
    for _ in range(effort.rounds):
        alone.append(_time_beside(links, lambda: None, starts))
        before = _time_beside(links, all_parts, ())
        beside = _time_beside(links, all_parts, starts)
        lost.append(beside - (before + _time_beside(links, all_parts, ())) / 2)
    host = median(links.host_seconds(start, first) for _ in range(LEAST_ROUNDS))
    slower, seconds, spent = links.peers.mean([median(lost), typical(alone), host])
    return _Lost(max(0.0, slower) / len(starts), seconds / len(starts), spent)


def _time_beside(links: LinkTimer, compute: Callable[[], Any], starts: Sequence[Callable[[], Any]]) -> float:
    """Wall time of compute with communications begun before it and waited for after it."""
    links.peers.meet()
    began = time.perf_counter()
    started = [start() for start in starts]
    compute()
    for handle in started:
        links.wait(handle)
    if links.device.type == "cuda":
        torch.cuda.synchronize(links.device)
    return time.perf_counter() - began
