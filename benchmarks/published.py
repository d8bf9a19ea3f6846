"""Published training throughputs of other systems, predicted: nothing is fitted, half of the rows were held back.

    python benchmarks/published.py                   # all rows; writes results/published.md
    python benchmarks/published.py shown mpt-7b      # rows that were not held back, whose names hold this
    python benchmarks/published.py all llama3        # any row

`published_runs.toml` has the rows with their sources. A run is predicted as its source describes it: model, mesh, eager
kernels or compiled blocks, attention kernel, dtype of reductions, and a collective per block, as FSDP has it.
"""

from __future__ import annotations

import sys
import time
import tomllib
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import MachineProfile, load_profile
from meshweave.cost.simulate.frameworks import FRAMEWORKS
from meshweave.cost.simulate.result import Simulation
from meshweave.passes import pass_list_of
from meshweave.place.plan_text import parse_plan
from meshweave.program import Program
from meshweave.whatif import simulate

HERE = Path(__file__).parent
ROWS = HERE / "published_runs.toml"
TABLE = HERE / "results" / "published.md"
FEW = (2, 4)  # layers of what is simulated: a step grows by the same with each layer
MPT_VOCAB = 50368
MPT = {  # layers, width, heads: mosaicml/llm-foundry, scripts/train/yamls/mpt
    "mpt-125m": (12, 768, 12),
    "mpt-350m": (24, 1024, 16),
    "mpt-760m": (24, 1536, 12),
    "mpt-1b": (24, 2048, 16),
    "mpt-3b": (32, 2560, 20),
    "mpt-7b": (32, 4096, 32),
    "mpt-13b": (40, 5120, 40),
    "mpt-30b": (48, 7168, 56),
    "mpt-70b": (80, 8192, 64),
}
LLAMA = {  # layers, width, MLP width, heads, heads of keys, vocabulary: the published configurations
    "llama2-7b": (32, 4096, 11008, 32, 32, 32000),
    "llama2-13b": (40, 5120, 13824, 40, 40, 32000),
    "llama2-34b": (48, 8192, 22016, 64, 8, 32000),
    "llama2-70b": (80, 8192, 28672, 64, 8, 32000),
    "llama3-8b": (32, 4096, 14336, 32, 8, 128256),
    "llama3-405b": (126, 16384, 53248, 128, 8, 128256),
}
NOT_MODELLED = [
    "What frameworks do beside the step: data loading, logging, metrics (Composer computes cross entropy and "
    "perplexity of every batch), optimizers in many kernels (MPT's DecoupledAdamW), hooks of FSDP.",
    "Matmul libraries of 2023: the H100 rows of llm-foundry ran cuBLAS 11.8, the profile has rates of later ones.",
    "Where a source gives no figure for a kernel (attention backward under a mask on A100, FlashAttention 1 on H100) "
    "the profile has an estimate and says so.",
]
PLAN = "fsdp:fsdp+keep:lm_head+keep:embed_tokens+keep:norm"  # FSDP keeps what its root module holds
MPT_PLAN = "fsdp:fsdp+keep:wte+keep:wpe+keep:norm_f"


class Block(nn.Module):
    """A block of MPT: attention with one matmul for queries, keys and values, and an MLP four times as wide."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        q, k, v = (t.view(batch, length, self.heads, width // self.heads).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Mpt(nn.Module):
    """MPT with learned positions; the embedding is the head."""

    def __init__(self, layers: int, width: int, heads: int, length: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(MPT_VOCAB, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm_f = nn.LayerNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm_f(x), self.wte.weight)


@dataclass(frozen=True)
class Run:
    """A row of published_runs.toml. `batch` is per GPU and microbatch; `reduce` the dtype of gradient reductions."""

    group: str
    source: str
    model: str
    sequence: int
    mesh: str
    batch: int
    accumulate: int
    recompute: str
    profile: str
    tokens_per_s: float
    held_back: bool
    reduce: str = "float32"
    attention: str = "triton"
    fusion: str = "eager"
    float8: bool = False

    @property
    def framework(self) -> str:
        return "torchtitan" if self.source.startswith("torchtitan") else "fsdp1"

    @property
    def name(self) -> str:
        return f"{self.model}, {self.sequence}, {self.mesh}, batch {self.batch} x {self.accumulate}"


def runs() -> list[Run]:
    return [Run(**row) for row in tomllib.loads(ROWS.read_text())["runs"]]


def machine(run: Run) -> MachineProfile:
    """The machine of a run: A100s of 40 GB have 1.555 TB/s (data sheet); 400 Gb/s a node are 50 of 200 per GPU."""
    found = load_profile("a100" if run.profile.startswith("a100") else run.profile)
    found = FRAMEWORKS[run.framework].machine(found).with_attention(run.attention)
    if run.profile == "a100-40gb":
        return found.scaled(memory_bytes=42.4e9, memory_bandwidth=1.555 / 2.039)
    return found.scaled(net_bandwidth=0.25) if run.profile == "a100-400g" else found


def num_layers(run: Run) -> int:
    return (MPT[run.model] if run.model in MPT else LLAMA[run.model])[0]


def model_of(run: Run, layers: int) -> nn.Module:
    with torch.device("meta"):
        if run.model in MPT:
            _, width, heads = MPT[run.model]
            return Mpt(layers, width, heads, run.sequence)
        _, width, inner, heads, kv_heads, vocabulary = LLAMA[run.model]
        config = AutoConfig.for_model(
            "llama",
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            vocab_size=vocabulary,
            max_position_embeddings=run.sequence,
            use_cache=False,
        )
        return AutoModelForCausalLM.from_config(config)


def loss(out: Any, batch: Any) -> Tensor:
    return F.cross_entropy(out.view(-1, MPT_VOCAB), batch["labels"].view(-1)) if isinstance(out, Tensor) else out.loss


def compiled(run: Run, profile: MachineProfile, layers: int) -> Program:
    model, mesh = model_of(run, layers), mw.Mesh(run.mesh)
    dtype: torch.dtype | None = torch.bfloat16
    if run.reduce == "bfloat16":  # parameters too: what the optimizer does in float32 is less than 1% of these steps
        model, dtype = model.to(torch.bfloat16), None
    ids = torch.empty(run.batch * mesh.num_devices * run.accumulate, run.sequence, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    its = FRAMEWORKS[run.framework]
    options = CaptureOptions(
        clip_grad_norm=1.0,
        accumulate=run.accumulate,
        precision=mw.Precision(accumulate_in=its.accumulate_in, param_dtype=dtype),
    )
    plan = parse_plan((MPT_PLAN if run.model in MPT else PLAN) + ("+dp:dp" if "dp" in mesh.axis_names else ""))
    example = {"input_ids": ids, "labels": ids}
    passes = pass_list_of(its.passes_with(f"recompute={run.recompute}"))
    return build_program(
        StepSource(model, loss), example, optimizer, Target(mesh, plan, profile), options, pass_list=passes
    )


def simulated(run: Run, layers: int) -> Simulation:
    """A step of the run's model with another number of layers."""
    profile = machine(run)
    dtype = torch.float8_e4m3fn if run.float8 else None
    program = compiled(run, profile, layers)
    return simulate(program, profile, fusion=run.fusion, matmul_dtype=dtype, framework=run.framework)  # type: ignore[arg-type]


def predicted(run: Run) -> tuple[float, float]:
    """Tokens per second and GPU, and exposed seconds, of the whole model: on the line through those of few layers."""
    few, more = (simulated(run, layers) for layers in FEW)
    past = (num_layers(run) - FEW[1]) / (FEW[1] - FEW[0])
    seconds = more.seconds + past * (more.seconds - few.seconds)
    exposed = more.exposed_seconds + past * (more.exposed_seconds - few.exposed_seconds)
    return run.batch * run.accumulate * run.sequence / seconds, exposed


def show(run: Run) -> float:
    began = time.perf_counter()
    got, exposed = predicted(run)
    shown = "held" if run.held_back else "    "
    print(
        f"{shown} {run.group}: {run.name}: {got:,.0f} of {run.tokens_per_s:,.0f} ({got / run.tokens_per_s - 1:+.1%}), "
        f"exposed {exposed:.3f} s, took {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return got


def summary(title: str, errors: list[float]) -> str:
    worst = max(errors, key=abs)
    return f"| {title} | {len(errors)} | {median(map(abs, errors)):.1%} | {mean(errors):+.1%} | {worst:+.1%} |"


def summaries(found: list[tuple[Run, float]]) -> list[str]:
    """Errors of the rows that were looked at and of those that were not: of all, then by class."""
    lines = ["| | rows | median error | bias | worst |", "|---|---|---|---|---|"]
    for title, held in (("looked at", False), ("not looked at", True)):
        errors = [(run.group, got / run.tokens_per_s - 1) for run, got in found if run.held_back == held]
        lines += [summary(f"**{title}**", [error for _, error in errors])] if errors else []
        for group in dict.fromkeys(group for group, _ in errors):
            lines.append(summary(f"{title}: {group}", [error for its, error in errors if its == group]))
    return lines


def write(found: list[tuple[Run, float]]) -> None:
    lines = [
        "# Throughputs that others published, predicted",
        "",
        f"`python benchmarks/published.py`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}. Tokens per second "
        f"and GPU, {len(found)} of the {len(runs())} rows. "
        "No figure of meshweave is fitted to a row; rows that were not looked at were held back while the model was "
        "changed. Bias is the mean of signed errors.",
        "",
        *summaries(found),
        "",
        "| run | | published | predicted | error |",
        "|---|---|---|---|---|",
    ]
    for run, got in found:
        how = ", full recompute" * (run.recompute == "full") + ", float8" * run.float8
        lines.append(
            f"| {run.group}: {run.name}{how} | {'' if run.held_back else 'looked at'} | {run.tokens_per_s:,.0f} "
            f"| {got:,.0f} | {got / run.tokens_per_s - 1:+.1%} |"
        )
    lines += ["", "## Not modelled", "", *(f"- {text}" for text in NOT_MODELLED)]
    lines += ["", "## Sources", ""]
    sources = tomllib.loads(ROWS.read_text())["sources"]
    lines += [f"- {name}: {text}." for name, text in sources.items()]
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> None:
    which, wanted = (*sys.argv[1:3], "all", "")[:2] if len(sys.argv) > 2 else ("all", "")
    chosen = [r for r in runs() if wanted in f"{r.name} {r.profile}" and not (which == "shown" and r.held_back)]
    found = [(run, show(run)) for run in chosen]
    print("\n".join(summaries(found)))
    if not wanted and which == "all":
        write(found)


if __name__ == "__main__":
    main()
