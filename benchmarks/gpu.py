"""Steps of a single GPU, AdamW: meshweave as it comes beside eager PyTorch and torch.compile.

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
from torch import Tensor, nn
from torch.nn import functional

EAGER, COMPILED, OURS = "eager PyTorch", "torch.compile", "meshweave"
REDUCED = "torch.compile, reduce-overhead"  # CUDA graphs of its own
ROUNDS, STEPS, WARM_UP = 7, 8, 4
LR = 1e-4
MOST_LOSS_ERROR = 2e-2  # relative, of a bfloat16 step after WARM_UP steps


Batch = dict[str, Tensor]


@dataclass(frozen=True)
class Config:
    """`sequence`: positions, or the width and height of images."""

    family: str
    layers: int
    hidden: int
    batch: int
    sequence: int
    vocabulary: int = 32000
    dtype: str = "bfloat16"  # or "float32": matmuls with TF32

    def __str__(self) -> str:
        kind = "" if self.dtype == "bfloat16" else f", {self.dtype}"
        return f"{self.family}, {self.layers} layers of {self.hidden}, batch {self.batch} x {self.sequence}{kind}"

    @property
    def is_of_images(self) -> bool:
        return self.family in ("vit", "resnet", "unet")


CONFIGS = (
    Config("llama", 8, 2048, 4, 2048),
    Config("llama", 8, 768, 4, 512),
    Config("mixtral", 4, 1024, 4, 1024),
    Config("vit", 24, 1024, 64, 224, 1000),  # ViT-L/16
    Config("resnet", 50, 2048, 128, 224, 1000),  # ResNet-50, channels last
    Config("gpt2", 24, 1024, 4, 1024, 50304, "float32"),  # GPT-2 medium
    Config("unet", 4, 256, 16, 64),  # of a diffusion model, on latents
)


def model_of(config: Config) -> Any:
    """The same weights each time."""
    import transformers

    torch.manual_seed(0)
    common: dict[str, Any] = {
        "hidden_size": config.hidden,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.hidden // 64,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.sequence,
        "use_cache": False,
    }
    if config.family == "mixtral":
        experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "num_key_value_heads": config.hidden // 256}
        mixtral = transformers.MixtralConfig(**common, **experts, intermediate_size=2 * config.hidden)
        return transformers.MixtralForCausalLM(mixtral)
    if config.family == "gpt2":
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**common))
    if config.family == "vit":
        sizes = {"hidden_size": config.hidden, "num_hidden_layers": config.layers, "image_size": config.sequence}
        heads, width = config.hidden // 64, 4 * config.hidden
        vit = transformers.ViTConfig(
            **sizes, num_attention_heads=heads, intermediate_size=width, num_labels=config.vocabulary
        )
        return transformers.ViTForImageClassification(vit)
    if config.family == "resnet":
        return transformers.ResNetForImageClassification(transformers.ResNetConfig(num_labels=config.vocabulary))
    if config.family == "unet":
        return UNet(config.hidden, config.layers)
    llama = transformers.LlamaConfig(
        **common,
        num_key_value_heads=config.hidden // 256,
        intermediate_size=3 * config.hidden,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(llama)


def made(config: Config, device: str) -> Any:
    torch.set_float32_matmul_precision("high")
    model = model_of(config).to(device, getattr(torch, config.dtype))
    return model.to(memory_format=torch.channels_last) if config.is_of_images else model


def batches_of(config: Config, num: int) -> list[Batch]:
    chance = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(num):
        if not config.is_of_images:
            ids = torch.randint(config.vocabulary, (config.batch, config.sequence), generator=chance)
            batches.append({"input_ids": ids, "labels": ids})
            continue
        channels = 4 if config.family == "unet" else 3
        pixels = torch.randn(config.batch, channels, config.sequence, config.sequence, generator=chance)
        pixels = pixels.to(getattr(torch, config.dtype)).contiguous(memory_format=torch.channels_last)
        classes = torch.randint(config.vocabulary, (config.batch,), generator=chance)
        batches.append({"pixel_values": pixels, "labels": pixels if config.family == "unet" else classes})
    return batches


@dataclass
class Output:
    loss: Tensor


class Residual(nn.Module):
    """Two convolutions, and attention over all places if there are few."""

    def __init__(self, before: int, after: int, attends: bool) -> None:
        super().__init__()
        self.first, self.second = nn.GroupNorm(32, before), nn.GroupNorm(32, after)
        self.enter, self.leave = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()
        self.attends = attends
        self.qkv, self.out = nn.Conv2d(after, 3 * after, 1), nn.Conv2d(after, after, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.enter(functional.silu(self.first(x)))
        x = self.skip(x) + self.leave(functional.silu(self.second(h)))
        if not self.attends:
            return x
        parts = self.qkv(x).flatten(2).transpose(1, 2).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (-1, 64)).transpose(1, 2) for part in parts)
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return x + self.out(attended.transpose(1, 2).unflatten(2, x.shape[2:]))


class UNet(nn.Module):
    """Predicts `labels` from images: `depth` levels, each of half the size and at most four times the channels."""

    def __init__(self, channels: int, depth: int) -> None:
        super().__init__()
        widths = [channels * min(4, 1 << level) for level in range(depth)]
        self.enter, self.leave = nn.Conv2d(4, channels, 3, padding=1), nn.Conv2d(channels, 4, 3, padding=1)
        pairs = list(zip([channels, *widths], widths, strict=False))
        self.down = nn.ModuleList(Residual(*pair, level > 1) for level, pair in enumerate(pairs))
        self.up = nn.ModuleList(Residual(2 * b, a, level > 1) for level, (a, b) in enumerate(pairs))

    def forward(self, pixel_values: Tensor, labels: Tensor) -> Output:
        x, skips = self.enter(pixel_values), []
        for block in self.down:
            x = block(x)
            skips.append(x)
            x = functional.avg_pool2d(x, 2)
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0), skip], 1))
        return Output(functional.mse_loss(self.leave(x).float(), labels.float()))


# A process


def peer(config: Config, device: str, way: str) -> Callable[[Batch], Tensor]:
    model = made(config, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    if way == COMPILED:
        model.compile()
    if way == REDUCED:
        model.compile(mode="reduce-overhead")

    def step(batch: Batch) -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def ours(config: Config, device: str, options: dict[str, Any]) -> Callable[[Batch], Tensor]:
    import meshweave as mw

    model = made(config, device)
    compiled = mw.compile(
        model,
        loss=lambda out, _: out.loss,
        example=batches_of(config, 1)[0],
        optimizer=torch.optim.AdamW(model.parameters(), lr=LR),
        mesh="",
        forward=lambda m, b: m(**b),
        **options,
    )

    def step(batch: Batch) -> Tensor:
        return compiled(batch)

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
    batches = [{name: x.to(device) for name, x in batch.items()} for batch in batches_of(config, 4)]
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
    print(f"{device}, torch {torch.__version__}, AdamW, bfloat16 unless it says otherwise\n")
    for config in CONFIGS:
        if str(config) in tables:
            print(table(config, tables[str(config)]))


if __name__ == "__main__":
    main()
