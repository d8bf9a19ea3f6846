"""plan: the moves of MODEL's step, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from meshweave.cli.job import MeshStepOptions, compiled_unrun
from meshweave.cli.screen import Screen
from meshweave.report import tables
from meshweave.report.moves import MoveRow, move_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(MeshStepOptions):
    show_all: Annotated[bool, typer.Option("--all", help="show every repeated layer")] = False


def plan(screen: Screen, job: PlanOptions) -> int:
    """Show every move of data in one step, without running it. An hf: model takes no memory."""
    program = compiled_unrun(screen, job)
    rows: Sequence[MoveRow] = move_rows(program.placed, program.mesh)
    screen.out.print(tables.moves_table(rows, show_all=job.show_all))
    screen.out.print(tables.totals_table(rows))
    for note in program.notes:
        screen.say(note)
    folded = tables.fold(rows, twins=not job.show_all)
    shown = [r.row.as_dict() | {"name": r.name or r.row.name, "count": r.count} for r in folded]
    sums, received = [total.as_dict() for total in tables.totals(rows)], sum(r.bytes_received for r in rows)
    screen.result(True, mesh=str(program.mesh), num_moves=len(rows), bytes_received=received, moves=shown, totals=sums)
    return 0
