"""Schedules as CSV, in the two forms of torch.distributed.pipelining (torch 2.13, `_load_csv` and `_dump_csv`).

A row is a rank, a cell an action: `3F5` is forward of stage 3 and microbatch 5. Types: F, B (whole backward), I and W
(its parts), UNSHARD, RESHARD and REDUCE_GRAD (of a stage, without a microbatch), SEND_F, RECV_F, SEND_B, RECV_B.
Actions that are scheduled as one: `(0F5;7B0)OVERLAP_F_B`. Empty cells are times in which a rank waits; they mean
nothing.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Literal, get_args

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules.communication import with_communication, with_gathers
from meshweave.engine.schedules.form import COMPUTE, OF_RUNTIME, OF_STAGE, TORCH_NAMES, groups_of, text_of
from meshweave.engine.schedules.lowering import is_explicit
from meshweave.engine.schedules.proof import prove_schedule
from meshweave.errors import PlanError

CsvForm = Literal["compute_only", "compute_comms"]
_KINDS = {name: kind for kind, name in TORCH_NAMES.items()}
_CELL = re.compile(r"(\d+)([A-Z_]+)(\d*)")
_PAIR = re.compile(r"\((.+)\)OVERLAP_F_B")


def schedule_csv(schedule: Schedule, form: CsvForm = "compute_only") -> str:
    """The schedule as CSV that torch's `_load_csv` reads.

    `compute_only`: F, B, I, W and pairs; torch adds the rest. `compute_comms`: all actions; sends and receives, gathers
    and reductions are added (`with_communication`, `with_gathers`) to a schedule that has none. What is combined in an
    action is written one behind the other. Raises PlanError for a schedule that is not valid."""
    if form not in get_args(CsvForm):
        raise PlanError("unknown form of CSV", got=repr(form), expected=", ".join(get_args(CsvForm)))
    prove_schedule(schedule)
    if form == "compute_comms":
        schedule = with_gathers(schedule if is_explicit(schedule) else with_communication(schedule))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for actions in schedule.of_role:
        cells: list[str] = []
        for group in groups_of(actions):
            parts = [text_of(replace(a, kinds=(k,))) for a in group for k in a.kinds if k not in OF_RUNTIME
                     and (form == "compute_comms" or k in COMPUTE)]  # fmt: skip
            cells += [f"({';'.join(parts)})OVERLAP_F_B"] if len(group) > 1 else parts
        writer.writerow(cells)
    return text.getvalue()


def save_schedule(schedule: Schedule, path: str | Path, form: CsvForm = "compute_only") -> None:
    """Write `schedule_csv` to a file."""
    Path(path).write_text(schedule_csv(schedule, form))


def load_schedule(path: str | Path) -> Schedule:
    """The schedule in a file, in either form; its name is the file's. It is proven.

    Raises PlanError for a file that cannot be read, a cell that is no action, and a schedule that is not valid."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError("a pipeline schedule cannot be read", where=str(path), got=str(error)) from error
    schedule = parse_schedule(text, Path(path).name)
    prove_schedule(schedule)
    return schedule


def parse_schedule(text: str, name: str = "csv") -> Schedule:
    """The schedule in a text of either form. It is not proven. Raises PlanError for a cell that is no action."""
    rows = list(csv.reader(io.StringIO(text.rstrip("\r\n"))))
    of_role = []
    for number, row in enumerate(rows):
        actions: list[Action] = []
        for column, cell in enumerate(row):
            if cell.strip():
                actions += _actions_of(cell.strip(), f"{name}, row {number + 1}, cell {column + 1}")
        of_role.append(tuple(actions))
    return Schedule(name, tuple(of_role))


def _actions_of(cell: str, where: str) -> list[Action]:
    pair = _PAIR.fullmatch(cell)
    if pair is None:
        return [_action_of(cell, where)]
    group = [_action_of(part.strip(), where) for part in pair.group(1).split(";")]
    return [replace(action, with_next=at < len(group) - 1) for at, action in enumerate(group)]


def _action_of(cell: str, where: str) -> Action:
    match = _CELL.fullmatch(cell)
    kind = _KINDS.get(match.group(2)) if match else None
    if match is None or kind is None or (kind not in OF_STAGE and not match.group(3)):
        raise PlanError(
            "a cell of a pipeline schedule is no action",
            where=where,
            got=repr(cell),
            expected="stage, type and microbatch as 3F5, or (0F5;7B0)OVERLAP_F_B",
            hint=f"types are {', '.join(_KINDS)}; UNSHARD, RESHARD and REDUCE_GRAD need no microbatch",
        )
    return Action((kind,), int(match.group(3) or 0), int(match.group(1)))
