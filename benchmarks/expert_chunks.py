"""RFC 3434 of torchtitan, simulated: DeepSeek-V3 16B on 32 H100 with its batch whole, and in two chunks, so that the
dispatch of one hides under the compute of the other; nothing fitted.

python benchmarks/expert_chunks.py          # writes results/expert_chunks.md
python benchmarks/expert_chunks.py 2 3      # with 2 and 3 layers, nothing written
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
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
from meshweave.hardware import load_profile
from meshweave.passes import Overlap, Pipeline, Split, pipeline_of
from meshweave.program import Program
from meshweave.simulate.result import Simulation
from meshweave.whatif import simulate

TABLE = Path(__file__).parent / "results" / "expert_chunks.md"
SOURCE = (
    "pytorch/torchtitan issue 3434, comment of 2026-06-25: DeepSeek-V3 16B, 4 nodes of 8 H100 80 GB with RoCE, "
    "dp_shard=32, ep=32, routing forced to be balanced, regional Inductor"
)
PUBLISHED = {1: 7670, 2: 9775}  # tokens per second and GPU, without and with the batch in two chunks
LAYERS, DEVICES, SEQUENCE, BATCH = 27, 32, 4096, 4  # torchtitan's deepseek_v3_16b.toml: local batch 4 of 4,096 tokens
RECOMPUTE = "selective"
FEW = (3, 5)  # layers that are simulated; the first of the model is dense


@dataclass(frozen=True)
class Result:
    seconds: float
    exposed: float
    num_bytes: int


def model_of(layers: int) -> torch.nn.Module:
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "deepseek_v3",
            num_hidden_layers=layers,
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


def compiled(layers: int, chunks: int) -> Program:
    model, mesh = model_of(layers), mw.Mesh(f"ep={DEVICES}")
    plan = mw.Plan.fsdp("ep") + mw.Plan.ep("ep", batch=False)
    ids = torch.empty(BATCH * DEVICES, SEQUENCE, dtype=torch.long, device="meta")
    example: dict[str, Any] = {"input_ids": ids, "labels": ids}
    options = CaptureOptions(clip_grad_norm=1.0, param_dtype=torch.bfloat16)
    how = RECOMPUTE
    passes: Pipeline = pipeline_of([*([Split((chunks,), "always")] if chunks > 1 else []), Overlap()], recompute=how)
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    source, target = StepSource(model, published.loss), Target(mesh, plan, load_profile("h100"))
    return build_program(source, example, optimizer, target, options, pipeline=passes)


def simulated(layers: int, chunks: int) -> Simulation:
    return simulate(compiled(layers, chunks), "h100", fusion="blocks")


def main(few: Sequence[int]) -> None:
    for chunks in PUBLISHED:
        for layers in few:
            began = time.monotonic()
            s = simulated(layers, chunks)
            print(chunks, layers, s.seconds, s.peak_bytes / 2**30, time.monotonic() - began, flush=True)
            if "-v" in sys.argv:
                print(s)


if __name__ == "__main__":
    main([int(x) for x in sys.argv[1:] if x.isdigit()] or FEW)
