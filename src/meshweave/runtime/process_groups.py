"""Collectives of a rank over process groups of torch.distributed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from meshweave.errors import StepError
from meshweave.interop.gloo import break_connections
from meshweave.interop.process_groups import default_group
from meshweave.interop.storages import is_unshared
from meshweave.ir.collectives import (
    ALL_REDUCE,
    COLLECTIVES,
    destinations,
    permute,
    reduce_in_order,
    transfer,
)
from meshweave.ir.graph import PARTS, op_name, origin_of
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph, Transfer
from meshweave.runtime.collectives import MOVED, NATIVE, Group, Pending, native_all_reduce_in_place
from meshweave.runtime.coordinator import names_of_ranks
from meshweave.runtime.local import piece_of, receive
from meshweave.runtime.messages import NUM_TAGS, Messages, bytes_of, dense
from meshweave.runtime.transfer_threads import TransferThreads, wait_all
from meshweave.runtime.watch import POLL, ConnectionLost

if TYPE_CHECKING:
    from meshweave.runtime.interfaces import Observer

# A live peer that is silent for so long counts as stuck. Dead peers are detected sooner (see watch.py). torch's own
# default for Gloo is 30 minutes.
TIMEOUT = timedelta(minutes=5)
_OVERDUE = 0.9  # of TIMEOUT: NCCL's own watchdog ends the process after all of it, without a cause
_RELEASED = 2.0  # seconds in which threads end once their connections are broken
# Up to this size a single round that gathers every operand beats two rounds (exchange, then gather): on Gloo, 4
# processes on 2 shared cores, torch 2.13, 2026-11, `all_reduce` of float32, minimum of 4 runs: 64 B 4.4 ms in one round
# (native 6.0), 32 KiB 8.8 ms in two (a gather 3.9, native 7.7), 512 KiB 8.6 ms in two (a gather 6.5, native 5.0).
ONE_ROUND_BYTES = 1 << 20


def sends_from_gpu(config: str) -> bool:
    """Whether the backend of CUDA tensors can send them, given torch's text of the backends of a job."""
    return "cuda:gloo" not in config


def check_sends_from_gpu(config: str) -> None:
    """StepError if the backend of CUDA tensors cannot send them."""
    if not sends_from_gpu(config):
        raise StepError(
            "Gloo cannot send from the memory of a GPU, as stages (pp), rings (cp) and decomposed collectives do",
            got=f"backends {config}",
            expected="NCCL for CUDA",
            hint='dist.init_process_group("nccl"), or device="cpu"; dp, fsdp and tp run over Gloo, too',
        )


@dataclass(frozen=True, slots=True)
class LogEntry:
    """A communication that `start` has begun for a microbatch, with the bytes of its operand; or, with None, its wait.
    Its starts are waited for in order, in a pipeline after starts for later microbatches."""

    start: fx.Node
    num_bytes: int | None = None
    microbatch: int = 0


@dataclass(slots=True)
class ClusterCommunicator:
    """Collectives of a rank over process groups, and its part in transfers.

    On CPU (Gloo) only bytes are moved, and reductions are local, in group order: so every dtype works and the bits
    equal those of virtual devices in one process. On CUDA (NCCL) the library reduces.
    """

    mesh: Mesh
    rank: int
    is_native: bool
    check: Callable[[], None] = lambda: None
    recorder: Observer | None = None
    stream: torch.cuda.Stream | None = None  # of the GPU that computes
    microbatch: int = 0  # of what is started next
    is_pipeline: bool = False  # sends between stages are not waited for with their communication
    num_started: int = 0
    num_waited: int = 0
    log: list[LogEntry] = field(default_factory=list)  # of the program in this call, in order
    open: set[Pending] = field(default_factory=set)
    is_waiting: bool = False  # for messages of others
    _groups: dict[tuple[Mesh, tuple[str, ...]], Group] = field(default_factory=dict)
    _process_groups: dict[tuple[int, ...], dist.ProcessGroup] = field(default_factory=dict)
    _edges: dict[tuple[tuple[int, ...], tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)
    _sent: list[tuple[tuple[Any, ...], tuple[Tensor, ...]]] = field(default_factory=list)  # works with their buffers
    _messages: dict[dist.ProcessGroup, Messages] = field(default_factory=dict)
    _threads: TransferThreads = field(default_factory=TransferThreads)
    _graph: RankGraph | None = None  # of `log`

    def prepare(self, roles: Sequence[RankGraph], is_pipeline: bool = False) -> None:
        """Create the process groups of every collective of every role. In a pipeline over NCCL the transfers of each
        directed edge between stages get a group of their own, or a send that waits for its receiver would hold up what
        the other direction sends. All ranks of the world call it together."""
        used = {
            str(node.args[-1]): rank
            for rank in roles
            for node in rank.graph.nodes
            if node.op == "call_function" and node.target in COLLECTIVES
        }
        for name in sorted(used):
            mesh, axes = used[name].group_axes(name)
            self.group(axes, mesh)
        self.is_pipeline = self.is_pipeline or is_pipeline
        entries = [entry for rank in roles for entry in rank.transfers.values() if is_pipeline and self.is_native]
        for edge in sorted({(each.source.mesh.devices, each.target.mesh.devices) for each in entries}):
            if edge not in self._edges:
                members = sorted({*edge[0], *edge[1]})
                self._edges[edge] = dist.new_group(members, timeout=TIMEOUT, group_desc="stages")

    def group(self, axes: tuple[str, ...], mesh: Mesh | None = None) -> Group:
        """The group of `axes` of a mesh (without a mesh: the world's). Created on first use, by all ranks of the world
        together, including those outside the mesh."""
        key = (mesh or self.mesh, axes)
        if key not in self._groups:
            self._groups[key] = self._make(*key)
        return self._groups[key]

    def _make(self, mesh: Mesh, axes: tuple[str, ...]) -> Group:
        groups = mesh.groups(axes)
        # Every rank calls new_group for every group, in the same order: torch names groups by counting the calls.
        for ranks in sorted(tuple(sorted(g)) for g in groups if len(g) > 1):
            if ranks not in self._process_groups:
                self._process_groups[ranks] = dist.new_group(list(ranks), timeout=TIMEOUT, group_desc=",".join(axes))
        members = next((g for g in groups if self.rank in g), (self.rank,))
        ranks = tuple(sorted(members))
        order = tuple(ranks.index(r) for r in members)
        process_group = self._process_groups.get(ranks)
        if process_group is None or self.is_native:
            return Group(process_group, order, ranks == members)
        messages = self._messages.setdefault(process_group, Messages(process_group, self._threads))
        return Group(process_group, order, ranks == members, messages)

    def start(self, graph: RankGraph, node: fx.Node, operand: Any, args: Sequence[Any], is_owned: bool = False) -> Any:
        """Begin the communication of a node of a rank graph; `args` are those of the node without the operand. Nobody
        else reads an owned operand, so its memory may be written."""
        self._graph = graph
        self.log.append(LogEntry(node, 0 if operand is None else operand.nbytes, self.microbatch))
        op, (*rest, name) = node.target, args
        if op is transfer:
            return self.transfer(graph.transfers[name], operand, int(name[1:]) + self.microbatch * NUM_TAGS)
        mesh, axes = graph.group_axes(name)
        if op is permute:
            return self.permute(self.group(axes, mesh), operand, rest[0])
        return self.collect(op, self.group(axes, mesh), operand, rest, is_owned)

    def collect(self, op: Any, group: Group, operand: Tensor, args: Sequence[Any], is_owned: bool = False) -> Any:
        """Begin a collective. Its value is a `Pending` until waited for, or the operand in a group of one member."""
        self.num_started += 1
        if group.process_group is None:
            return operand
        self.check()
        x = dense(operand)
        is_free = op is ALL_REDUCE.op and (is_owned or x is not operand) and is_unshared(x)
        if self._is_long(op, group, x):
            return self._begin(lambda: self._two_rounds(group, x, args, is_free))
        begin = (NATIVE if self.is_native else MOVED)[op]
        if is_free and self.is_native:
            begin = native_all_reduce_in_place
        return self._begin(lambda: begin(group, x, args))

    def _is_long(self, op: Any, group: Group, x: Tensor) -> bool:
        """Whether an all-reduce takes two rounds; a small operand is gathered."""
        return op is ALL_REDUCE.op and not self.is_native and x.nbytes * group.size > ONE_ROUND_BYTES

    def _two_rounds(self, group: Group, x: Tensor, args: Sequence[Any], is_owned: bool) -> Pending:
        """An all-reduce: blocks are exchanged, each is reduced by its owner and sent to all others, by a thread as soon
        as possible. It uses messages, because all members must begin a group's collectives in the same order. An owned
        operand becomes the result."""
        messages, own = group.messages, group.own
        assert messages is not None
        flat = x.view(-1)
        blocks = flat.tensor_split(group.size)
        whole = flat if is_owned else torch.empty_like(flat)
        results = whole.tensor_split(group.size)
        free = min(group.others)  # 0 or 1: its part may be overwritten, and may arrive in the memory of a new result
        received = {i: torch.empty_like(blocks[own]) for i in group.others if is_owned or i != free}
        received.setdefault(free, results[own])
        first = group.begin(list(received.items()), [(i, blocks[i]) for i in group.others])
        tag = messages.tag()

        def reduce_own() -> None:
            wait_all(first)
            parts = [received.pop(i, blocks[own]) for i in range(group.size)]
            into = parts[free] if is_owned and own > 1 else results[own]
            results[own].copy_(reduce_in_order(parts, args[0], into))  # nothing to copy if they are the same

        def second() -> None:
            reduce_own()
            others = [(i, group.order[i]) for i in group.others]
            wait_all(messages.post(tag, [(r, results[i]) for i, r in others], [(r, results[own]) for _, r in others]))

        return Pending((self._threads.run(second),), (x, whole), lambda: whole.view(x.shape))

    def transfer(self, entry: Transfer, operand: Tensor | None, tag: int) -> Any:
        """Begin this rank's part of a transfer: it sends from its piece of the source what others need, and receives
        what it lacks of its piece of the target. Every receive is posted before anything is waited for."""
        self.num_started += 1
        self.check()
        return self._begin(lambda: self._send(entry, operand, tag))

    def _send(self, entry: Transfer, operand: Tensor | None, tag: int) -> Pending:
        routes, shape = entry.routes, entry.spec.shape
        sent = [m for m in routes.sent_by(self.rank) if m.receiver != self.rank]
        received = routes.received_by(self.rank)
        posted: list[tuple[Callable[..., Any], Tensor, int]] = []
        device = torch.device("cuda", torch.cuda.current_device()) if self.is_native else torch.device("cpu")
        parts: dict[int, list[Tensor]] = {self.rank: []}
        for message in received:
            if message.sender != self.rank:
                part = torch.empty(message.box.size, dtype=entry.spec.dtype, device=device)
                posted.append((dist.irecv, bytes_of(part), message.sender))
                parts.setdefault(message.sender, []).append(part)
        buffers: list[Tensor] = []
        for message in sent:
            assert operand is not None
            buffers.append(dense(operand[piece_of(message.box, entry.source.box_of(shape, self.rank))]))
        sends = [(dist.isend, bytes_of(x), m.receiver) for x, m in zip(buffers, sent, strict=True)]
        if not self.is_pipeline:
            posted, sends = posted + sends, []
        works = self._posted(entry, posted, tag, 0 if self.is_pipeline else sum(x.nbytes for x in buffers))
        if sends:
            self._sent.append((self._posted(entry, sends, tag, sum(x.nbytes for x in buffers)), tuple(buffers)))

        def finish() -> Tensor | None:
            if self.rank not in entry.target.mesh:
                return None
            remaining = {sender: iter(own_parts) for sender, own_parts in parts.items()}
            part = lambda message: next(remaining[message.sender])  # noqa: E731
            return receive(entry, self.rank, received, operand, part, device, is_fresh=True)

        return Pending(works, (*buffers, *(part for own_parts in parts.values() for part in own_parts)), finish)

    def _posted(
        self, entry: Transfer, calls: Sequence[tuple[Callable[..., Any], Tensor, int]], tag: int, num_bytes: int
    ) -> tuple[Any, ...]:
        """The works of sends and receives of a transfer, which are started here; `num_bytes` are sent."""
        if not calls:
            return ()
        if self.is_native:
            check_sends_from_gpu(str(dist.get_backend_config()))
            group = self._edges.get((entry.source.mesh.devices, entry.target.mesh.devices))
            posts = [dist.P2POp(call, part, peer, group) for call, part, peer in calls]
            return tuple(dist.batch_isend_irecv(posts))
        post = lambda: [call(part, peer, tag=tag) for call, part, peer in calls]  # noqa: E731
        return (self._threads.add(post, num_bytes),)

    def permute(self, group: Group, operand: Tensor, to: int | Sequence[int]) -> Any:
        """Begin a permute in this rank's group, of operands of the same shape. The receive is posted before the send;
        what a rank sends to itself stays there. Raises MeshweaveError if it is not a permutation."""
        self.num_started += 1
        receivers = destinations(to, group.size)
        if group.process_group is None:
            return operand
        self.check()
        return self._begin(lambda: self._pass_on(group, dense(operand), receivers))

    def _pass_on(self, group: Group, x: Tensor, receivers: tuple[int, ...]) -> Pending:
        own = group.own
        if receivers[own] == own:
            if group.messages is not None:
                group.messages.tag()  # as on the ranks that send
            return Pending((), (x,), lambda: x)
        out, source = torch.empty_like(x), receivers.index(own)
        if group.messages is not None:
            return Pending(group.begin([(source, out)], [(receivers[own], x)]), (x, out), lambda: out)
        check_sends_from_gpu(str(dist.get_backend_config()))
        ends = [(dist.irecv, out, source), (dist.isend, x, receivers[own])]
        posts = [
            dist.P2POp(call, bytes_of(part), None, group.process_group, 0, group.order[peer])
            for call, part, peer in ends
            if part.numel()
        ]
        works: tuple[Any, ...] = tuple(dist.batch_isend_irecv(posts)) if posts else ()
        return Pending(works, (x, out), lambda: out)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """The value of `x` on rank `source`, on every rank of the world, in place."""
        self.num_started += 1
        self.check()
        x = dense(x)
        work = lambda: dist.broadcast(bytes_of(x), source, async_op=True)  # noqa: E731
        return self.wait(self._begin(lambda: Pending((work(),), (x,), lambda: x)))

    def wait(self, started: Any, node: fx.Node | None = None) -> Any:
        """The finished value of a start, which `node` of a rank graph has begun. Raises StepError, within seconds, when
        a peer has failed."""
        if node is not None:
            self.log.append(LogEntry(node))
        return self._finish(started) if isinstance(started, Pending) else started

    def finish_sends(self, waits: bool) -> None:
        """Release what other stages have received; or wait until they have received all."""
        waiting = []
        for works, buffers in self._sent:
            if waits:
                for work in works:
                    self._await(work)
            elif not all(work.is_completed() for work in works):
                waiting.append((works, buffers))
        self._sent = waiting

    def drain(self) -> None:
        """Wait for everything that was started."""
        self.finish_sends(True)
        for pending in list(self.open):
            self.wait(pending)

    # what an error says of the program

    def place(self) -> str:
        """The communication that the program has started or waited for last: op, bytes, group, line of the model."""
        if not self.log:
            return ""
        last = self.log[-1]
        if last.num_bytes is None:
            own = [entry for entry in self.log if entry.start is last.start]
            num_waits = sum(entry.num_bytes is None for entry in own)
            last = [entry for entry in own if entry.num_bytes is not None][num_waits - 1]
        return self._described(last)

    def num_begun(self) -> Counter[str]:
        """How many communications this rank has begun in this call, by channel."""
        return Counter(self._channel(entry.start) for entry in list(self.log) if entry.num_bytes is not None)

    def missed(self, late: Mapping[str, tuple[int, Sequence[int]]]) -> str:
        """The first communication that this rank has begun and others have not. `late`: by channel, how many all of its
        ranks have begun, and which ranks have begun no more."""
        seen = Counter[str]()
        for entry in self.log if late else ():
            if entry.num_bytes is None:
                continue
            channel = self._channel(entry.start)
            if channel in late and seen[channel] == late[channel][0]:
                return f"{names_of_ranks(late[channel][1])} did not come to {self._described(entry)}"
            seen[channel] += 1
        return ""

    def _channel(self, start: fx.Node) -> str:
        """A name that the ranks of a group, or of both ends of a transfer, have in common, which ends with them."""
        return f"{start.args[-1]} of ranks {','.join(map(str, self._ranks(start)))}"

    def _ranks(self, start: fx.Node) -> list[int]:
        assert self._graph is not None
        name = str(start.args[-1])
        if start.target is not transfer:
            return sorted(self._graph.group_members(name, self.rank))
        entry = self._graph.transfers[name]
        return sorted({*entry.source.mesh.devices, *entry.target.mesh.devices})

    def _described(self, entry: LogEntry) -> str:
        start, origin, action = entry.start, origin_of(entry.start), ""
        if self.is_pipeline and PARTS[origin.phase] < PARTS["update"]:
            action = f" in {origin.phase} of microbatch {entry.microbatch} of stage {origin.stage}"
        num_bytes = self._bytes_of_transfer(start) if start.target is transfer else entry.num_bytes
        op, ranks = op_name(start.target).rpartition(".")[2], names_of_ranks(self._ranks(start))
        return f"{op} of {num_bytes:,} bytes over {start.args[-1]} of {ranks}{action} for {origin}"

    def _bytes_of_transfer(self, start: fx.Node) -> int:
        """What this rank receives in a transfer, else what it sends."""
        assert self._graph is not None
        entry = self._graph.transfers[str(start.args[-1])]
        received, sent = entry.routes.received_by(self.rank), entry.routes.sent_by(self.rank)
        boxes = [m.box for m in received if m.sender != self.rank] or [m.box for m in sent if m.receiver != self.rank]
        return sum(box.num_elements for box in boxes) * entry.spec.dtype.itemsize

    def is_overdue(self, seconds: float) -> bool:
        """Whether a GPU still waits though the program has begun nothing for so long. (Waits for Gloo end by
        themselves.)"""
        return self.stream is not None and seconds > _OVERDUE * TIMEOUT.total_seconds() and not self.stream.query()

    def abort(self) -> None:
        """After a failure: release a rank that waits. On Gloo abort() releases no rank (torch 2.13)."""
        if self.is_native:
            for group in (*self._process_groups.values(), *self._edges.values(), default_group()):
                group.abort()
        elif self.is_waiting:
            self._break_connections(True)

    def destroy_groups(self) -> None:
        """Destroy the process groups, when nothing uses them any more. All ranks of the world call it together."""
        self.drain()
        for group in (*self._process_groups.values(), *self._edges.values()):
            dist.destroy_process_group(group)
        self._process_groups.clear()
        self._edges.clear()
        self._groups.clear()

    def release(self, is_end: bool) -> None:
        """After a failure: break the connections of every group, at the end of the process those of the default group
        too, so that nothing waits for other ranks any more. Otherwise the end waits, for minutes, for what a live but
        slow rank does not send, and a thread that is waiting then aborts the process."""
        if self.is_native:
            return
        self._break_connections(is_end)
        self.open.clear()
        self._threads.join(_RELEASED)

    def _break_connections(self, of_default: bool) -> None:
        """Break those of every group of this world, and of the default group."""
        is_there = of_default and dist.is_initialized()
        for group in (*self._process_groups.values(), *([default_group()] if is_there else [])):
            break_connections(group)

    def _begin(self, begin: Callable[[], Pending]) -> Pending:
        try:
            pending = begin()
        except RuntimeError as error:
            if "Duplicate GPU" in str(error):
                raise StepError(
                    "two ranks have the same GPU, which NCCL refuses",
                    where=f"rank {self.rank}",
                    got=next(line for line in str(error).splitlines() if "Duplicate GPU" in line),
                    expected="a GPU for each rank of a host",
                    hint="give each its own LOCAL_RANK (torchrun does); to share a GPU, slowly, for a test: another "
                    "NCCL_HOSTID for each rank",
                ) from error
            raise ConnectionLost("a communication could not start", got=str(error)) from error
        self.open.add(pending)
        if self.recorder is not None:
            self.recorder.begun(pending.works)
        return pending

    def _finish(self, pending: Pending) -> Tensor | None:
        if not pending.is_done:
            for work in pending.works:
                self._await(work)
            self.num_waited += 1
            self.open.discard(pending)
            pending.value = pending.finish()
            pending.kept_alive, pending.is_done = (), True
        return pending.value

    def _await(self, work: Any) -> None:
        try:
            if self.is_native:
                work.wait()  # orders the streams and returns
                return
            self.is_waiting = True  # before the check: a failure that it does not see ends the wait by `abort`
            self.check()
            _await(work, self.check)
        except RuntimeError as error:
            raise ConnectionLost("a communication was interrupted", got=str(error)) from error
        finally:
            self.is_waiting = False


def _await(work: Any, check: Callable[[], None]) -> None:
    """Wait for a Gloo work (or an object with the same `wait`), calling `check` (which may raise) every POLL seconds,
    if its wait has a timeout.

    It costs nothing while the work runs, because `wait` with a timeout sleeps on the work's own condition variable.
    """
    while True:
        try:
            work.wait(timedelta(seconds=POLL))
            return
        except RuntimeError:
            if work.is_completed():
                work.wait()  # returns, or raises what went wrong
                return
        check()
