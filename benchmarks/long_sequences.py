"""torchtitan's context-parallel runs of Llama 3 8B, predicted with each way to do attention: nothing is fitted.

python benchmarks/long_sequences.py              # all rows; writes results/long_sequences.md
python benchmarks/long_sequences.py heads 65536  # ways and sequences whose names hold these
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import published
import torch

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.hardware import load_profile
from meshweave.passes import pipeline_of
from meshweave.sharding.plan_text import parse_plan
from meshweave.simulate.result import Simulation
from meshweave.whatif import simulate

TABLE = Path(__file__).parent / "results" / "long_sequences.md"
SOURCE = (
    "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (commit 31a17bf): 8 H100 at 500 W, float8, "
    "compile, full recomputation, batch 1 per data-parallel rank; torch's own context parallelism"
)
WAYS = ("gather", "ring", "heads")


@dataclass(frozen=True)
class Row:
    """Tokens of a sequence, devices of one, and the throughput in tokens per second and GPU."""

    sequence: int
    cp: int
    tokens_per_s: float


ROWS = (Row(32768, 1, 3890), Row(65536, 2, 2540), Row(131072, 4, 1071), Row(262144, 8, 548))


def simulated(row: Row, way: str, layers: int) -> Simulation:
    profile = load_profile("h100-500w").with_attention("flash2")
    run = published.Run("", "", "llama3-8b", row.sequence, "", 1, 1, "full", "h100-500w", row.tokens_per_s, False)
    model, mesh = published.model_of(run, layers), mw.Mesh(f"fsdp={8 // row.cp},cp={row.cp}")
    ids = torch.empty(8 // row.cp, row.sequence, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    options = CaptureOptions(clip_grad_norm=1.0, accumulate_in="shards", param_dtype=torch.bfloat16)
    plan = parse_plan(f"{published.PLAN}+cp:cp:{way}+shard_state:cp")
    example: dict[str, Any] = {"input_ids": ids, "labels": ids}
    passes = pipeline_of(recompute="full", prefetch=1)
    source, target = StepSource(model, published.loss), Target(mesh, plan, profile)
    program = build_program(source, example, optimizer, target, options, pipeline=passes)
    return simulate(program, profile, fusion="blocks", matmul_dtype=torch.float8_e4m3fn, buckets="blocks")


def predicted(row: Row, way: str) -> float:
    """Tokens per second and GPU of the whole model: on the line through those of few layers."""
    few, more = (simulated(row, way, layers).seconds for layers in published.FEW)
    past = (32 - published.FEW[1]) / (published.FEW[1] - published.FEW[0])
    return row.sequence / row.cp / (more + past * (more - few))


def main() -> None:
    chosen = sys.argv[1:]
    found: dict[tuple[Row, str], float] = {}
    for row in ROWS:
        for way in WAYS:
            if all(word in f"{way} {row.sequence}" for word in chosen):
                found[row, way] = predicted(row, way)
                error = found[row, way] / row.tokens_per_s - 1
                shown = f"{found[row, way]:,.0f} of {row.tokens_per_s:,.0f} ({error:+.1%})"
                print(f"{row.sequence} cp={row.cp} {way}: {shown}", flush=True)
    if not chosen:
        write(found)


def write(found: dict[tuple[Row, str], float]) -> None:
    lines = [
        "# Long sequences that others trained on, predicted",
        "",
        f"`python benchmarks/long_sequences.py`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}. Llama 3 8B, "
        f"tokens per second and GPU, with each way to do attention. Source: {SOURCE}. Nothing is fitted. Our gather "
        "and ring hold the sequence in its order, so that under a causal mask the last device has most work; heads are "
        "balanced.",
        "",
        "| tokens | mesh | published | " + " | ".join(WAYS) + " |",
        "|---|---|---|" + "---|" * len(WAYS),
    ]
    for row in ROWS:
        cells = [f"{found[row, way]:,.0f} ({found[row, way] / row.tokens_per_s - 1:+.1%})" for way in WAYS]
        mesh = f"fsdp={8 // row.cp},cp={row.cp}"
        lines.append(f"| {row.sequence:,} | {mesh} | {row.tokens_per_s:,.0f} | " + " | ".join(cells) + " |")
    medians = [median(abs(found[row, way] / row.tokens_per_s - 1) for row in ROWS) for way in WAYS]
    lines.append("| | | median error | " + " | ".join(f"{error:.1%}" for error in medians) + " |")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
