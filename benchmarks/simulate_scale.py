"""Compile and simulate Llama-70B, 80 layers, with pipeline, ZeRO-3 and tensor parallelism on 1,024 GPUs.

python benchmarks/simulate_scale.py            # writes results/simulate_scale.md
"""

from __future__ import annotations

import resource
import time
from pathlib import Path
from statistics import median

import torch
from predictions import MODELS
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.result import Simulation
from meshweave.cost.simulate.step import times_of
from meshweave.cost.simulate.tasks import lower_tasks
from meshweave.passes import pass_list_of
from meshweave.program import Program
from meshweave.whatif import simulate

TABLE = Path(__file__).parent / "results" / "simulate_scale.md"


def compiled(mesh_text: str, microbatches: int) -> Program:
    kv = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "use_cache": False}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODELS["70B"], **kv))
    mesh = mw.Mesh(mesh_text)
    ids = torch.empty(mesh.size("fsdp") * microbatches, 8192, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    options = CaptureOptions(
        clip_grad_norm=1.0, accumulate=microbatches, precision=mw.Precision(param_dtype=torch.bfloat16)
    )
    batch = {"input_ids": ids, "labels": ids}
    passes = pass_list_of("recompute=full,prefetch=1")
    return build_program(
        StepSource(model, lambda out, batch: out.loss),
        batch,
        optimizer,
        Target(mesh, None, load_profile("h100")),
        options,
        pass_list=passes,
    )


def main() -> None:
    lines = [
        "| mesh | compile s | simulate s | both | peak RSS GB | spans | step s | pipeline |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for mesh, microbatches, pipeline in (("pp=4,fsdp=32,tp=8", 4, "1f1b"), ("fsdp=128,tp=8", 1, "sequential")):
        began = time.perf_counter()
        program = compiled(mesh, microbatches)
        middle = time.perf_counter()
        found: Simulation = simulate(program, "h100", pipeline=pipeline)  # type: ignore[arg-type]
        end = time.perf_counter()
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        lines.append(
            f"| {mesh} | {middle - began:.1f} | {end - middle:.1f} | {end - began:.1f} | {rss:.2f} "
            f"| {len(found.spans):,} | {found.seconds:.3f} | {pipeline} |"
        )
        print(lines[-1], flush=True)
    machine = load_profile("h100")
    tasks = lower_tasks(program.roles, machine, "compiled")
    times = []
    for _ in range(5):
        began = time.perf_counter()
        times_of(tasks, machine.compute_slowdown)
        times.append(time.perf_counter() - began)
    each = median(times) / len(tasks.tasks) * 1e6
    clock = f"The clock alone: {len(tasks.tasks):,} tasks in {median(times):.3f} s ({each:.1f} us each)."
    print(clock)
    when = f"`python benchmarks/simulate_scale.py`, {time.strftime('%Y-%m-%d')}, 2 cores, torch {torch.__version__}"
    head = f"# Llama-70B on 1,024 GPUs\n\n{when}. 80 layers, full recomputation, h100.\n"
    TABLE.write_text("\n".join([head, *lines, "", clock]) + "\n")


if __name__ == "__main__":
    main()
