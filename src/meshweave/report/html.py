"""The report of a simulated step as a self-contained HTML file: no network, no framework, no build."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from meshweave.cost.simulate.result import Simulation
from meshweave.errors import MeshweaveError
from meshweave.report.encode import page_data
from meshweave.report.moves import MoveRow

# In order of dependency; together they form a function.
_SCRIPTS = (
    "model", "view", "lanes", "timeline", "minimap", "summary", "details", "table", "tabs", "graph", "input", "main",
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
