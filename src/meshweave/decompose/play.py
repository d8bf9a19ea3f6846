"""Steps of algorithms played one by one: one processor that computes, one link that all messages of a device share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from meshweave.decompose.algorithms import Step


@dataclass(frozen=True, slots=True)
class Message:
    """Seconds of a message, of which the processor itself spends `host` when it is waited for: 0 where links work
    alone. Compute takes `slowdown` times as long while one is on its way."""

    seconds: float
    host: float = 0.0
    slowdown: float = 1.0


@dataclass(slots=True)
class _Clock:
    """When the processor and the link have done what they were given."""

    slowdown: float
    free: float = 0.0
    link: float = 0.0

    def send(self, message: Message, ready: float = 0.0) -> float:
        """When a message arrives that is sent as soon as the link is free, and not before `ready`."""
        self.link = max(self.link, self.free, ready) + message.seconds - message.host
        return self.link

    def wait(self, message: Message, arrived: float) -> None:
        self.free = max(self.free, arrived) + message.host

    def compute(self, seconds: float) -> None:
        beside = min(max(self.link - self.free, 0.0), seconds * self.slowdown)  # while messages are on their way
        self.free += beside + seconds - beside / self.slowdown


def play_gather(steps: Sequence[Step], ahead: int, chunk: float, message: Message, hidden: float) -> float:
    """Seconds from the wait of a gather to its last product. Its first messages are sent `hidden` seconds before."""
    clock, arrived, posted = _Clock(message.slowdown), [0.0] * len(steps), 0

    def post(until: int) -> None:
        nonlocal posted
        for k in range(posted, min(until, len(steps))):
            if steps[k].has_message:
                arrived[k] = clock.send(message, arrived[steps[k].of] if steps[k].of < k else 0.0)
        posted = max(posted, until)

    post(ahead + int(not steps[0].has_message))
    clock.free = hidden
    for k, step in enumerate(steps):
        if step.has_message:
            clock.wait(message, arrived[k])
        post(k + 1 + ahead)
        clock.compute(chunk)
    return clock.free - hidden


def play_reduce(steps: Sequence[Step], chunk: float, message: Message, hidden: float) -> float:
    """Seconds from the first part of a reduction to its result, less `hidden` of other work after the last part, beside
    the messages that are then on their way."""
    clock, arrived, added = _Clock(message.slowdown), [0.0] * len(steps), {k for step in steps for k in step.adds}
    for k, step in enumerate(steps):
        clock.compute(chunk)
        if k == len(steps) - 1 and not step.has_message:
            clock.free += hidden
        for earlier in step.adds:
            clock.wait(message, arrived[earlier])
        if step.has_message:
            arrived[k] = clock.send(message)
    clock.free += hidden * steps[-1].has_message
    for k, step in enumerate(steps):
        if step.has_message and k not in added:
            clock.wait(message, arrived[k])
    return clock.free - hidden


def play_exchange(
    steps: Sequence[Step], chunk: float, there: Message, back: Message, before: float, after: float
) -> float:
    """Seconds from the wait of an all-to-all to the end of the one that brings back what is computed of its chunks,
    less `after` of other work beside that. Its first message is sent `before` seconds earlier."""
    clock, arrived, returned = _Clock(there.slowdown), [0.0] * len(steps), list[float]()
    for k, step in enumerate(steps):
        for following in range(max(k, 1), min(k + 2, len(steps))):
            arrived[following] = arrived[following] or clock.send(there)
        clock.free = max(clock.free, before)
        if step.has_message:
            clock.wait(there, arrived[k])
        clock.compute(chunk)
        if step.has_message:
            returned.append(clock.send(back))
    clock.free += after
    for end in returned:
        clock.wait(back, end)
    return clock.free - before - after
