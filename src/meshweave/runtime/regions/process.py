"""A process that compiles regions into Inductor's disk cache, while steps run without them.

The training process then finds them in the cache. A crash of the compiler ends only this process. It ends with its
parent, when the parent's end of the pipe closes: regions, pickled, come on stdin, the number of each goes to stdout.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from threading import Thread
from typing import Any
from weakref import finalize

from meshweave.interop.lazy import load_inductor
from meshweave.interop.ops import find_operator, is_operator
from meshweave.ir.ops import KERNELS
from meshweave.runtime.regions.trace import RegionFunction

_NICE = 10
_HEADER_BYTES = 8
_OPS_OF_KERNELS = {id(kernel): op for op, kernel in KERNELS.items()}


class _Pickler(pickle.Pickler):
    """Pickles operators, and meshweave's kernels of them, by name."""

    def persistent_id(self, value: Any) -> tuple[bool, str] | None:
        if is_operator(value):
            return False, str(value)
        op = _OPS_OF_KERNELS.get(id(value))
        return None if op is None else (True, str(op))


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, name: tuple[bool, str]) -> Any:
        is_kernel, op_name = name
        op = find_operator(op_name)
        return KERNELS[op] if is_kernel else op


def dump(value: Any) -> bytes:
    """A value that contains operators as bytes, for a process that has registered the same operators."""
    file = BytesIO()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


def load(data: bytes) -> Any:
    """The value of `dump`. AttributeError for an operator that is not registered here."""
    return _Unpickler(BytesIO(data)).load()


@dataclass(slots=True, weakref_slot=True)
class CompilerProcess:
    """A process that compiles regions one after the other, beginning with the first of `functions`. `finished` are the
    keys of those that are done, including failures in Python; complete when it has ended. The region at which it
    crashed, and later regions, are not among them. The process ends once nothing refers to this object."""

    functions: Sequence[RegionFunction]
    finished: set[str] = field(default_factory=set)
    is_started: bool = False
    _process: subprocess.Popen[bytes] | None = None
    _reader: Thread | None = None

    def start(self) -> None:
        """Raises OSError if no process can be started, PickleError for functions that cannot be pickled."""
        self.is_started = True
        payload = dump((load_inductor().settings(), [dump(function) for function in self.functions]))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        process = subprocess.Popen(
            [sys.executable, "-c", _SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the training process
        )
        self._process = process
        keys = [function.key for function in self.functions]
        self._reader = Thread(
            target=_talk, args=(process, payload, keys, self.finished), name="meshweave: compiler", daemon=True
        )
        self._reader.start()
        finalize(self, process.terminate)

    @property
    def is_done(self) -> bool:
        return self.is_started and (self._reader is None or not self._reader.is_alive())

    @property
    def crash(self) -> int:
        """The number of the signal that ended it; 0 if none did."""
        code = self._process.returncode if self._process is not None else 0
        return -code if code and code < 0 else 0

    def wait(self) -> None:
        if self._reader is not None:
            self._reader.join()


def _talk(process: subprocess.Popen[bytes], payload: bytes, keys: Sequence[str], finished: set[str]) -> None:
    """Pass regions to a process, and add the key of each to `finished` when it is done, until the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(OSError):  # a crashed process does not read
        process.stdin.write(len(payload).to_bytes(_HEADER_BYTES, "big") + payload)
        process.stdin.flush()
    with process.stdout as lines:
        for line in lines:
            if line.strip().isdigit():  # not output of a library
                finished.add(keys[int(line)])
    process.wait()
    with suppress(OSError):
        process.stdin.close()


# Training has priority from the beginning, and nothing goes on without it: importing torch takes seconds of a core.
# Where Linux groups processes by session, only the group's niceness counts beside another session.
_SCRIPT = f"""
import os, signal, sys, threading
if sys.platform == "linux":
    os.nice({_NICE})
    try:
        with open("/proc/self/autogroup", "w") as group:
            group.write("{_NICE}")
    except OSError:
        pass
size = int.from_bytes(sys.stdin.buffer.read({_HEADER_BYTES}), "big")
payload = sys.stdin.buffer.read(size)

def end_with_the_parent():
    sys.stdin.buffer.read(1)
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=end_with_the_parent, daemon=True).start()
from meshweave.runtime.regions.process import main
main(payload)
"""


def give_way() -> None:
    """Give training priority: over this thread, on Linux, and over the processes that it starts."""
    with suppress(OSError):
        os.nice(_NICE)


def main(payload: bytes) -> None:
    """Compile the regions of a payload; print the number of each region when it is done."""
    out, sys.stdout = sys.stdout, sys.stderr  # output of a compiler is not a number
    inductor = load_inductor()
    settings, functions = load(payload)
    inductor.apply_settings(settings)
    for i, data in enumerate(functions):
        with suppress(Exception):  # the training process tries again, and reports the error
            function = load(data)
            function.compiled(inductor)
        print(i, file=out, flush=True)
