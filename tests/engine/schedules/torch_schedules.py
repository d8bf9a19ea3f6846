"""Schedules of torch.distributed.pipelining without a process group, as oracle: its classes, its reader and checks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.pipelining import schedules as torch_schedules
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime, _simulate_comms_compute, _validate_schedule

logging.getLogger(torch_schedules.__name__).setLevel(logging.WARNING)


class Stage:
    """What torch's schedules ask a stage for before they run."""

    def __init__(self, ranks: int, stages: int) -> None:
        self.group_size, self.num_stages = ranks, stages
        self.group_rank = self.stage_index = 0
        self.submod = self.group = None
        self.stage_index_to_group_rank: dict[int, int] = {}


@dataclass(frozen=True)
class Row:
    """A class of torch, and the name of the same schedule here if it is the same."""

    name: str
    stages_per_rank: int
    ours: str = ""
    fits: Callable[[int, int], bool] = lambda ranks, microbatches: True


CLASSES = [
    Row("GPipe", 1, "gpipe"),
    Row("1F1B", 1, "1f1b", lambda ranks, microbatches: microbatches >= ranks),
    Row("Interleaved1F1B", 2, "interleaved", lambda p, m: m % max(1, m // p) == 0),
    Row("Interleaved1F1B", 3, "interleaved", lambda p, m: m % max(1, m // p) == 0),
    Row("LoopedBFS", 2, "looped-bfs"),
    Row("InterleavedZeroBubble", 1, "zb-h1", lambda p, m: m % max(1, m // p) == 0),
    Row("InterleavedZeroBubble", 2, "", lambda p, m: m % max(1, m // p) == 0),
    Row("ZBVZeroBubble", 2, "zbv"),
    Row("DualPipeV", 2, "dualpipev", lambda p, m: m >= 2 * p),
]


def orders_of(row: Row, ranks: int, microbatches: int) -> dict[int, list[Any]]:
    """The order of actions of torch's class, without gathers and messages."""
    kind: Any = torch_schedules.get_schedule_class(row.name)
    if issubclass(kind, torch_schedules.PipelineScheduleSingle):
        schedule = kind.__new__(kind)
        schedule._num_stages, schedule._n_microbatches, schedule.scale_grads = ranks, microbatches, True
        return {rank: _renumbered(actions) for rank, actions in schedule._get_pipeline_order().items()}
    stages = [Stage(ranks, ranks * row.stages_per_rank) for _ in range(row.stages_per_rank)]
    return kind(stages, microbatches).pipeline_order


def _renumbered(actions: list[Any]) -> list[Any]:
    """Torch 2.13 numbers forwards of the last rank of 1F1B from 1, in this table only: what runs begins with 0."""
    forwards = [action for action in actions if action is not None and action.computation_type.value == "F"]
    first = min(action.microbatch_index for action in forwards)
    return [a._replace(microbatch_index=a.microbatch_index - first) if a in forwards else a for a in actions]


def text_of_orders(orders: dict[int, list[Any]]) -> str:
    """As `_dump_csv` writes it."""
    return "\n".join(",".join("" if a is None else str(a) for a in orders[rank]) for rank in sorted(orders)) + "\n"


def read(text: str, path: Path, stages: int, microbatches: int, form: Any) -> Any:
    """What torch's runtime makes of a CSV: its schedule, with messages, after its own checks and simulation."""
    path.write_text(text)
    ranks = len(text.splitlines())
    schedule: Any = _PipelineScheduleRuntime([Stage(ranks, stages)], microbatches)
    schedule._load_csv(str(path), format=form)
    orders = schedule.pipeline_order_with_comms
    rank_of = _validate_schedule(orders, ranks, stages, microbatches)
    plain = {
        rank: [
            each
            for action in actions
            for each in (action.sub_actions or (action,))
            if each.computation_type.value not in ("UNSHARD", "RESHARD", "REDUCE_GRAD")
        ]
        for rank, actions in orders.items()
    }
    _simulate_comms_compute(plain, lambda stage: rank_of[stage], stages)
    return schedule
