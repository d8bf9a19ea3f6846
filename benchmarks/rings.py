"""Matmuls beside collectives, taken apart and not, in real time: processes at 1 Gbit/s from each other, over Gloo.

    python benchmarks/rings.py [--write] [--quick] [--ranks 2] [--profile machine.toml] [--json rows.jsonl]

An all-gather and the matmul of what it brings, a matmul and the reduce-scatter of its result, a matmul and the
all-reduce of its result, and the same with a second matmul of what the all-reduce brings. Every shape runs whole, in
every way in which `optimize.decompose` can take it apart, and as its gate chooses with the profile of a calibration
under the same condition; and the matmuls alone run without any communication. In one job all of these take their turns,
so that what disturbs the machine disturbs all alike; a run ends when the slowest process has ended it; every figure is
a median, every ratio the median of those of the rounds. Results are compared with those of the whole.

Matmuls run in two ways: on the processor, which the network needs too (where there is a core for each process), and on
a stand-in for an accelerator: the process sleeps for as long as a matmul takes at 40 GFLOP/s. Communication is real in
both.

Every process is in a network namespace of its own, with a link of 1 Gbit/s (veth and `tc tbf`; needs root): two joined
directly, four by a bridge; each has one thread. --write: results/rings.md, anew after each kind of pair. --quick: two
processes, 8 shapes, and a calibration that is short and coarse.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from links import Link, joined, running
from rings_worker import ALONE, COMPUTE, KINDS, PROCESSOR, STAND_IN, WHOLE, coarse, worker

TABLE = Path(__file__).parent / "results" / "rings.md"
NEAR = 1.05  # a choice is right if nothing that was measured is faster by more
# Demands: the share of communication that is hidden where compute covers it; of shapes in which the gate is right;
# and NEAR, what a choice to take apart may cost at worst.
COVERED_EFFICIENCY, RIGHT_SHARE = 0.85, 0.9


def measure(
    link: Link,
    count: int,
    computes: Sequence[str],
    is_quick: bool,
    profile: str,
    folder: Path,
    keep: Callable[[dict[str, Any]], None],
) -> None:
    """Hands every row to `keep`, as soon as the job that measured it has ended, however it did."""
    this = str(Path(__file__))
    if not profile:
        began, profile = time.monotonic(), str(folder / f"machine{count}.toml")
        calibrate = ("-m", "meshweave", "calibrate", "-o", profile)
        print(link.run(*((this, "--coarse", profile) if is_quick else calibrate)), flush=True)
        print(f"calibrated in {time.monotonic() - began:.0f} s", flush=True)
    for compute, kind in product(computes, KINDS):
        if compute == PROCESSOR and count > (os.cpu_count() or 1):
            continue  # compute of one would stand beside compute of another
        began, load, rows = time.monotonic(), running(), folder / f"rows {count} {compute} {kind}"
        quick = ["--quick"] if is_quick else []
        job = ("--worker", kind, "--compute", compute, "--profile", profile, "--json", str(rows))
        try:
            link.run(this, *job, *quick)
        finally:
            for text in rows.read_text().splitlines() if rows.exists() else ():
                keep({"count": count, "load": load, **json.loads(text)})
        print(f"{kind}, {count} processes, {compute}: {time.monotonic() - began:.0f} s", flush=True)


# What was found


def ratio(row: dict[str, Any], name: str, other: str) -> float:
    """The median over the rounds of what one takes over what the other does."""
    samples = row["samples"]
    return statistics.median(a / b for a, b in zip(samples[name], samples[other], strict=True))


def efficiency(row: dict[str, Any], name: str) -> float:
    """The share of the communication that a way hides: 1 where it takes as long as compute alone."""
    alone, whole = row["seconds"][ALONE], row["seconds"][WHOLE]
    return 1 - (row["seconds"][name] - alone) / (whole - alone)


def is_covered(row: dict[str, Any], name: str) -> bool:
    """Whether every message has compute of a chunk beside it that lasts at least as long, by what was measured: all
    compute alone, and what the collective adds to it. Never so where the first or last part of a pipeline, or the
    second half of an all-reduce that nothing follows, has no compute beside it."""
    if "pipelined" in name or row["kind"] == "all_reduce":
        return False
    alone, num_steps = row["seconds"][ALONE], row["steps"][name]
    return bool(alone / num_steps >= (row["seconds"][WHOLE] - alone) / (num_steps - 1))


def best(row: dict[str, Any]) -> str:
    """The fastest way to take it apart."""
    return min((name for name in row["seconds"] if name not in (WHOLE, ALONE)), key=row["seconds"].__getitem__)


def is_right(row: dict[str, Any]) -> bool:
    """Whether nothing that was measured is faster than the choice by more than NEAR."""
    return all(ratio(row, row["choice"], name) <= NEAR for name in (WHOLE, best(row)))


HEAD = (
    "| n | matmuls on | pair | rows x inner x columns | compute | whole | best way apart | ms | efficiency | choice "
    "| ms | efficiency | priced: whole | choice | right | load |\n|" + "---|" * 16
)


def line(row: dict[str, Any]) -> str:
    seconds, choice, way = row["seconds"], row["choice"], best(row)
    is_apart = choice != WHOLE
    cells = (
        row["count"],
        row["compute"],
        row["kind"].replace("_", "-"),
        row["case"],
        _ms(seconds[ALONE]),
        _ms(seconds[WHOLE]),
        way,
        _ms(seconds[way]),
        f"{efficiency(row, way):.0%}",
        choice,
        _ms(seconds[choice]),
        f"{efficiency(row, choice):.0%}{' covered' if is_covered(row, choice) else ''}" if is_apart else "",
        _ms(row["before"]),
        _ms(row["prices"][choice]) if is_apart else f"best {_ms(min(row['prices'].values()))}",
        "yes" if is_right(row) else "no",
        f"{row['load']:.1f}",
    )
    return f"| {' | '.join(map(str, cells))} |"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


Must = tuple[str, str, str, bool]


def musts(rows: Sequence[dict[str, Any]]) -> list[Must]:
    """What is to be reached: (what, got, wanted, whether it holds)."""
    taken = [row for row in rows if row["choice"] != WHOLE]
    covered = sorted(efficiency(row, row["choice"]) for row in taken if is_covered(row, row["choice"]))
    worst = sorted(ratio(row, row["choice"], WHOLE) for row in taken)
    right = sum(map(is_right, rows))
    found: list[Must] = []
    if covered:
        reached = sum(one >= COVERED_EFFICIENCY for one in covered)
        middle = statistics.median(covered)
        got = f"median {middle:.0%}, least {covered[0]:.0%}; {reached} of {len(covered)} shapes reach it"
        wanted, where = f">= {COVERED_EFFICIENCY:.0%}", "where a chunk's compute covers its message"
        found.append((f"efficiency {where}, median", got, wanted, middle >= COVERED_EFFICIENCY))
        found.append((f"efficiency {where}, each shape", got, wanted, covered[0] >= COVERED_EFFICIENCY))
    if worst:
        slower = sum(one > NEAR for one in worst)
        got = f"worst {worst[-1]:.3f}, median {statistics.median(worst):.3f}; {slower} of {len(worst)} shapes above"
        found.append(("time over the whole, where the gate says go", got, f"<= {NEAR:g}", not slower))
    got = f"{right} of {len(rows)} shapes ({right / len(rows):.0%})"
    found.append(
        (
            f"gate right: nothing measured is faster than its choice by {NEAR - 1:.0%}",
            got,
            f">= {RIGHT_SHARE:.0%}",
            right >= RIGHT_SHARE * len(rows),
        )
    )
    return found


def demanded(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those on the stand-in; where there are none, all."""
    return [row for row in rows if row["compute"] == STAND_IN] or list(rows)


def must_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    head = ["| demand | got | wanted | met |", "|---|---|---|---|"]
    return [
        *head,
        *(
            f"| {what} | {got} | {wanted} | {'yes' if holds else '**no**'} |"
            for what, got, wanted, holds in musts(rows)
        ),
    ]


ABOUT = """\
Gloo, float32, one thread per process. Milliseconds, medians of rounds in which all take turns. Efficiency is the share
of the communication that is hidden, 1 - (apart - compute) / (whole - compute); it is covered where every message has
compute of a chunk beside it that lasts as long (never in a pipeline of k parts, which can hide 1 - 1 / k, nor in the
second half of an all-reduce that nothing follows). The choice is the gate's, with a profile calibrated right before
under the same condition; it is right where nothing that was measured is faster by more than 5%. The load is that of
other processes, in processors.

Communication is real. Matmuls are on a stand-in for an accelerator, a process that sleeps for as long as they take at
40 GFLOP/s (what else it computes takes no time, and fills memory that is there), or on the processor. There the network
takes its part of the same cores, for moving 1 Gbit/s is work: calibration finds compute beside communication to take
1.2 to 1.3 times as long, so a transfer that is hidden in full still costs a quarter of its time. The first table is
that of the stand-in; those of each condition, the processor's too, stand below with the same demands."""


def page(rows: Sequence[dict[str, Any]], is_quick: bool) -> str:
    counts = sorted({row["count"] for row in rows})
    parts = [
        "# Matmuls beside collectives, taken apart",
        "",
        f"`python benchmarks/rings.py{' --quick' if is_quick else ''}`, {time.strftime('%Y-%m-%d')}: "
        f"{' and '.join(map(str, counts))} processes on {os.cpu_count()} cores, 1 Gbit/s between them,",
        ABOUT,
        "",
        *must_lines(demanded(rows)),
        "",
    ]
    for count, compute in product(counts, COMPUTE):
        if those := [row for row in rows if row["count"] == count and row["compute"] == compute]:
            parts += [f"{count} processes, {compute}:", "", *must_lines(those), ""]
    return "\n".join([*parts, HEAD, *map(line, rows), ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write results/rings.md")
    parser.add_argument("--quick", action="store_true", help="two processes, 8 shapes, a coarse calibration")
    parser.add_argument("--ranks", type=int, action="append", help="numbers of processes; 2 and 4")
    parser.add_argument("--compute", choices=COMPUTE, action="append", help="where matmuls run; on both")
    parser.add_argument("--profile", default="", help="a file of `meshweave calibrate`, in place of a calibration")
    parser.add_argument("--json", type=Path, help="add every figure to this file")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--coarse", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.coarse:
        coarse(options.coarse)
        return 0
    if options.worker:
        (compute,) = options.compute
        worker(options.worker, compute, options.quick, options.profile, options.json)
        return 0
    rows: list[dict[str, Any]] = []

    def keep(row: dict[str, Any]) -> None:
        rows.append(row)
        print(line(row), flush=True)
        if options.json:
            with options.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
        if options.write:
            TABLE.write_text(page(rows, options.quick))

    print(HEAD, flush=True)
    for count in options.ranks or ((2,) if options.quick else (2, 4)):
        with joined(count) as link, tempfile.TemporaryDirectory() as folder:
            measure(link, count, options.compute or COMPUTE, options.quick, options.profile, Path(folder), keep)
    print(page(rows, options.quick))
    tables = [[row for row in rows if row["compute"] == compute] for compute in COMPUTE]
    return 0 if all(holds for table in tables if table for *_, holds in musts(table)) else 1


if __name__ == "__main__":
    raise SystemExit(main())
