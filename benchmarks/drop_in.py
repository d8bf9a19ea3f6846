"""torch.compile with Inductor against the drop-in as it comes: steps of 2 processes over loopback, in wall time.

    python benchmarks/drop_in.py [--write] [--json] [--layers 6] [--steps 12] [--only fsdp]

The Llama of step_time.py by DDP, FSDP2 and torch's tensor parallelism. Both ways have a job of their own with the same
weights and take their steps on the same batches in turns, of two steps, of which the second counts; the ratio is the
median of those of the turns. Losses must agree to 1e-5, or the command fails. --write: results/drop_in.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from links import loopback, running
from step_time_worker import COMPILED, DROP_IN, END, PEERS, START, STEP, Config

TABLE = Path(__file__).parent / "results" / "drop_in.md"
SAME_LOSS = 1e-5  # relative: sums in another order in float32


def measured(config: Config, cache: str) -> dict[str, Any]:
    """Seconds of both ways by turn, and their losses."""
    load, answers = running(), {}
    script = str(Path(__file__).with_name("step_time.py"))
    with loopback() as link, ExitStack() as stack:
        jobs = {}
        for way in (COMPILED, DROP_IN):
            variant = f"{PEERS[config.scheme][0]}, {way}"
            command = (script, "--worker", json.dumps(asdict(config)), "--cache", cache, "--variant", variant)
            jobs[way] = stack.enter_context(link.talk(*command))
            answers[way] = [jobs[way].ask(START)]
        for i in range(config.warm_up - 1 + config.steps):
            for way in (COMPILED, DROP_IN) if i % 2 else (DROP_IN, COMPILED):
                answers[way].append(jobs[way].ask(STEP))
        for job in jobs.values():
            job.ask(END)
    seconds = {way: [answer["seconds"] for answer in its[config.warm_up :]] for way, its in answers.items()}
    ratios = [new / old for new, old in zip(seconds[DROP_IN], seconds[COMPILED], strict=True)]
    pairs = zip(answers[DROP_IN], answers[COMPILED], strict=True)
    return {
        "config": str(config), "way": PEERS[config.scheme][0], "load": load,
        "quartiles": statistics.quantiles(ratios, n=4),
        "medians": {way: statistics.median(its) for way, its in seconds.items()},
        "starts": {way: its[0]["seconds"] for way, its in answers.items()},
        "loss_difference": max(abs(new["loss"] / old["loss"] - 1) for new, old in pairs),
    }  # fmt: skip


def page(rows: list[dict[str, Any]]) -> str:
    parts = [
        "# The drop-in as it comes against Inductor",
        "",
        f"`python benchmarks/drop_in.py`: 2 processes on {os.cpu_count()} cores over loopback, one thread each, torch "
        f"{torch.__version__}; `torch.compile(backend=...)`, steps in turns. "
        "The load is that of other processes before the row, in processors.",
        "",
        "| model | way | inductor ms | meshweave ms | ratio by turn: median (middle half) | first loss s, inductor | "
        "meshweave | losses differ by | load |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        low, middle, high = row["quartiles"]
        cells = (
            row["config"], row["way"], *(f"{row['medians'][way] * 1e3:.0f}" for way in (COMPILED, DROP_IN)),
            f"{middle:.3f} ({low:.3f} - {high:.3f})", *(f"{row['starts'][way]:.0f}" for way in (COMPILED, DROP_IN)),
            f"{row['loss_difference']:.1e}", f"{row['load']:.1f}",
        )  # fmt: skip
        parts.append(f"| {' | '.join(cells)} |")
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", choices=("ddp", "fsdp", "tp"))
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for scheme in (options.only,) if options.only else ("ddp", "fsdp", "tp"):
            rows.append(measured(Config(scheme, 1, layers=options.layers, steps=options.steps), cache))
            print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    print(json.dumps(rows) if options.json else page(rows))
    if options.write:
        TABLE.write_text(page(rows))
    return 0 if max(row["loss_difference"] for row in rows) <= SAME_LOSS else 1


if __name__ == "__main__":
    raise SystemExit(main())
