"""Schedules of pipelines as data: by name, as CSV, searched; their proof, their times and their memory.

A schedule is `engine.actions.Schedule`; a role of it is a pipeline rank.
"""

from meshweave.engine.actions import Action, Schedule
from meshweave.engine.schedules.clock import (
    Gap,
    PipelineTimes,
    StageTimes,
    TimedAction,
    pipeline_times,
    stage_times,
)
from meshweave.engine.schedules.communication import with_communication, with_gathers
from meshweave.engine.schedules.csv_files import load_schedule, parse_schedule, save_schedule, schedule_csv
from meshweave.engine.schedules.form import place_stages, text_of
from meshweave.engine.schedules.generators import SCHEDULES, make_schedule
from meshweave.engine.schedules.memory import ActivationMemory, peak_activations
from meshweave.engine.schedules.proof import ScheduleProof, prove_schedule
from meshweave.engine.schedules.search import ScheduleSearch, best_schedule

__all__ = [
    "SCHEDULES",
    "Action",
    "ActivationMemory",
    "Gap",
    "PipelineTimes",
    "Schedule",
    "ScheduleProof",
    "ScheduleSearch",
    "StageTimes",
    "TimedAction",
    "best_schedule",
    "load_schedule",
    "make_schedule",
    "parse_schedule",
    "peak_activations",
    "pipeline_times",
    "place_stages",
    "prove_schedule",
    "save_schedule",
    "schedule_csv",
    "stage_times",
    "text_of",
    "with_communication",
    "with_gathers",
]
