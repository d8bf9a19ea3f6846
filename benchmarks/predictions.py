"""Published training runs, predicted from public hardware figures alone.

    python benchmarks/predictions.py                 # all cases; writes results/predictions.md
    python benchmarks/predictions.py 8b-8            # programs whose name begins so; nothing is written

Every case is compiled from a Hugging Face configuration on the meta device and simulated. No figure is fitted to a run:
profiles come from data sheets, NCCL's constants and kernel papers (docs/hardware.md). Targets are those of torchtitan
(benchmarks/llama3_h100_202412 and asyncTP_llama3_h100_2025-06) and Megatron-Bridge (performance summary 25.11).
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.frameworks import FRAMEWORKS
from meshweave.cost.simulate.result import Simulation
from meshweave.passes import Decompose, Prefetch, Recompute, pass_list_of
from meshweave.place.plan_text import parse_plan
from meshweave.program import Program
from meshweave.whatif import simulate

TABLE = Path(__file__).parent / "results" / "predictions.md"
GIB = 2**30
MODELS = {  # published configurations of Llama 3
    "8B": {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32},
    "70B": {"num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672, "num_attention_heads": 64},
    "405B": {"num_hidden_layers": 126, "hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128},
}


@dataclass(frozen=True)
class Setup:
    """What is compiled: a model on a mesh. `batch` is per data-parallel device and microbatch."""

    name: str
    model: str
    mesh: str
    batch: int
    recompute: str
    profile: str
    plan: str = ""
    accumulate: int = 1
    prefetch: int = 1
    decompose: Decompose | None = None


@dataclass(frozen=True)
class Case:
    """A published figure (tokens/s/GPU, GiB reserved at most where given) and how it is simulated.

    Memory is torchtitan's `max_reserved` (components/metrics.py: reserved_bytes.all.peak). Its run_train.sh sets
    expandable_segments:True (not for the runs on H200); the allocator is simulated with its default settings.
    """

    setup: str
    what: str
    tokens_per_s: float
    fusion: str = "blocks"
    fp8: bool = False
    pipeline: str = "sequential"
    memory_gib: float = 0.0
    update: str = "fused"


# The async TP of torch (torch/distributed/_symmetric_memory) reads pieces of its peers straight, beside matmuls of the
# tensor-parallel group, and sends parts of a product as they are ready: no other group is taken apart.
ASYNC_TP = Decompose(all_gather=("direct",), reduce_scatter=("direct",), all_reduce=(), most_devices=8)
FSDP = "fsdp:fsdp+keep:lm_head+keep:embed_tokens+keep:norm"  # FSDP2 keeps what its root module holds
FSDP_TP = FSDP + "+hf_tp:tp+sequence:tp"
SETUPS = [
    Setup("8b-8", "8B", "fsdp=8", 2, "selective", "h100-500w", FSDP),
    Setup("8b-128", "8B", "fsdp=128", 2, "selective", "h100-500w", FSDP),
    Setup("70b-256", "70B", "fsdp=32,tp=8", 16, "full", "h100-500w", FSDP_TP),
    Setup("8b-64-tp", "8B", "fsdp=8,tp=8", 12, "selective", "h100-500w", FSDP_TP),
    Setup("async-70b-256", "70B", "fsdp=32,tp=8", 16, "full", "h100-500w", FSDP_TP, decompose=ASYNC_TP),
    Setup("async-8b-64", "8B", "fsdp=8,tp=8", 12, "selective", "h100-500w", FSDP_TP, decompose=ASYNC_TP),
    Setup("8b-32-h200", "8B", "fsdp=32", 2, "selective", "h200", FSDP),
    Setup("8b-64-h200", "8B", "fsdp=64", 2, "selective", "h200", FSDP),
    Setup("mb-8b-8", "8B", "fsdp=8", 1, "none", "h100"),
    Setup("mb-8b-8-gb200", "8B", "fsdp=8", 1, "none", "gb200"),
    Setup("mb-70b-64-gb200", "70B", "fsdp=64", 1, "none", "gb200"),
]
# torchtitan compiles the loss with its blocks, but not in the runs of 2024-12 (turned off in pytorch/torchtitan#755).
# Its optimizers were fused on demand alone (`--optimizer.fused`), which the runs of 2024-12 do not name; later always.
H100_2024: dict[str, Any] = {"update": "foreach"}
H200: dict[str, Any] = {"fusion": "blocks+loss", "fp8": True}
CASES = [
    Case("8b-8", "torchtitan 8B, 8 GPUs, FSDP, eager", 5762, fusion="eager", memory_gib=82.4, **H100_2024),
    Case("8b-8", "... + compile", 6667, memory_gib=77.0, **H100_2024),
    Case("8b-8", "... + compile + float8", 8532, fp8=True, memory_gib=76.8, **H100_2024),
    Case("8b-128", "torchtitan 8B, 128 GPUs, FSDP, eager", 5605, fusion="eager", memory_gib=67.0, **H100_2024),
    Case("8b-128", "... + compile", 6514, memory_gib=62.0, **H100_2024),
    Case("8b-128", "... + compile + float8", 8380, fp8=True, memory_gib=61.8, **H100_2024),
    Case("70b-256", "torchtitan 70B, 256 GPUs, FSDP 32 x TP 8, bf16", 597.3),
    Case("70b-256", "... float8 (2024-12)", 829, fp8=True, memory_gib=71.9, **H100_2024),
    Case("70b-256", "... float8 (2025-06)", 809.8, fp8=True),
    Case("8b-64-tp", "torchtitan 8B, 64 GPUs, FSDP 8 x TP 8, batch 12, bf16", 4378),
    Case("8b-64-tp", "... float8", 5078.1, fp8=True),
    Case("async-70b-256", "torchtitan 70B, 256 GPUs, FSDP 32 x TP 8, async TP, bf16", 652.4),
    Case("async-70b-256", "... float8 (2024-12)", 876, fp8=True, **H100_2024),
    Case("async-8b-64", "torchtitan 8B, 64 GPUs, FSDP 8 x TP 8, batch 12, async TP, bf16", 4809.4),
    Case("8b-32-h200", "torchtitan 8B, 32 H200, float8 (2025-06)", 10938, **H200, memory_gib=47.96),
    Case("8b-64-h200", "torchtitan 8B, 64 H200, float8 (2025-06)", 10753, **H200, memory_gib=46.97),
    Case("mb-8b-8", "Megatron-Bridge 8B, 8 H100, FSDP, FP8", 14451, fp8=True),
    Case("mb-8b-8-gb200", "Megatron-Bridge 8B, 8 GB200, FSDP, FP8", 31508, fp8=True),
    Case("mb-70b-64-gb200", "Megatron-Bridge 70B, 64 GB200, FSDP, FP8", 4312, fp8=True),
]
NOT_MODELLED = [
    "Fused kernels of Transformer Engine (FP8 casts in norms and activations): the Megatron rows are low. Their "
    "recomputation and offloading are not published with the figures: the 70B row is without, and would not fit.",
    "Data loading, CPU launch queues, other jobs on the network, drift of clocks under power limits, stragglers.",
]


TEXT = [
    "The runs of 2024-12 updated by foreach kernels, those of 2025 by fused ones. Memory: furthest off is 70B, whose",
    "7 GiB are not explained.",
]


def compiled(setup: Setup) -> Program:
    kv = {"num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192, "use_cache": False}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **MODELS[setup.model], **kv))
    mesh = mw.Mesh(setup.mesh)
    ids = torch.empty(setup.batch * mesh.size("fsdp") * setup.accumulate, 8192, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    options = CaptureOptions(
        clip_grad_norm=1.0, accumulate=setup.accumulate, precision=mw.Precision(param_dtype=torch.bfloat16)
    )
    return build_program(
        StepSource(model, lambda out, batch: out.loss),
        {"input_ids": ids, "labels": ids},
        optimizer,
        Target(mesh, parse_plan(setup.plan), load_profile(setup.profile)),
        options,
        pass_list=pass_list_of(
            [Recompute(setup.recompute), Prefetch(setup.prefetch), *filter(None, [setup.decompose])]
        ),
    )


def rows(wanted: str) -> Iterator[tuple[Case, Setup, Simulation]]:
    for setup in SETUPS:
        if not setup.name.startswith(wanted):
            continue
        began = time.perf_counter()
        program = compiled(setup)
        print(f"{setup.name}: compiled in {time.perf_counter() - began:.1f} s", flush=True)
        for case in (case for case in CASES if case.setup == setup.name):
            began = time.perf_counter()
            dtype = torch.float8_e4m3fn if case.fp8 else None
            its = FRAMEWORKS["megatron" if setup.name.startswith("mb-") else "torchtitan"]
            found = simulate(
                program,
                its.machine(load_profile(setup.profile)).with_update(case.update),
                fusion=None if its.name == "megatron" else case.fusion,  # type: ignore[arg-type]
                pipeline=case.pipeline,  # type: ignore[arg-type]
                matmul_dtype=dtype,
                buckets="blocks",  # Megatron's runs are those of its FSDP
                framework=its,
            )
            took = time.perf_counter() - began
            shown = found.tokens_per_s_per_gpu
            print(
                f"  {case.what}: {shown:,.0f} of {case.tokens_per_s:,.0f} ({shown / case.tokens_per_s - 1:+.1%}), step "
                f"{found.seconds:.3f} s, exposed {found.exposed_seconds:.3f} s, {found.peak_bytes / GIB:.1f} GiB "
                f"({found.reserved_bytes / GIB:.1f} reserved), "
                f"simulated in {took:.1f} s, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.1f} GB",
                flush=True,
            )
            yield case, setup, found


def write(found: list[tuple[Case, Setup, Simulation]]) -> None:
    errors = [one.tokens_per_s_per_gpu / case.tokens_per_s - 1 for case, _, one in found]
    lines = [
        "# Published runs, predicted",
        "",
        f"`python benchmarks/predictions.py`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}. Profiles are "
        "made of public figures; no figure is fitted to a run. Tokens per second and GPU.",
        "",
        f"Median absolute error {median(map(abs, errors)):.1%}, worst {max(map(abs, errors)):.1%}, {len(errors)} runs.",
        "",
        *TEXT,
        "",
        "| run | profile | published | predicted | error | step s | exposed s | memory GiB: published / predicted |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (case, setup, one), error in zip(found, errors, strict=True):
        peak = one.reserved_bytes / GIB
        published = case.memory_gib
        memory = f"{published:.1f} / {peak:.1f} ({peak / published - 1:+.1%})" if published else ""
        lines.append(
            f"| {case.what} | {setup.profile} | {case.tokens_per_s:,.0f} | {one.tokens_per_s_per_gpu:,.0f} "
            f"| {error:+.1%} | {one.seconds:.3f} | {one.exposed_seconds:.3f} | {memory} |"
        )
    lines += ["", "Steps with pipelines: [cluster_runs.md](cluster_runs.md)."]
    lines += ["", "## Not modelled", "", *(f"- {text}" for text in NOT_MODELLED)]
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> None:
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    found = list(rows(wanted))
    if not wanted:
        write(found)


if __name__ == "__main__":
    main()
