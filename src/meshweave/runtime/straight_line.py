"""The tasks of a part as straight-line Python code, which costs little more than the calls of their ops.

A loop over tasks looks up operands, distinguishes kinds of tasks and releases dead values by code that runs anew for
each task: a quarter of an eager step's time where ops are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from meshweave.errors import MeshweaveError
from meshweave.runtime.executor import After, Env, Slot, Task, failed

FILE = "<meshweave: tasks of a part>"
Run = Callable[[Env, After | None], None]


def straight_line(tasks: Sequence[Task], device: int, others: Callable[[Task, Env], None]) -> Run:
    """A function that runs tasks on an environment of a device, and calls `after(0, task)` after each that renews
    parameters or optimizer state, if there is an `after`. `others(task, env)` runs a communication or a task of several
    nodes.

    The function raises StepError with the op and source line of the task that fails."""
    names: dict[str, Any] = {"others": others}
    lines, of_line = ["def run(e, after):"], [tasks[0] if tasks else None]

    def emit(text: str, task: Task) -> None:
        lines.append("    " + text)
        of_line.append(task)

    for i, task in enumerate(tasks):
        names[f"t{i}"] = task
        if task.fused is not None or task.is_start or task.is_wait:
            emit(f"others(t{i}, e)", task)
        else:
            names[f"f{i}"] = task.function
            emit(f"e[{task.out}] = f{i}({_arguments(task.args, task.kwargs, names)})", task)
        if task.is_renewal:
            emit(f"if after: after(0, t{i})", task)
        if task.frees:
            emit("".join(f"e[{slot}] = " for slot in task.frees) + "None", task)
    lines.append("    return None")
    exec(compile("\n".join(lines), FILE, "exec"), names)  # the text has names of its own only, and numbers
    code: Run = names["run"]

    def run(env: Env, after: After | None) -> None:
        try:
            code(env, after)
        except MeshweaveError:
            raise
        except Exception as error:
            task = of_line[_line_of(error) - 1]
            assert task is not None
            raise failed(task, f"failed on device {device}", error) from error

    return run


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], names: dict[str, Any]) -> str:
    return ", ".join([*(_text(x, names) for x in args), *(f"{name}={_text(x, names)}" for name, x in kwargs.items())])


def _text(value: Any, names: dict[str, Any]) -> str:
    """A value as an expression over `e`; what is no plain number gets a name."""
    if type(value) is Slot:
        return f"e[{value.index}]"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_text(item, names) for item in value) + "]"
    if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
        return repr(value)
    name = f"c{len(names)}"
    names[name] = value
    return name


def _line_of(error: BaseException) -> int:
    """The line of the code that an error passed through."""
    line, trace = 1, error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            line = trace.tb_lineno
        trace = trace.tb_next
    return line
