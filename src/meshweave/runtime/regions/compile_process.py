"""Compiles regions in a process of its own, while the steps of this process run op by op: it fills Inductor's cache on
disk, from which this process then loads each region in a fraction of a second.

A process and not a thread: tracers replace methods of `torch.nn.Module` while they trace, and the user's modules run
meanwhile.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection
from contextlib import suppress
from inspect import isfunction
from io import BytesIO
from typing import Any
from weakref import finalize

from meshweave.interop import inductor_settings
from meshweave.interop.ops import find_operator, is_operator
from meshweave.runtime.regions.compiler import SEEN_INTO, Kernels, RegionCompiler, RegionFunction, load_inductor

_RUN = "from meshweave.runtime.regions import compile_process as it; it.main()"
_SHOWN = 300  # characters of what a process said that failed
_NICE = 10  # steps go first
_OPERATORS = {kernel: operator for operator, kernel in SEEN_INTO.items()}


def begin_compiling(compiler: RegionCompiler, functions: Collection[RegionFunction]) -> CompileProcess | None:
    """A process that compiles functions; None if it cannot, or if what it compiles would not be on a disk."""
    try:
        settings = inductor_settings.settings()
        if settings is None:
            return None
        return CompileProcess(rotate_to_own_share(list(functions)), compiler.kernels, settings)
    except Exception as error:  # whatever the user's settings raise that have no form of bytes
        compiler.note(f"regions are compiled before the first step, not beside steps ({type(error).__name__}: {error})")
        return None


def rotate_to_own_share(functions: list[RegionFunction]) -> list[RegionFunction]:
    """The functions, from those on that fall to this rank of its host: most are also those of the others, whose
    processes have compiled them when this one comes to them."""
    rank, num_ranks = (int(os.environ.get(name, "0")) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))
    first = rank * len(functions) // max(1, num_ranks)
    return functions[first:] + functions[:first]


class CompileProcess:
    """A process that compiles functions for the cache. It ends with them, or with this process."""

    def __init__(self, functions: Collection[RegionFunction], kernels: Kernels, settings: dict[str, Any]) -> None:
        """`settings` of `interop.inductor_settings`. Raises what pickle raises for what has no form of bytes."""
        message = pickle.dumps((os.getpid(), settings, kernels, [_dumped(function) for function in functions]))
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _RUN],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,  # Ctrl-C is for this process
        )
        errors: list[bytes] = []
        self._process, self._errors, self._end = process, errors, finalize(self, end_group, process)
        self._thread = threading.Thread(target=lambda: errors.append(process.communicate(message)[1]), daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> None:
        self._thread.join(seconds)

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def close(self) -> str:
        """End it. Returns why it failed, or an empty text."""
        self._end()
        self.wait()
        if not self._process.returncode:
            return ""
        last = b"".join(self._errors).decode(errors="replace").strip().splitlines()[-1:]
        return f"exit code {self._process.returncode}: {''.join(last)[:_SHOWN]}"


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a process and the C++ compilers that it runs, which would go on for seconds (not from a forked parent)."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def _dumped(function: RegionFunction) -> bytes:
    stream = BytesIO()
    _Pickler(stream).dump(function)
    return stream.getvalue()


class _Pickler(pickle.Pickler):
    """Operators and kernels by the operator's name: torch's have no other form in every version."""

    def persistent_id(self, obj: Any) -> str | None:
        if is_operator(obj):
            return str(obj)
        operator = _OPERATORS.get(obj) if isfunction(obj) else None
        return None if operator is None else f"kernel {operator}"


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: str) -> Any:
        operator = find_operator(pid.removeprefix("kernel "))
        return SEEN_INTO[operator] if pid.startswith("kernel ") else operator


# In the other process


def main() -> None:
    """Compile what stdin has. What fails is left to the process that asks: it says so to the user."""
    parent, settings, kernels, functions = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    os.nice(_NICE)
    inductor = load_inductor()
    with inductor_settings.with_settings(settings):
        for data in functions:
            try:
                _Unpickler(BytesIO(data)).load().compiled(inductor, kernels)
            except Exception as error:  # whatever fails, others are compiled
                print(f"{type(error).__name__}: {error}", file=sys.stderr)


def _watch(parent: int) -> None:
    """End with the process that asked."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.killpg(0, signal.SIGKILL)
