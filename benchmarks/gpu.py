"""Steps of a single GPU, bfloat16, AdamW: meshweave as it comes beside eager PyTorch and torch.compile.

    python benchmarks/gpu.py [--json] [--only llama] [--extra backend=eager] [--extra passes=none]

Every way to train is a process of its own. All start at once; then those of a configuration take turns, a few steps
without a synchronisation between them, and the median of the turns counts. Times are those of the whole step (forward,
backward, update) in milliseconds, memory is the most that PyTorch's allocator had in use during the turns, starts
include compilation while other ways compile. `predicted` is the simulated time with the device's own built-in profile.
Further rows of meshweave are asked for by arguments of mw.compile.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

EAGER, COMPILED, OURS = "eager PyTorch", "torch.compile", "meshweave"
REDUCED = "torch.compile, reduce-overhead"  # CUDA graphs of its own
ROUNDS, STEPS, WARM_UP = 7, 8, 4
LR = 1e-4
MOST_LOSS_ERROR = 2e-2  # relative, of a bfloat16 step after WARM_UP steps


@dataclass(frozen=True)
class Config:
    family: str
    layers: int
    hidden: int
    batch: int
    sequence: int
    vocabulary: int = 32000

    def __str__(self) -> str:
        return f"{self.family}, {self.layers} layers of {self.hidden}, batch {self.batch} x {self.sequence}"


CONFIGS = (Config("llama", 8, 2048, 4, 2048), Config("llama", 8, 768, 4, 512), Config("mixtral", 4, 1024, 4, 1024))


def model_of(config: Config) -> Any:
    """The same weights each time."""
    import transformers

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.hidden // 64,
        "num_key_value_heads": config.hidden // 256,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.sequence,
    }
    if config.family == "mixtral":
        mixtral = transformers.MixtralConfig(
            **common, intermediate_size=2 * config.hidden, num_local_experts=8, num_experts_per_tok=2
        )
        return transformers.MixtralForCausalLM(mixtral).bfloat16()
    llama = transformers.LlamaConfig(**common, intermediate_size=3 * config.hidden, tie_word_embeddings=False)
    return transformers.LlamaForCausalLM(llama).bfloat16()


# A process


def peer(config: Config, device: str, way: str) -> Callable[[Tensor], Tensor]:
    model = model_of(config).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    if way == COMPILED:
        model.compile()
    if way == REDUCED:
        model.compile(mode="reduce-overhead")

    def step(batch: Tensor) -> Tensor:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(config: Config, device: str, options: dict[str, Any]) -> Callable[[Tensor], Tensor]:
    import meshweave as mw

    model = model_of(config).to(device)
    batch = torch.zeros(config.batch, config.sequence, dtype=torch.int64)
    compiled = mw.compile(
        model,
        loss=lambda out, _: out.loss,
        example={"input_ids": batch, "labels": batch},
        optimizer=torch.optim.AdamW(model.parameters(), lr=LR),
        mesh="",
        forward=lambda m, b: m(**b, use_cache=False),
        **options,
    )

    def step(batch: Tensor) -> Tensor:
        return compiled({"input_ids": batch, "labels": batch})

    step.compiled = compiled  # type: ignore[attr-defined]
    return step


def predicted_ms(compiled: Any) -> float | None:
    from meshweave.cost.hardware import load_profile, profile_of_device
    from meshweave.whatif import simulate

    name = profile_of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return simulate(compiled.program, load_profile(name)).seconds * 1e3 if name else None


def options_of(way: str) -> dict[str, Any]:
    """The arguments of mw.compile in the name of a row: `passes=...`, or options of `mw.RunOptions`."""
    import meshweave as mw

    pairs = dict(pair.split("=", 1) for pair in way.partition(", ")[2].split(", ") if pair)
    passes: dict[str, Any] = {"passes": pairs.pop("passes")} if "passes" in pairs else {}
    values: dict[str, Any] = {name: {"True": True, "False": False}.get(value, value) for name, value in pairs.items()}
    return {**passes, "run": mw.RunOptions(**values)}


def worker(config: Config, way: str, device: str) -> None:
    """Answer each line of stdin with a line of JSON: the start, then a turn for each further line."""
    began = time.perf_counter()
    step = ours(config, device, options_of(way)) if way.startswith(OURS) else peer(config, device, way)
    chance = torch.Generator().manual_seed(1)
    batches = [torch.randint(config.vocabulary, (config.batch, config.sequence), generator=chance) for _ in range(4)]
    batches = [batch.to(device) for batch in batches]
    losses = [float(step(batches[0]))]
    start = time.perf_counter() - began
    if way.startswith(OURS):
        step.compiled.session.compile_regions(waits=True)  # type: ignore[attr-defined]
    losses += [float(step(batches[i % 4])) for i in range(1, WARM_UP)]
    row: dict[str, Any] = {"start_s": start, "loss": losses[-1]}
    if way.startswith(OURS):
        row["predicted_ms"] = predicted_ms(step.compiled)  # type: ignore[attr-defined]
    print(json.dumps(row), flush=True)
    on_gpu = device == "cuda"
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # of what compiling took
    for _ in sys.stdin:
        step(batches[0])
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()  # what is reserved now counts, too
        began = time.perf_counter()
        for i in range(STEPS):
            step(batches[i % 4])
        if on_gpu:
            torch.cuda.synchronize()
        ms = (time.perf_counter() - began) / STEPS * 1e3
        # memory of CUDA graphs is not in use between their replays, so what is reserved counts
        peak = torch.cuda.max_memory_reserved() if on_gpu else 0
        print(json.dumps({"ms": ms, "peak_bytes": peak}), flush=True)


# The table


def answers(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


@dataclass(frozen=True)
class Job:
    """The processes of a configuration, one for each way to train, and what they have answered."""

    processes: list[subprocess.Popen[str]]
    sources: list[Iterator[dict[str, Any]]]
    rows: list[dict[str, Any]]


def started(config: Config, ways: list[str], device: str) -> Job:
    command = [sys.executable, __file__, "--worker", json.dumps(config.__dict__), "--device", device, "--way"]
    processes = [
        subprocess.Popen([*command, way], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for way in ways
    ]
    return Job(processes, [answers(process) for process in processes], [{"way": way} for way in ways])


def await_start(job: Job) -> None:
    """A way that fails has an error in its row."""
    for source, row in zip(job.sources, job.rows, strict=True):
        row.update(next(source, {"error": "no answer"}))
    reference = job.rows[0].get("loss", float("nan"))
    for row in job.rows:
        if not abs(row.get("loss", reference) - reference) <= MOST_LOSS_ERROR * abs(reference):
            row["error"] = f"loss {row['loss']:.4f} for {reference:.4f}"


def take_turns(job: Job) -> list[dict[str, Any]]:
    """The rows with the medians of the turns."""
    turns: list[list[dict[str, Any]]] = [[] for _ in job.rows]
    for _ in range(ROUNDS):
        for process, source, own, row in zip(job.processes, job.sources, turns, job.rows, strict=True):
            if "error" not in row:
                assert process.stdin is not None
                with suppress(BrokenPipeError):
                    process.stdin.write("\n")
                    process.stdin.flush()
                answer = next(source, None)
                if answer is None:  # out of memory, say
                    row["error"] = "the process ended"
                else:
                    own.append(answer)
    for process, own, row in zip(job.processes, turns, job.rows, strict=True):
        with suppress(BrokenPipeError):
            process.communicate()
        if own:
            row["ms"] = statistics.median(turn["ms"] for turn in own)
            row["peak_gb"] = max(turn["peak_bytes"] for turn in own) / 1e9
    return job.rows


def table(config: Config, rows: list[dict[str, Any]]) -> str:
    best = min((row["ms"] for row in rows if "ms" in row and not row["way"].startswith(OURS)), default=float("nan"))
    lines = [
        f"### {config}",
        "",
        "| | ms | / best peer | predicted ms | peak GB | start s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        if "ms" not in row or "error" in row:
            lines.append(f"| {row['way']} | failed: {row.get('error')} | | | | |")
            continue
        guess = f"{row['predicted_ms']:.1f}" if row.get("predicted_ms") else ""
        numbers = f"{row['ms']:.1f} | {row['ms'] / best:.2f} | {guess} | {row['peak_gb']:.2f} | {row['start_s']:.0f}"
        lines.append(f"| {row['way']} | {numbers} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="", help="configurations whose text contains this")
    parser.add_argument("--extra", action="append", default=[], help="arguments of mw.compile for a further row")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--way", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        worker(Config(**json.loads(args.worker)), args.way, args.device)
        return
    ways = [EAGER, COMPILED, REDUCED, OURS, *(f"{OURS}, {extra}" for extra in args.extra)]
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    jobs = {str(config): started(config, ways, args.device) for config in CONFIGS if args.only in str(config)}
    for job in jobs.values():
        await_start(job)
    tables = {name: take_turns(job) for name, job in jobs.items()}
    if args.json:
        print(json.dumps({"device": device, "torch": torch.__version__, "rows": tables}))
        return
    print(f"{device}, torch {torch.__version__}, bfloat16, AdamW\n")
    for config in CONFIGS:
        if str(config) in tables:
            print(table(config, tables[str(config)]))


if __name__ == "__main__":
    main()
