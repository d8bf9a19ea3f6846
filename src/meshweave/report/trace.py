"""Steps in the Chrome trace event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

Format: "Trace Event Format", Google, the JSON object form. Times are in microseconds with nanoseconds as decimals.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from meshweave.cost.simulate.result import RoleResult, Simulation, Span
from meshweave.errors import MeshweaveError
from meshweave.report.spans import class_of, lanes_of, nanoseconds

Event = dict[str, Any]


def trace_json(simulations: Sequence[Simulation]) -> str:
    """A JSON object with the steps of `simulations` side by side, all beginning at 0.

    A process per step and role, a thread per stream (a second one if its spans overlap), a slice per span, at the end
    of a communication a slice for its exposed time, arrows to a communication from its predecessors and to its
    successors, and a counter of the role's memory. Slices of a thread nest; events are in order of time; equal steps
    give equal bytes. Raises MeshweaveError if there is no step."""
    if not simulations:
        raise MeshweaveError("there is no step to write as a trace", expected="at least one simulation")
    names: list[Event] = []
    events: list[Event] = []
    num_flows = 0
    for simulation in simulations:
        writer = _TraceWriter(simulation, len({e["pid"] for e in names}) + 1)
        names += writer.names()
        events += [*writer.slices(), *writer.memory()]
        flows = list(writer.flows(num_flows))
        num_flows += len(flows) // 2
        events += flows
    # Outer slices before inner slices, and both ends of an arrow after their slices.
    events.sort(key=lambda e: (e["ts"], e["ph"] != "X", -e.get("dur", 0.0)))
    shown = {"displayTimeUnit": "ms", "otherData": {"steps": [_source(s) for s in simulations]}}
    return json.dumps({**shown, "traceEvents": names + events}, separators=(",", ":"), allow_nan=False)


def _source(simulation: Simulation) -> str:
    title = f"{simulation.title}, " if simulation.title else ""
    return f"{title}{simulation.source}: {simulation.profile} {simulation.profile_version}"


def _microseconds(nanos: int) -> float:
    return nanos / 1000


@dataclass(frozen=True, slots=True)
class _TraceWriter:
    """The events of a step. Its roles are processes from `first` on."""

    simulation: Simulation
    first: int

    def pid(self, role: int) -> int:
        return self.first + [r.index for r in self.simulation.roles].index(role)

    def threads(self) -> dict[int, tuple[int, int]]:
        """Per span, process and thread."""
        threads: dict[int, tuple[int, int]] = {}
        for tid, lane in enumerate(lanes_of(self.simulation), 1):
            place = (self.pid(lane.role), tid)
            threads |= dict.fromkeys(lane.spans, place)
        return threads

    def names(self) -> list[Event]:
        events = []
        for order, role in enumerate(self.simulation.roles):
            pid = self.pid(role.index)
            name = f"{_source(self.simulation)}, role {role.index} ({_devices(role)})"
            events.append(_meta("process_name", pid, 0, name=name))
            events.append(_meta("process_sort_index", pid, 0, sort_index=self.first + order))
        for tid, lane in enumerate(lanes_of(self.simulation), 1):
            events.append(_meta("thread_name", self.pid(lane.role), tid, name=lane.name))
            events.append(_meta("thread_sort_index", self.pid(lane.role), tid, sort_index=tid))
        return events

    def slices(self) -> Iterator[Event]:
        threads = self.threads()
        for span in self.simulation.spans:
            begin, end = nanoseconds(span.start), nanoseconds(span.end)
            yield _slice(span.name, class_of(span), begin, end, threads[span.index], _args(span))
            exposed = nanoseconds(span.exposed_seconds)
            if span.kind != "compute" and exposed > 0:  # drawn at the end of the span
                args = {"reason": "; ".join(reason.text for reason in span.reasons)}
                yield _slice("exposed", "exposed", max(begin, end - exposed), end, threads[span.index], args)

    def flows(self, first: int) -> Iterator[Event]:
        """Arrows to and from communications: from the last nanosecond of a slice to the first of another."""
        threads, spans = self.threads(), self.simulation.spans
        pairs = [(n, s.index) for s in spans for n in s.needs if s.kind != "compute" or spans[n].kind != "compute"]
        for number, (source, target) in enumerate(pairs, first):
            at = max(nanoseconds(spans[source].start), nanoseconds(spans[source].end) - 1)
            to = max(nanoseconds(spans[target].start), at)
            for ph, place, ts, more in (("s", source, at, {}), ("f", target, to, {"bp": "e"})):
                pid, tid = threads[place]
                base = {"ph": ph, "name": "needs", "cat": "needs", "id": number}
                yield {**base, "pid": pid, "tid": tid, "ts": _microseconds(ts), **more}

    def memory(self) -> Iterator[Event]:
        for role in self.simulation.roles:
            for at, num_bytes in role.memory:
                ts = _microseconds(nanoseconds(at))
                yield {
                    "ph": "C", "name": "memory", "pid": self.pid(role.index), "tid": 0, "ts": ts,
                    "args": {"bytes": num_bytes},
                }  # fmt: skip


def _meta(kind: str, pid: int, tid: int, **args: str | int) -> Event:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "ts": 0, "args": args}


def _slice(
    name: str, category: str, begin: int, end: int, place: tuple[int, int], args: Mapping[str, Any]
) -> Event:  # fmt: skip
    return {
        "ph": "X", "name": name, "cat": category, "pid": place[0], "tid": place[1],
        "ts": _microseconds(begin), "dur": _microseconds(end - begin), "args": args,
    }  # fmt: skip


def _args(span: Span) -> dict[str, Any]:
    """The fields of a span; empty fields are omitted."""
    fields = {
        "op": span.op,
        "phase": span.phase,
        "module": span.module,
        "line": span.line,
        "bytes": round(span.bytes),
        "flops": round(span.flops),
        "group": span.group,
        "layout": span.layout,
        "microbatch": span.microbatch,
        "exposed_us": _microseconds(nanoseconds(span.exposed_seconds)),
        "reason": "; ".join(f"{r.seconds * 1e6:.1f} us: {r.text}" for r in span.reasons),
    }
    return {key: value for key, value in fields.items() if value}


def _devices(role: RoleResult) -> str:
    """The devices of a role: their number, and the first and last."""
    if len(role.devices) == 1:
        return f"device {role.devices[0]}"
    return f"{len(role.devices)} devices, {min(role.devices)} to {max(role.devices)}"
