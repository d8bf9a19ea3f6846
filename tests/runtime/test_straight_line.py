"""Tasks as straight-line code: what runs, in which order, and whose error it is."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.training import batches, train
from torch import nn

from meshweave.errors import StepError
from meshweave.runtime.executor import Env, Slot, Task, environment
from meshweave.runtime.session import RunOptions
from meshweave.runtime.straight_line import straight_line


def task(function: Any, args: tuple[Any, ...], out: int, frees: tuple[int, ...] = (), **kwargs: Any) -> Task:
    node = torch.fx.Graph().call_function(function, args)
    return Task(node, function, args, kwargs, (out,), frees, False)


def never(task: Task, env: Env) -> None:
    raise AssertionError("no communication")


def test_operands_may_be_slots_numbers_lists_and_anything_else() -> None:
    seen: list[Any] = []

    def note(*args: Any, **kwargs: Any) -> str:
        seen.append((args, kwargs))
        return "result"

    nan = float("nan")
    tasks = [
        task(note, (Slot(0), 2, 1.5, nan, None, True, "text'"), 1),
        task(note, ([Slot(1), [Slot(0), 3]], (Slot(1),)), 2, (0, 1), dtype=torch.float64, other=Slot(0)),
    ]
    tasks[1] = replace(tasks[1], is_renewal=True)
    env: Env = ["first", None, None]
    finished: list[tuple[int, Task]] = []
    straight_line(tasks, 0, never)(env, lambda i, done: finished.append((i, done)))
    assert seen[0] == (("first", 2, 1.5, nan, None, True, "text'"), {})
    assert seen[1] == ((["result", ["first", 3]], ["result"]), {"dtype": torch.float64, "other": "first"})
    assert env == [None, None, "result"]
    assert finished == [(0, tasks[1])]


def test_an_error_names_the_task_that_fails() -> None:
    def fail(x: float) -> float:
        raise ValueError(f"not {x}")

    tasks = [task(torch.neg, (Slot(0),), 1), task(fail, (3.0,), 2), task(torch.neg, (Slot(1),), 3)]
    for each in tasks:
        each.node.meta["origin"] = None
    env: Env = [torch.ones(1), None, None, None]
    with pytest.raises(StepError) as raised:
        straight_line(tasks, 5, never)(env, None)
    assert "fail failed on device 5" in str(raised.value)
    assert "ValueError: not 3.0" in str(raised.value)
    assert env[3] is None


def test_no_tasks_do_nothing() -> None:
    straight_line([], 0, never)([], None)


def test_a_step_frees_what_is_dead_and_keeps_no_intermediate_value() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6))
    step, _ = train(
        model,
        [{"input": b["x"], "y": b["y"]} for b in batches(1, (4, 6), (4, 6))],
        "dp=1",
        run=RunOptions(backend="eager"),
    )
    compiled = step.session.ranks[0]
    env = environment(compiled, 0)
    sizes = {slot: item.spec.shape for slot, item in zip(compiled.inputs, compiled.graph.inputs, strict=True)}
    for slot, shape in sizes.items():
        env[slot] = torch.ones(shape)
    straight_line(compiled.tasks["forward"], 0, never)(env, None)
    freed = {slot for each in compiled.tasks["forward"] for slot in each.frees}
    assert freed
    assert all(env[slot] is None for slot in freed)
