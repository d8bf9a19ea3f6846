"""The report of a simulated step as a self-contained HTML file: no network, no framework, no build. The steps are in it
as compact JSON: columns, every string once, times in whole nanoseconds."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib.resources import files
from typing import Any

from meshweave.cost.simulate.result import RoleResult, Simulation, Span
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import fold_numbers
from meshweave.report.diff import class_errors, diff_rows, step_split
from meshweave.report.moves import MoveRow
from meshweave.report.pipeline import PASSES, pipeline_of
from meshweave.report.spans import class_of, lanes_of, nanoseconds

_NUM_NAMES = 24  # listed graph nodes of a fused kernel; if there are more, their number is shown
_COLUMNS = (
    "name op kind lane start seconds phase module fold line flops bytes layout group microbatch exposed cls needs names"
    " move"
)


@dataclass(slots=True)
class _Page:
    """The contents of a page, filled run by run. Spans of all runs are numbered together."""

    strings: dict[str, int] = field(default_factory=lambda: {"": 0})
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in _COLUMNS.split()})
    reasons: list[tuple[int, int, int, int, int]] = field(default_factory=list)  # span, kind, ns, text, blocker
    lanes: list[tuple[int, int, int, int]] = field(default_factory=list)  # run, role, name, row
    runs: list[dict[str, Any]] = field(default_factory=list)
    last: int = 0  # start of the previous span

    def string(self, text: str) -> int:
        return self.strings.setdefault(text, len(self.strings))

    def add(self, simulation: Simulation, moves: _Moves) -> None:
        first = len(self.columns["name"])
        lane_of: dict[int, int] = {}
        for lane in lanes_of(simulation):
            lane_of |= dict.fromkeys(lane.spans, len(self.lanes))
            self.lanes.append((len(self.runs), lane.role, self.string(lane.name), lane.row))
        fed: dict[int, set[int]] = {}
        for source, target in simulation.edges:
            fed.setdefault(target, set()).add(source)
        for span in simulation.spans:
            needs = sorted({*span.needs, *fed.get(span.index, ())})
            self.span(span, lane_of[span.index], needs, first, moves.find(span))
        self.runs.append(self.run(simulation, first))

    def span(self, span: Span, lane: int, needs: Sequence[int], first: int, move: int) -> None:
        start = nanoseconds(span.start)
        names = span.names if span.names != (span.name,) else ()
        cut = [*names[:_NUM_NAMES], f"and {len(names) - _NUM_NAMES} more"] if len(names) > _NUM_NAMES else names
        values = {
            "lane": lane,
            "start": start - self.last,
            "seconds": nanoseconds(span.end) - start,
            "flops": float(f"{span.flops:.6g}"),
            "bytes": round(span.bytes),
            "microbatch": span.microbatch,
            "exposed": nanoseconds(span.exposed_seconds),
            "needs": [span.index - n for n in needs],  # distance back to the needed span
            "move": move,
        }
        texts = {
            "name": span.name, "op": span.op, "kind": span.kind, "phase": span.phase, "module": span.module,
            "fold": fold_numbers(span.module), "line": span.line, "layout": span.layout, "group": span.group,
            "cls": class_of(span), "names": " ".join(cut),
        }  # fmt: skip
        values |= {key: self.string(text) for key, text in texts.items()}
        for key, column in self.columns.items():
            column.append(values[key])
        self.last = start
        for r in span.reasons:
            blocker = first + r.blocker if r.blocker >= 0 else -1
            row = (first + span.index, self.string(r.kind), nanoseconds(r.seconds), self.string(r.text), blocker)
            self.reasons.append(row)

    def run(self, simulation: Simulation, first: int) -> dict[str, Any]:
        return {
            **_totals(simulation),
            "first": first,
            "count": len(simulation.spans),
            "pipeline": self.pipeline(simulation, first),
            "roles": [self.role(role) for role in simulation.roles],
        }

    def pipeline(self, simulation: Simulation, first: int) -> dict[str, Any] | None:
        """Blocks and gaps of a pipeline, in nanoseconds; None if the stages follow no schedule."""
        picture = pipeline_of(simulation)
        if picture is None:
            return None
        blocks = [
            (
                b.role, self.string(PASSES.get(b.action, b.action)), b.stage, b.microbatch, nanoseconds(b.start),
                nanoseconds(b.end), first + b.spans[0],
            )
            for b in picture.blocks
        ]  # fmt: skip
        gaps = []
        for g in picture.gaps:
            span = first + g.span if g.span >= 0 else -1
            times = nanoseconds(g.start), nanoseconds(g.end)
            gaps.append((g.role, *times, g.before, g.source, span, nanoseconds(g.message_seconds), self.string(g.text)))
        stages = picture.stages_of_role
        return {"text": str(picture), "bubble": picture.bubble, "stages": stages, "blocks": blocks, "gaps": gaps}

    def role(self, role: RoleResult) -> dict[str, Any]:
        tensors = [
            (self.string(h.name), h.bytes, self.string(h.kind), self.string(h.module), self.string(h.line), h.count)
            for h in role.at_peak
        ]
        times = [nanoseconds(at) for at, _ in role.memory]
        return {
            "index": role.index,
            "devices": list(role.devices) if len(role.devices) <= 16 else [role.devices[0], role.devices[-1]],
            "num_devices": len(role.devices),
            "compute": nanoseconds(role.compute_seconds),
            "communication": nanoseconds(role.communication_seconds),
            "exposed": nanoseconds(role.exposed_seconds),
            "idle": nanoseconds(role.idle_seconds),
            "peak": role.peak_bytes,
            "peak_at": nanoseconds(role.peak_at),
            "persistent": role.persistent_bytes,
            "held": tensors,
            "memory": [_steps(times), _steps([num_bytes for _, num_bytes in role.memory])],
        }


@dataclass(frozen=True, slots=True)
class _Moves:
    """Moves by the properties that they share with the communications of their steps."""

    rows: tuple[MoveRow, ...]
    places: dict[tuple[str, str, str, str], list[int]]

    @staticmethod
    def of(rows: Sequence[MoveRow]) -> _Moves:
        places: dict[tuple[str, str, str, str], list[int]] = {}
        for i, row in enumerate(rows):
            places.setdefault((row.phase, row.module, row.line, row.value), []).append(i)
        return _Moves(tuple(rows), places)

    def find(self, span: Span) -> int:
        """The move that a communication is a step of, -1 if unknown; among several that with its layouts."""
        value, _, change = span.layout.partition(": ")
        source, _, target = change.partition(" -> ")
        candidates = self.places.get((span.phase, span.module, span.line, value), []) if span.layout else []
        return max(candidates, key=lambda i: (self.ends(i, source, target), -i), default=-1)

    def ends(self, index: int, source: str, target: str) -> int:
        return (self.rows[index].source == source) + (self.rows[index].target == target)


def _steps(values: Sequence[int]) -> list[int]:
    """The first value, then differences."""
    return [b - a for a, b in zip([0, *values], values, strict=False)]


def _totals(simulation: Simulation) -> dict[str, Any]:
    return {
        "title": simulation.title,
        "source": simulation.source,
        "profile": simulation.profile,
        "version": simulation.profile_version,
        "seconds": nanoseconds(simulation.seconds),
        "mesh": simulation.mesh,
        "num_devices": simulation.num_devices,
        "tokens": simulation.tokens,
        "rate": round(simulation.tokens_per_s_per_gpu, 3),
        "mfu": None if simulation.mfu is None else round(simulation.mfu, 6),
        "mfu_dtype": simulation.mfu_dtype,
        "memory": simulation.memory_bytes,
        "peak": simulation.peak_bytes,
        "reserved": simulation.reserved_bytes,
        "exposed": nanoseconds(simulation.exposed_seconds),
        "verdict": simulation.verdict_text,
        "fit": simulation.fit,
        "notes": list(simulation.notes),
    }


def page_data(
    simulation: Simulation, moves: Iterable[MoveRow], measured: Simulation | None, other: Simulation | None
) -> str:
    """The JSON text that the page reads. Safe inside a script element: it contains no `<`, `>` or `&`."""
    page = _Page()
    known = _Moves.of(tuple(moves))
    page.add(simulation, known)
    if measured is not None:
        page.add(measured, known)
    data = {
        "runs": page.runs,
        "lanes": page.lanes,
        "spans": page.columns,
        "reasons": page.reasons,
        "moves": [(r.source, r.target, r.value, list(r.steps), r.why, nanoseconds(r.seconds)) for r in known.rows],
        "errors": _errors(simulation, measured) if measured is not None else None,
        "diff": _diff(other, simulation) if other is not None else None,
        "strings": list(page.strings),
    }
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _errors(simulation: Simulation, measured: Simulation) -> list[list[Any]]:
    return [
        [row.name, row.num_modelled, row.num_measured, nanoseconds(row.modelled), nanoseconds(row.measured)]
        for row in class_errors(simulation, measured)
    ]


def _diff(before: Simulation, after: Simulation) -> dict[str, Any]:
    """The difference from the other plan (A) to this one (B)."""
    rows = []
    for row in diff_rows(before, after):
        sums = [
            [total.count, nanoseconds(total.seconds), nanoseconds(total.exposed_seconds), round(total.bytes)]
            for total in (row.a, row.b)
        ]
        rows.append([row.kind, row.phase, row.op, row.group, row.layout, row.module, row.change, *sums])
    split = [[row.phase, row.part, nanoseconds(row.a), nanoseconds(row.b)] for row in step_split(before, after)]
    return {"a": _totals(before), "split": split, "rows": rows}


# In order of dependency; together they form a function.
_SCRIPTS = (
    "model", "view", "lanes", "timeline", "minimap", "summary", "details", "table", "pipeline", "tabs", "graph",
    "input", "main",
)  # fmt: skip


def html_page(
    simulation: Simulation,
    moves: Iterable[MoveRow] = (),
    *,
    measured: Simulation | None = None,
    other: Simulation | None = None,
) -> str:
    """A page with the totals of `simulation`, its timeline, memory, communications and the graph around each task.

    moves: `Program`'s rows (`step.explain()`): for each communication the page then shows its move and the reason.
    measured: a real step, shown beside it on the same time axis, with the error of the model per class of tasks. other:
    a step of another plan, for the differences from it to `simulation`.

    Equal arguments give equal bytes. Names may contain anything: they are shown as text, never as markup. Raises
    MeshweaveError for a step without roles.
    """
    for step in (simulation, measured, other):
        if step is not None and not step.roles:
            raise MeshweaveError("a step without roles cannot be shown", where=step.title, expected="a simulated step")
    parts = {
        "TITLE": escape(simulation.title or f"step on {simulation.mesh}"),
        "STYLE": _asset("page.css"),
        "SCRIPT": '(() => {\n"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "})();\n",
        "DATA": page_data(simulation, moves, measured, other),
    }
    # The template is cut at its marks, so that inserted text is never searched for further marks.
    cut = re.split("<!--([A-Z]+)-->", _asset("page.html"))
    return "".join(parts[text] if i % 2 else text for i, text in enumerate(cut))


def _asset(name: str) -> str:
    return (files("meshweave.report.page") / name).read_text(encoding="utf-8")
