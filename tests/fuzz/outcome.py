"""What comes of a program: right, refused, wrong or a crash. Run as a module it tries many, each in its own process.

python -m tests.fuzz.outcome 0 500            programs 0 to 499
python -m tests.fuzz.outcome 17 --show        one program, printed, its error with the whole trace
"""

from __future__ import annotations

import argparse
import multiprocessing
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass
from time import perf_counter

import torch
from tests.fuzz.judge import compiled, differences, eagerly, widened
from tests.fuzz.programs import any_program
from tests.test_autocast import RoundsFirst

from meshweave.errors import MeshweaveError, StepError, VerifyError

SECONDS = 400.0
GOOD = ("right", "refused")


@dataclass(frozen=True)
class Outcome:
    """`kind` is right, refused (a MeshweaveError that is no bug of ours), wrong, crash, hang or unsound (eager PyTorch
    cannot run it)."""

    seed: int
    kind: str
    text: str = ""
    seconds: float = 0.0

    def __str__(self) -> str:
        again = f"python -m tests.fuzz.outcome {self.seed} --show"
        return f"program {self.seed}: {self.kind} ({self.seconds:.1f} s) {self.text}\n  {again}"


def outcome(seed: int) -> Outcome:
    """What comes of the program of a seed, in this process."""
    began = perf_counter()

    def done(kind: str, text: str = "") -> Outcome:
        return Outcome(seed, kind, text, perf_counter() - began)

    try:
        program = any_program(seed)
        eagerly(program)
    except Exception:
        return done("unsound", traceback.format_exc())
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # PyTorch warns of itself when Inductor is imported (torch/utils/mkldnn.py), as pyproject.toml says.
            warnings.filterwarnings("ignore", "`torch.jit.script(_method)?` is deprecated", DeprecationWarning)
            got = compiled(program)
    except MeshweaveError as error:
        is_ours = isinstance(error, (VerifyError, StepError))  # what the compiler wrote breaks a rule, or does not run
        return done("crash" if is_ours else "refused", f"{type(error).__name__}: {error}")
    except Exception as error:
        last = traceback.format_exc().strip().splitlines()[-14:]
        return done("crash", f"{type(error).__name__}: {str(error)[:400]}\n" + "\n".join(last))
    expected = eagerly(program, got.in_parts)
    wrong = differences(program, got, expected)
    if wrong and "precision" in program.settings.options:
        # Adam makes a whole step of a gradient's last digit: with the one rounding that is known, PyTorch does so too.
        # What differs between its own two roundings (a gradient that is 0 but for rounding) may be anything.
        rounded = eagerly(any_program(seed), got.in_parts, RoundsFirst)
        uncertain = {_place(text) for text in differences(program, rounded, expected, share=0.25)}
        wrong = [text for text in differences(program, got, rounded) if _place(text) not in uncertain]
    if wrong and program.settings.dtype == torch.float32 and "precision" not in program.settings.options:
        # A gradient that is 0 but for rounding (a norm over one element) may be anything in float32.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = widened(any_program(seed))
            got = compiled(program)
            wrong = differences(program, got, eagerly(program, got.in_parts))
    return done("wrong", "\n".join(wrong[:6])) if wrong else done("right")


def _place(difference: str) -> str:
    return difference.partition(":")[0]


def _send(seed: int, pipe: multiprocessing.connection.Connection) -> None:
    torch.set_num_threads(1)
    pipe.send(outcome(seed))


def isolated(seed: int, seconds: float = SECONDS) -> Outcome:
    """The same in a process that is ended when its time is up."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(seed, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv() if ours.poll(seconds) else Outcome(seed, "hang", f"no result in {seconds:g} s", seconds)
    except EOFError:
        return Outcome(seed, "crash", f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("first", type=int)
    parser.add_argument("end", type=int, nargs="?")
    parser.add_argument("--show", action="store_true")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.show:
        print(any_program(asked.first))
        found = outcome(asked.first)
        print(found)
        return found.kind not in GOOD
    counts: Counter[str] = Counter()
    for seed in range(asked.first, asked.end or asked.first + 1):
        found = isolated(seed)
        counts[found.kind] += 1
        print(found if found.kind != "right" else f"{seed} right ({found.seconds:.1f} s)", flush=True)
    print(dict(counts))
    return any(kind not in GOOD for kind in counts)


if __name__ == "__main__":
    raise SystemExit(main())
