"""The Chrome trace: its schema, that slices nest, that arrows have both ends."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.report.samples import sample

from meshweave.cost.simulate.result import Simulation
from meshweave.errors import MeshweaveError
from meshweave.report.trace import trace_json

CASES = {
    "one role": lambda: (sample(),),
    "four stages": lambda: (sample(roles=4, layers=2, microbatches=3),),
    "beside a measured step": lambda: (sample(layers=2), sample(layers=2, source="measured", slow=1.1)),
    "overlapping": lambda: (overlapping(),),
}


def overlapping() -> Simulation:
    """A step whose collectives all stand in one stream, some at the same time."""
    made = sample(layers=2)
    return replace(made, spans=tuple(s if s.kind == "compute" else replace(s, stream="comm fsdp") for s in made.spans))


def events(simulations: tuple[Simulation, ...]) -> list[dict[str, Any]]:
    made = json.loads(trace_json(simulations))
    assert made["displayTimeUnit"] == "ms"
    assert len(made["otherData"]["steps"]) == len(simulations)
    return made["traceEvents"]


@pytest.mark.parametrize("name", CASES)
def test_every_event_has_what_its_kind_asks_for(name: str) -> None:
    simulations = CASES[name]()
    found = events(simulations)
    wanted = {"X": {"dur", "cat", "args"}, "C": {"args"}, "s": {"id", "cat"}, "f": {"id", "cat", "bp"}, "M": {"args"}}
    for event in found:
        assert {"ph", "name", "pid", "tid", "ts"} | wanted[event["ph"]] <= set(event)
        assert event["ts"] >= 0
        assert event.get("dur", 0) >= 0
    slices = [e for e in found if e["ph"] == "X" and e["name"] != "exposed"]
    assert len(slices) == sum(len(s.spans) for s in simulations)
    processes = {e["pid"] for e in found if e["name"] == "process_name"}
    assert len(processes) == sum(len(s.roles) for s in simulations)
    threads = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_name"}
    assert threads == {(e["pid"], e["tid"]) for e in slices}
    assert {e["pid"] for e in found} == processes
    sorted_too = {(e["pid"], e["tid"]) for e in found if e["name"] == "thread_sort_index"}
    assert sorted_too == threads


@pytest.mark.parametrize("name", CASES)
def test_events_are_in_order_and_the_slices_of_a_thread_nest(name: str) -> None:
    found = [e for e in events(CASES[name]()) if e["ph"] != "M"]
    assert [e["ts"] for e in found] == sorted(e["ts"] for e in found)
    open_: dict[tuple[int, int], list[int]] = {}
    num_inside = 0
    for e in (e for e in found if e["ph"] == "X"):
        begin, end = round(e["ts"] * 1000), round((e["ts"] + e["dur"]) * 1000)
        stack = open_.setdefault((e["pid"], e["tid"]), [])
        while stack and stack[-1] <= begin:
            stack.pop()
        assert not stack or end <= stack[-1], f"{e} ends after what it is in"
        num_inside += bool(stack)
        assert bool(stack) == (e["name"] == "exposed")
        stack.append(end)
    assert num_inside > 10


def test_spans_that_overlap_in_a_stream_have_threads_of_their_own() -> None:
    names = [e["args"]["name"] for e in events((overlapping(),)) if e["name"] == "thread_name"]
    assert names[:3] == ["compute", "comm fsdp", "comm fsdp (2)"]


@pytest.mark.parametrize("name", CASES)
def test_every_arrow_has_both_ends_inside_slices(name: str) -> None:
    simulations = CASES[name]()
    found = events(simulations)
    spans: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for e in found:
        if e["ph"] == "X":
            spans.setdefault((e["pid"], e["tid"]), []).append((round(e["ts"] * 1e3), round((e["ts"] + e["dur"]) * 1e3)))
    ends: dict[int, list[str]] = {}
    for e in found:
        if e["ph"] in "sf":
            ends.setdefault(e["id"], []).append(e["ph"])
            at = round(e["ts"] * 1000)
            assert any(begin <= at <= end for begin, end in spans[e["pid"], e["tid"]])
    assert all(held == ["s", "f"] for held in ends.values())
    expected = [
        (n, s.index)
        for one in simulations
        for s in one.spans
        for n in s.needs
        if "compute" not in (s.kind, one.spans[n].kind) or s.kind != one.spans[n].kind
    ]
    assert len(ends) == len(expected) > 20


def test_args_memory_and_exposed_seconds_are_those_of_the_simulation() -> None:
    made = sample(layers=2)
    found = events((made,))
    shown = {e["name"]: e for e in found if e["ph"] == "X"}
    span = next(s for s in made.spans if s.exposed_seconds > 0)
    args = shown[span.name]["args"]
    assert (args["op"], args["group"], args["layout"], args["line"]) == (span.op, span.group, span.layout, span.line)
    assert args["bytes"] == span.bytes
    assert span.reasons[0].text in args["reason"]
    exposed = sum(e["dur"] for e in found if e["name"] == "exposed")
    assert exposed == pytest.approx(sum(s.exposed_seconds for s in made.spans) * 1e6, rel=1e-4)
    counted = [e["args"]["bytes"] for e in found if e["ph"] == "C"]
    assert sorted(counted) == sorted(b for _, b in made.roles[0].memory)
    assert max(counted) == made.peak_bytes


def test_equal_steps_give_equal_bytes_and_no_step_is_an_error() -> None:
    assert trace_json([sample(roles=2, layers=2)]) == trace_json([sample(roles=2, layers=2)])
    with pytest.raises(MeshweaveError, match="no step to write"):
        trace_json([])
