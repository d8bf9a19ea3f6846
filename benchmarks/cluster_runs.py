"""Published steps on clusters whose models are split over pipelines, predicted: seconds of a step and memory.

    python benchmarks/cluster_runs.py                # all rows; writes results/cluster_runs.md
    python benchmarks/cluster_runs.py H100 405B      # rows whose descriptions hold these words; nothing is written

`cluster_runs.jsonl` has the rows with their sources: MLPerf Training v5.0 and the performance pages of Megatron-Bridge.
Each is asked of `mw.Study` as Megatron runs it: ZeRO-1 over replicas and context, sequence parallelism beside tensor
parallelism, ring attention over context, interleaved stages. Nothing of meshweave is fitted to a row.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from published import summary
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave.cli.sources import load_source
from meshweave.cost.hardware import MachineProfile, load_profile
from meshweave.cost.simulate.frameworks import FRAMEWORKS
from meshweave.cost.simulate.result import Simulation
from meshweave.place.plan_text import parse_plan

HERE = Path(__file__).parent
ROWS = HERE / "cluster_runs.jsonl"
TABLE = HERE / "results" / "cluster_runs.md"
PROFILES = {"GB200": "gb200", "GB300": "gb300", "B200": "b200", "B300": "b300", "H100": "h100", "H200": "h200"}
# Of matmuls. Blackwell multiplies float8 with a scale per 32 elements (MXFP8) as fast as with one per tensor.
DTYPES = {"FP8": torch.float8_e4m3fn, "MXFP8": torch.float8_e4m3fn, "BF16": None}
EXPERTS = {"Qwen3-30B-A3B": "qwen3-30b-a3b", "Qwen3-235B-A22B": "qwen3-235b-a22b"}
# Of attention alone: a device has whole experts (Megatron's expert tensor parallelism is 1 in these rows).
STYLES = {"*.q_proj": "colwise", "*.k_proj": "colwise", "*.v_proj": "colwise", "*.o_proj": "rowwise"}


@dataclass(frozen=True)
class Run:
    """A row of cluster_runs.jsonl, by its fields."""

    row: dict[str, Any]

    def __getattr__(self, name: str) -> Any:
        return self.row.get(name)

    @property
    def profile(self) -> str:
        words = self.gpu.replace("(", " ").replace(")", " ").replace("-", " ").split()
        return next(PROFILES[word] for word in words if word in PROFILES)

    @property
    def replicas(self) -> int:
        return self.gpus // (self.tp * self.pp * self.cp)

    @property
    def microbatches(self) -> int:
        return self.global_batch // (self.replicas * self.microbatch)

    @property
    def is_expressible(self) -> bool:
        is_known = self.model in EXPERTS or (self.experts is None and None not in (self.ffn, self.layers))
        return self.precision in DTYPES and is_known

    @property
    def name(self) -> str:
        split = [f"{name} {size}" for name in ("tp", "pp", "cp", "ep") if (size := getattr(self, name) or 1) > 1]
        split += [f"{self.interleave} stages a rank"] if self.interleave else []
        return f"{self.suite}: {self.model}, {self.gpus} {self.profile.upper()}, {', '.join(split) or 'FSDP'}"


def runs() -> list[Run]:
    return [Run(json.loads(line)) for line in ROWS.read_text().splitlines()]


def model_of(run: Run) -> nn.Module:
    if run.model in EXPERTS:
        return load_source(EXPERTS[run.model], batch=1, seq=run.seq, device="meta").model
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "llama",
            num_hidden_layers=run.layers,
            hidden_size=run.hidden,
            intermediate_size=run.ffn,
            num_attention_heads=run.heads,
            num_key_value_heads=run.kv_heads,
            vocab_size=run.vocab,
            max_position_embeddings=run.seq,
            use_cache=False,
        )
        return AutoModelForCausalLM.from_config(config)


def stage_layout(run: Run) -> str:
    """Embedding and head count as a layer each where the layers alone do not divide."""
    stages = run.pp * (run.interleave or 1)
    if run.layers % stages == 0:
        each = run.layers // stages
        middle = [f"t*{each}"] * stages
        return "|".join(["E" + middle[0], *middle[1:-1], middle[-1] + "L"])
    each = (run.layers + 2) // stages
    assert each * stages == run.layers + 2
    ends = f"t*{each - 1}" if each > 1 else ""
    return "|".join([f"E{ends}", *[f"t*{each}"] * (stages - 2), f"{ends}L"])


def machine_of(run: Run) -> MachineProfile:
    """Of the 72 GPUs of a rack jobs use 64 (MLPerf's SEGMENT), so that a replica of the model is in one."""
    machine = FRAMEWORKS["nemo"].machine(load_profile(run.profile))
    return replace(machine, devices_per_node=64) if machine.devices_per_node == 72 else machine


def question(run: Run) -> dict[str, Any]:
    """The arguments of `Study.simulate` beside the batch."""
    ids = torch.empty(run.global_batch, run.seq, dtype=torch.long, device="meta")
    asked: dict[str, Any] = {
        "example": {"input_ids": ids, "labels": ids},
        "profile": machine_of(run),
        "clip_grad_norm": 1.0,
        "accumulate": run.microbatches,
        "framework": "nemo",
        "precision": mw.Precision(param_dtype=torch.bfloat16),
        "matmul_dtype": DTYPES[run.precision],
    }
    if run.pp == run.tp == run.cp == 1 and run.ep is None:
        return {**asked, "mesh": f"fsdp={run.gpus}", "plan": "fsdp:fsdp", "buckets": "blocks"}
    experts = (run.ep or run.tp) // run.tp  # replicas that share the experts, as do the ranks of tp
    sizes = {"pp": run.pp, "dp": run.replicas // experts, "ep": experts, "cp": run.cp, "tp": run.tp}
    sizes = {name: size for name, size in sizes.items() if size > 1}
    plan = [f"zero1:{name}" for name in ("dp", "ep") if name in sizes]  # and over cp
    plan += ["experts:ep"] if experts > 1 else []
    plan += ["cp:cp:ring"] if run.cp > 1 else []
    plan += ["experts:tp" if run.ep else "hf_tp:tp", "sequence:tp"] if run.tp > 1 else []
    if run.pp > 1:
        plan.append(f"stages:pp:layout={stage_layout(run)}")
        asked |= {"pipeline": "interleaved" if run.interleave else "1f1b", "every_microbatch": False}
    whole = parse_plan("+".join(plan)) or mw.Plan()
    if run.tp > 1:  # Megatron's VocabParallelEmbedding
        styles = {**STYLES, "lm_head": "colwise"} if run.ep else {}
        whole = whole + mw.Plan.tp("tp", {"model.embed_tokens": "rowwise", **styles})
    return {**asked, "mesh": ",".join(f"{name}={size}" for name, size in sizes.items()), "plan": whole}


def predicted(run: Run, studies: dict[str, mw.Study]) -> Simulation:
    if run.model not in studies:
        model = model_of(run)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
        studies[run.model] = mw.Study(model, loss=lambda out, batch: out.loss, optimizer=optimizer)
    return studies[run.model].simulate(**question(run))


def first_rank_gb(simulation: Simulation) -> float:
    """What the first rank holds at most: MLPerf's logs have what nvidia-smi says of it, with expandable segments."""
    return simulation.roles[0].peak_bytes / 1e9


def show(run: Run, studies: dict[str, mw.Study]) -> Simulation:
    began = time.perf_counter()
    simulation = predicted(run, studies)
    error = error_of(run, simulation)
    memory = f", {first_rank_gb(simulation):.1f} of {run.memory_GB} GB" if run.memory_GB else ""
    print(
        f"{run.name}: {simulation.seconds:.2f} of {run.step_s:.2f} s ({error:+.1%}), exposed "
        f"{simulation.exposed_seconds:.2f} s{memory}, took {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    return simulation


def error_of(run: Run, simulation: Simulation) -> float:
    """Signed error of throughput: + is too fast."""
    return run.step_s / simulation.seconds - 1


def write(results: list[tuple[Run, Simulation]], others: list[Run]) -> None:
    errors = [(run, error_of(run, simulation)) for run, simulation in results]
    of_memory = [(run, first_rank_gb(simulation) / run.memory_GB - 1) for run, simulation in results if run.memory_GB]
    lines = [
        "# Steps on clusters that others published, predicted",
        "",
        f"`python benchmarks/cluster_runs.py`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}. No figure of",
        "meshweave is fitted to a row. Errors are signed, of throughput: + is too fast. Memory is the first rank's,",
        "published as nvidia-smi shows it, with what libraries hold beside tensors.",
        "",
        "| | rows | median error | bias | worst |",
        "|---|---|---|---|---|",
    ]
    by_kind: dict[tuple[bool, bool], list[tuple[Run, float]]] = {}
    for run, error in errors:
        by_kind.setdefault((run.ep is not None, run.precision == "MXFP8"), []).append((run, error))
    for (has_experts, in_blocks), its in sorted(by_kind.items()):
        title = f"{'experts' if has_experts else 'dense'}, {'MXFP8, as float8 by tensor' if in_blocks else 'but MXFP8'}"
        lines.append(summary(title if has_experts or in_blocks else f"**{title}**", [error for _, error in its]))
        if not (has_experts or in_blocks):
            for profile in dict.fromkeys(run.profile for run, _ in its):
                lines.append(summary(profile.upper(), [error for run, error in its if run.profile == profile]))
    lines.append(summary("memory", [error for _, error in of_memory]))
    lines += ["", "| run | published s | predicted s | error | exposed s | memory GB: published / predicted |"]
    lines.append("|---|---|---|---|---|---|")
    for (run, simulation), (_, error) in zip(results, errors, strict=True):
        here = first_rank_gb(simulation)
        memory = f"{run.memory_GB:.1f} / {here:.1f} ({here / run.memory_GB - 1:+.1%})" if run.memory_GB else ""
        lines.append(
            f"| {run.name}, {run.precision} | {run.step_s:.2f} | {simulation.seconds:.2f} | {error:+.1%} "
            f"| {simulation.exposed_seconds:.2f} | {memory} |"
        )
    lines += ["", "## Not expressed", ""]
    for why, is_dense in (("Experts", False), ("A dtype of 4 bits, or no number of layers", True)):
        names = sorted({f"{run.model} ({run.precision})" for run in others if (run.ep is None) == is_dense})
        lines.append(f"- {why}: {', '.join(names)}.")
    TABLE.write_text("\n".join(lines) + "\n")


def main() -> None:
    words = sys.argv[1:]
    listed = runs()
    chosen = [r for r in listed if r.is_expressible and all(word in f"{r.name} {r.precision}" for word in words)]
    studies: dict[str, mw.Study] = {}
    results = [(run, show(run, studies)) for run in chosen]
    print(summary("all", [error_of(run, simulation) for run, simulation in results]))
    if not words:
        write(results, [run for run in listed if not run.is_expressible])


if __name__ == "__main__":
    main()
