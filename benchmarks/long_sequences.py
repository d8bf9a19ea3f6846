"""torchtitan's context-parallel runs of Llama 3 8B and 405B, predicted with each way to do attention; nothing fitted.

python benchmarks/long_sequences.py              # all rows; writes results/long_sequences.md
python benchmarks/long_sequences.py heads 65536  # ways and sequences whose names hold these
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
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
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.result import Simulation
from meshweave.errors import PlanError
from meshweave.passes import pass_list_of
from meshweave.place.plan_text import parse_plan
from meshweave.whatif import simulate

TABLE = Path(__file__).parent / "results" / "long_sequences.md"
SOURCE = (
    "pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md (commit 31a17bf): 8 H100 at 500 W, float8, "
    "compile, full recomputation, batch 1 per data-parallel rank; torch's own context parallelism; 405B on 512 GPUs "
    "with 8 microbatches under 1F1B and asynchronous TP, which is not modelled"
)
WAYS = ("gather", "ring", "gather:none", "ring:none", "heads")


@dataclass(frozen=True)
class Row:
    """Tokens of a sequence, devices of one, and the throughput in tokens per second and GPU."""

    model: str
    sequence: int
    cp: int
    tokens_per_s: float

    @property
    def mesh(self) -> str:
        rest = f"fsdp={8 // self.cp},cp={self.cp}"
        return rest if self.model == "llama3-8b" else f"pp=8,{rest},tp=8"


@dataclass(frozen=True)
class Shape:
    """How a model was run: its layers (of the fullest stages, times the stages), those of what is simulated,
    microbatches of one sequence, and the plan beside that for sequences."""

    layers: int
    few: tuple[int, int]
    microbatches: int
    plan: str


SHAPES = {
    "llama3-8b": Shape(32, published.FEW, 1, published.PLAN),
    # 126 layers: six stages have 16. Local batch 8 in microbatches of one sequence, as 1F1B takes them.
    "llama3-405b": Shape(128, (8, 16), 8, f"stages:pp+{published.PLAN}+hf_tp:tp+sequence:tp"),
}
LADDER = ((32768, 1), (65536, 2), (131072, 4), (262144, 8))
ROWS = tuple(
    Row(model, *step, tokens)
    for model, published_tokens in (("llama3-8b", (3890, 2540, 1071, 548)), ("llama3-405b", (76, 47, 31, 16)))
    for step, tokens in zip(LADDER, published_tokens, strict=True)
)


def simulated(row: Row, way: str, layers: int) -> Simulation:
    profile, shape = load_profile("h100-500w").with_attention("flash2"), SHAPES[row.model]
    run = published.Run("", "", row.model, row.sequence, "", 1, 1, "full", "h100-500w", row.tokens_per_s, False)
    model, mesh = published.model_of(run, layers), mw.Mesh(row.mesh)
    ids = torch.empty(8 // row.cp * shape.microbatches, row.sequence, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    options = CaptureOptions(
        clip_grad_norm=1.0,
        accumulate=shape.microbatches,
        precision=mw.Precision(accumulate_in="shards", param_dtype=torch.bfloat16),
    )
    plan = parse_plan(f"{shape.plan}+cp:cp:{way}+shard_state:cp")
    example: dict[str, Any] = {"input_ids": ids, "labels": ids}
    passes = pass_list_of("recompute=full,prefetch=1")
    source, target = StepSource(model, published.loss), Target(mesh, plan, profile)
    program = build_program(source, example, optimizer, target, options, pass_list=passes)
    pipeline: Any = "1f1b" if "pp" in mesh.axis_names else "sequential"
    dtype = torch.float8_e4m3fn
    return simulate(program, profile, fusion="blocks", matmul_dtype=dtype, buckets="blocks", pipeline=pipeline)


def predicted(row: Row, way: str) -> float:
    """Tokens per second and GPU of the whole model: on the line through those of few layers."""
    shape, devices = SHAPES[row.model], mw.Mesh(row.mesh).num_devices
    few, more = (simulated(row, way, layers).seconds for layers in shape.few)
    past = (shape.layers - shape.few[1]) / (shape.few[1] - shape.few[0])
    tokens = row.sequence * 8 // row.cp * shape.microbatches
    return tokens / devices / (more + past * (more - few))


def main() -> None:
    chosen = sys.argv[1:]
    found: dict[tuple[Row, str], float] = {}
    for row in ROWS:
        for way in WAYS:
            if not all(word in f"{row.model} {way} {row.sequence}" for word in chosen):
                continue
            if row.cp == 1 and (row, WAYS[0]) in found:  # one device has the sequence
                found[row, way] = found[row, WAYS[0]]
                continue
            try:
                found[row, way] = predicted(row, way)
            except PlanError as error:  # more devices than key heads
                print(f"{row.model} {row.sequence} cp={row.cp} {way}: {error}", flush=True)
                continue
            print(
                f"{row.model} {row.sequence} cp={row.cp} {way}: {cell(found, row, way)} of {row.tokens_per_s:,.0f}",
                flush=True,
            )
    if not chosen:
        write(found)


def cell(found: Mapping[tuple[Row, str], float], row: Row, way: str) -> str:
    if (row, way) not in found:
        return "-"
    return f"{found[row, way]:,.0f} ({found[row, way] / row.tokens_per_s - 1:+.1%})"


def errors_of(found: Mapping[tuple[Row, str], float], way: str) -> str:
    """The median and the largest error of a way, over the rows in which a sequence is cut."""
    errors = [abs(found[row, way] / row.tokens_per_s - 1) for row in ROWS if (row, way) in found and row.cp > 1]
    return f"{median(errors):.1%} ({max(errors):.1%})"


def write(found: Mapping[tuple[Row, str], float]) -> None:
    lines = [
        "# Long sequences that others trained on, predicted",
        "",
        f"`python benchmarks/long_sequences.py`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}. Tokens per "
        f"second and GPU of Llama 3, with each way to do attention. Source: {SOURCE}. Nothing is fitted. Gather and "
        "ring are balanced from head and tail; with `:none` the sequence is held in its order, so that the last device "
        "has most work. Heads are balanced as they are; 405B has a key head on each of 8 devices of tp, which leaves "
        "none to exchange.",
        "",
        "| model | tokens | mesh | published | " + " | ".join(WAYS) + " |",
        "|---|---|---|---|" + "---|" * len(WAYS),
    ]
    for row in ROWS:
        cells = [cell(found, row, way) for way in WAYS]
        lines.append(
            f"| {row.model} | {row.sequence:,} | {row.mesh} | {row.tokens_per_s:,.0f} | " + " | ".join(cells) + " |"
        )
    lines.append("| | | | median (largest) error, cp > 1 | " + " | ".join(errors_of(found, way) for way in WAYS) + " |")
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
