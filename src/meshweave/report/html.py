"""The report of a simulated step as one HTML file that needs nothing else: no network, no framework, no build."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from meshweave.errors import MeshweaveError
from meshweave.report.encode import page_data
from meshweave.report.moves import MoveRow
from meshweave.simulate.result import Simulation

# In the order in which they build on each other; together they are one function.
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

    moves: `Program`'s rows (`step.explain()`): a communication then says what it is a step of, and why.
    measured: a step that ran, shown beside it on the same time axis, with the error of the model per class of tasks.
    other: a step of another plan: what changes from it to `simulation`.

    Equal arguments give equal bytes. Names may hold anything: they are shown as text, never as markup. Raises
    MeshweaveError for a step without roles.
    """
    for step in (simulation, measured, other):
        if step is not None and not step.roles:
            raise MeshweaveError(
                "a step that has no roles cannot be shown", where=step.title, expected="a simulated step"
            )
    parts = {
        "TITLE": escape(simulation.title or f"step on {simulation.mesh}"),
        "STYLE": _asset("page.css"),
        "SCRIPT": '(() => {\n"use strict";\n' + "\n".join(_asset(f"{name}.js") for name in _SCRIPTS) + "})();\n",
        "DATA": page_data(simulation, moves, measured, other),
    }
    # The template is cut at its marks, so that no text that is put in is looked through for further ones.
    cut = re.split("<!--([A-Z]+)-->", _asset("page.html"))
    return "".join(parts[text] if i % 2 else text for i, text in enumerate(cut))


def _asset(name: str) -> str:
    return (files("meshweave.report.page") / name).read_text(encoding="utf-8")
