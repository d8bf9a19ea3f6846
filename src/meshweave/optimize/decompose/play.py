"""Plays the steps of algorithms on the virtual clock: a processor that computes, a link that all messages of a device
share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from meshweave.cost.simulate.clock import Work, play
from meshweave.optimize.decompose.algorithms import RingStep


@dataclass(frozen=True, slots=True)
class MessageCost:
    """Seconds of a message, of which the processor itself spends `host` at the wait: 0 if links work on their own.
    Compute takes `slowdown` times as long while a message is in flight."""

    seconds: float
    host: float = 0.0
    slowdown: float = 1.0


@dataclass(slots=True)
class _Steps:
    """The work of the processor, in order, and the messages on the link."""

    slowdown: float
    work: Work = field(default_factory=Work)
    order: list[int] = field(default_factory=list)
    link: list[int] = field(default_factory=list)

    def run(self, seconds: float, needs: Sequence[int] = (), *, is_kernel: bool = False) -> None:
        """Only kernels are slower beside a message."""
        self.order.append(self.work.add(seconds, needs, is_kernel=is_kernel))

    def send(self, message: MessageCost) -> int:
        """Send a message now, as soon as the link is free."""
        self.run(0.0)
        self.link.append(self.work.add(message.seconds - message.host, self.order[-1:], (("link", 1.0),)))
        return self.link[-1]

    def seconds(self) -> float:
        """When the processor is done."""
        return play(self.work, (self.order, self.link), 1, lambda levels: self.slowdown).ends[self.order[-1]]


def play_gather(steps: Sequence[RingStep], ahead: int, chunk: float, message: MessageCost, hidden: float) -> float:
    """Seconds from the wait of a gather to its last product. Its first messages are sent `hidden` seconds earlier."""
    played, sent = _Steps(message.slowdown), list[int]()

    def post(until: int) -> None:
        for step in steps[len(sent) : until]:
            sent.append(played.send(message) if step.has_message else -1)

    post(ahead + int(not steps[0].has_message))
    played.run(hidden)
    for k, step in enumerate(steps):
        if step.has_message:
            played.run(message.host, (sent[k],))
        post(k + 1 + ahead)
        played.run(chunk, is_kernel=True)
    return played.seconds() - hidden


def play_reduce(steps: Sequence[RingStep], chunk: float, message: MessageCost, hidden: float) -> float:
    """Seconds from the first part of a reduction to its result, less `hidden` seconds of other work after the last
    part, beside the messages then in flight."""
    played, sent, last = _Steps(message.slowdown), dict[int, int](), len(steps) - 1
    for k, step in enumerate(steps):
        played.run(chunk, is_kernel=True)
        if k == last and not step.has_message:
            played.run(hidden)
        for earlier in step.adds:
            played.run(message.host, (sent.pop(earlier),))
        if step.has_message:
            sent[k] = played.send(message)
    if steps[last].has_message:
        played.run(hidden)
    for arrival in sent.values():
        played.run(message.host, (arrival,))
    return played.seconds() - hidden


def play_exchange(
    steps: Sequence[RingStep], chunk: float, there: MessageCost, back: MessageCost, before: float, after: float
) -> float:
    """Seconds from the wait of an all-to-all to the end of the inverse all-to-all of the results, less `after` seconds
    of other work beside that. Its first message is sent `before` seconds earlier."""
    played, sent, returned = _Steps(there.slowdown), list[int](), list[int]()
    for k, step in enumerate(steps):
        sent += [played.send(there) for _ in steps[len(sent) + 1 : k + 2]]
        if k == 0:
            played.run(before)
        if step.has_message:
            played.run(there.host, (sent[k - 1],))
        played.run(chunk, is_kernel=True)
        if step.has_message:
            returned.append(played.send(back))
    played.run(after)
    for arrival in returned:
        played.run(back.host, (arrival,))
    return played.seconds() - before - after
