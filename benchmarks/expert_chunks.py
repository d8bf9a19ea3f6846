"""RFC 3434 of torchtitan, simulated: DeepSeek-V3 16B on 32 H100 with its batch whole, and in two chunks, so that the
dispatch of one hides under the compute of the other; nothing fitted.

python benchmarks/expert_chunks.py    # all 27 layers, about 20 minutes on 2 cores; writes results/expert_chunks.md
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import published
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.passes import Overlap, Recompute, Split, pass_list_of
from meshweave.program import Program
from meshweave.whatif import simulate

TABLE = Path(__file__).parent / "results" / "expert_chunks.md"
SOURCE = (
    "pytorch/torchtitan issue 3434, comment of 2026-06-25: DeepSeek-V3 16B, 4 nodes of 8 H100 80 GB with RoCE, "
    "dp_shard=32, ep=32, routing forced to be balanced, regional Inductor"
)
PUBLISHED = {1: (7670, 54.0), 2: (9775, 51.8)}  # by chunks: tokens per second and GPU, peak GiB
LAYERS, DEVICES, SEQUENCE, BATCH = 27, 32, 4096, 4  # torchtitan's deepseek_v3_16b.toml: local batch 4 of 4,096 tokens
FITS_GIB = 79.6 - 2.0  # of an H100 80 GB (81,559 MiB by nvidia-smi), without the context of CUDA and NCCL's buffers


@dataclass(frozen=True)
class Row:
    """What backward makes again, and the dtype in which what experts give goes back: Hugging Face's model weighs it in
    float32 and rounds the sum, torchtitan's rounds before."""

    recompute: str
    sums: str


ROWS = tuple(Row(recompute, sums) for recompute in ("selective", "pointwise") for sums in ("float32", "bfloat16"))


def model_of() -> torch.nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "deepseek_v3",
            num_hidden_layers=LAYERS,
            vocab_size=102400,
            hidden_size=2048,
            intermediate_size=10944,
            moe_intermediate_size=1408,
            first_k_dense_replace=1,
            num_attention_heads=16,
            num_key_value_heads=16,
            n_routed_experts=64,
            n_shared_experts=2,
            num_experts_per_tok=6,
            n_group=1,
            topk_group=1,
            q_lora_rank=None,
            kv_lora_rank=512,
            qk_nope_head_dim=128,
            qk_rope_head_dim=64,
            v_head_dim=128,
            max_position_embeddings=SEQUENCE,
            use_cache=False,
        )
        return AutoModelForCausalLM.from_config(config)


def compiled(row: Row, chunks: int) -> Program:
    model, mesh = model_of(), mw.Mesh(f"ep={DEVICES}")
    plan = mw.Plan.fsdp("ep") + mw.Plan.ep("ep", batch=False)
    ids = torch.empty(BATCH * DEVICES, SEQUENCE, dtype=torch.long, device="meta")
    example: dict[str, Any] = {"input_ids": ids, "labels": ids}
    options = CaptureOptions(
        clip_grad_norm=1.0, precision=mw.Precision(param_dtype=torch.bfloat16, reduce_after_cast=row.sums == "bfloat16")
    )
    split = [Split((chunks,), "always")] if chunks > 1 else []
    passes = pass_list_of([Recompute(row.recompute), *split, Overlap()])
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    source, target = StepSource(model, published.loss), Target(mesh, plan, load_profile("h100"))
    return build_program(source, example, optimizer, target, options, pass_list=passes)


@dataclass(frozen=True)
class Result:
    """`hidden`: the share of communication under which something is computed."""

    seconds: float
    gib: float
    hidden: float

    @property
    def tokens_per_s(self) -> float:
        return BATCH * SEQUENCE / self.seconds


def predicted(row: Row, chunks: int) -> Result:
    step = simulate(compiled(row, chunks), "h100", fusion="compiled")
    moved = sum(span.seconds for span in step.spans if span.kind != "compute")
    computed = sum(span.seconds for span in step.spans if span.kind == "compute")
    return Result(step.seconds, step.peak_bytes / 2**30, 1 - (step.seconds - computed) / moved)


def main() -> None:
    results: dict[tuple[Row, int], Result] = {}
    for row in ROWS:
        for chunks in PUBLISHED:
            results[row, chunks] = result = predicted(row, chunks)
            print(row, chunks, result, f"{result.tokens_per_s:,.0f} tokens/s/GPU", flush=True)
            write(results)


def write(results: Mapping[tuple[Row, int], Result]) -> None:
    lines = [
        "# Experts whose dispatch hides under compute, predicted",
        "",
        f"`python benchmarks/expert_chunks.py`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}. DeepSeek-V3 "
        f"16B, {BATCH} sequences of {SEQUENCE:,} tokens on each of {DEVICES} H100, profile `h100`, compute between "
        f"communications compiled, the loss too (torchtitan's default). Load balanced. Published: {SOURCE}. Nothing is "
        "fitted.",
        "",
        "| backward makes again | sums sent in | chunks | tokens/s/GPU | gain | peak GiB | communication hidden |",
        "|---|---|---|---|---|---|---|",
    ]
    whole = PUBLISHED[1][0]
    for chunks, (tokens, gib) in PUBLISHED.items():
        lines.append(f"| published | | {chunks} | {tokens:,} | {tokens / whole - 1:+.1%} | {gib} | |")
    for (row, chunks), result in results.items():
        gain = result.tokens_per_s / results[row, 1].tokens_per_s - 1
        lines.append(
            f"| {row.recompute} | {row.sums} | {chunks} | {result.tokens_per_s:,.0f} | {gain:+.1%} | {result.gib:.1f} "
            f"| {result.hidden:.0%} |"
        )
    lines += [
        "",
        "Communication is an all-gather of all tokens in front of the experts and a reduce-scatter of their sums "
        "behind them, along rings: on 4 nodes that is cheaper than to send each device the rows that it reads, since a "
        "ring brings a byte into a node once. `selective` saves what torchtitan's policy of that name saves, and the "
        "sort, among it the rows that experts work on, so that backward dispatches none again; `pointwise` saves the "
        "fewest bytes "
        f"from which elementwise ops recompute the rest. An H100 has room for about {FITS_GIB:.0f} GiB.",
    ]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
