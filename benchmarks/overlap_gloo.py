"""Training steps with the drop-in for torch.compile against the same without, two processes over Gloo.

    python benchmarks/overlap_gloo.py [--write] [--quick] [--loopback] [--inner aot_eager] [--no-merging]
        [--profile machine.toml]

A Llama learns bytes of Python's standard library, sharded over two processes that reach each other at 1 Gbit/s (two
network namespaces, see predict_gloo.py; needs root) or, with --loopback, as fast as the machine can. `meshweave
calibrate` measures the machine under that condition first, and the drop-in is priced with its profile alone; with
--quick it is priced with the profile `cpu-gloo`, its communication scaled by what one gather takes here.

Two ways to shard: `fully_shard`, whose collectives torch.compile does not see (torch 2.13), and `shard_in_graph`, whose
collectives are in the graph. In one job each variant has its own copy of the model and all take their steps in turns,
so that what disturbs the machine disturbs all alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sysconfig
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from links import Link, loopback, running, shaped

TABLE = Path(__file__).parent / "results" / "overlap_gloo.md"
VARIANTS = ("fully_shard", "fully_shard, drop-in", "in graph", "in graph, drop-in")
WARM_UP = 2
SAME_LOSS = 1e-5  # relative: sums in another order in float32, after some tens of steps
VOCAB = 256  # tokens are bytes


@dataclass(frozen=True)
class Config:
    hidden: int = 512
    layers: int = 6
    batch: int = 4
    seq: int = 128
    steps: int = 20
    inner: str = "inductor"
    bucket: bool = True

    def __str__(self) -> str:
        return (
            f"{self.layers} layers x {self.hidden}, {self.batch} x {self.seq} tokens per process, {self.inner}"
            f"{'' if self.bucket else ', no merging'}"
        )


FULL = Config()
QUICK = Config(hidden=384, layers=2, steps=6, inner="aot_eager")


# In each process of a job


def worker(config: Config, profile: str) -> None:
    """Train every variant in turns; rank 0 prints what it found as JSON."""
    import torch
    import torch.distributed as dist

    from meshweave.runtime.cluster import init_from_env, shutdown

    rank, num_ranks = init_from_env()
    reports: dict[str, list[Any]] = {name: [] for name in VARIANTS}
    factor = 1.0 if profile else gather_factor()
    steps = {name: training(config, name, profile, factor, reports[name].append) for name in VARIANTS}
    batches = list(text_batches(config, rank, num_ranks, config.steps + WARM_UP))
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    losses: dict[str, list[float]] = {name: [] for name in VARIANTS}
    compiling: dict[str, float] = {}
    for i, batch in enumerate(batches):
        for name in VARIANTS[i % len(VARIANTS) :] + VARIANTS[: i % len(VARIANTS)]:
            dist.barrier()
            began = time.perf_counter()
            loss = steps[name](batch)
            took = time.perf_counter() - began
            held = torch.tensor([took, loss], dtype=torch.float64)
            dist.all_reduce(held, dist.ReduceOp.MAX)  # a step ends when the slower process has ended it
            losses[name].append(loss)
            if i >= WARM_UP:
                seconds[name].append(float(held[0]))
            elif i == 0:
                compiling[name] = took
    if rank == 0:
        told = {name: [told_of(report) for report in reports[name]] for name in VARIANTS}
        found = {"seconds": seconds, "losses": losses, "compiling": compiling, "reports": told, "factor": factor}
        print(json.dumps(found))
    shutdown()


def told_of(report: Any) -> dict[str, Any]:
    return {
        "collectives": len(report.collectives),
        "merged": sum(merge.is_taken for merge in report.merges),
        "seconds": report.seconds,
        "before": report.seconds_before,
        "exposed": report.exposed_seconds,
        "exposed before": report.exposed_before,
        "bound": report.bound_seconds,
        "peak": report.peak_bytes,
        "peak before": report.peak_before,
        "notes": report.notes,
    }


def gather_factor() -> float:
    """How much longer a gather of 4 MB takes than the profile cpu-gloo says."""
    import torch
    import torch.distributed as dist

    import meshweave as mw

    mine, whole = torch.zeros(1 << 20), torch.zeros(1 << 21)
    taken = []
    for _ in range(5):
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather_into_tensor(whole, mine)
        taken.append(time.perf_counter() - began)
    said = mw.load_profile("cpu-gloo").seconds("all_gather", mw.Mesh("group=2"), ("group",), 4 << 20)
    factor = torch.tensor([statistics.median(taken) / said])
    dist.broadcast(factor, 0)  # options must be the same on all ranks
    return float(factor)


def training(
    config: Config, variant: str, profile: str, factor: float, report: Callable[[Any], None]
) -> Callable[[Any], float]:
    """A step of a variant on a copy of the model of its own: takes a batch, returns its loss."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from meshweave.passes import Overlap
    from meshweave.torch_compile import backend
    from meshweave.torch_compile.fsdp import shard_in_graph

    model = llama(config)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    chosen: Any = config.inner
    if variant.endswith("drop-in"):
        passes = [Overlap(bucket=config.bucket, communication_factor=factor)]
        chosen = backend(cost=profile or "cpu-gloo", inner=config.inner, passes=passes, report=report)
    if variant.startswith("fully_shard"):
        # As torchtitan does: each block is compiled, then sharded, so that the hooks stand between compiled pieces.
        for layer in model.model.layers:
            layer.compile(backend=chosen)
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        shard_in_graph(model, mesh)
        model.compile(backend=chosen)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(batch: Any) -> float:
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    return step


def llama(config: Config) -> Any:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = LlamaConfig(
        hidden_size=config.hidden,
        intermediate_size=config.hidden * 8 // 3 // 16 * 16,
        num_hidden_layers=config.layers,
        num_attention_heads=config.hidden // 64,
        num_key_value_heads=config.hidden // 64,
        vocab_size=VOCAB,
        max_position_embeddings=config.seq,
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(sizes).float()


def text_batches(config: Config, rank: int, num_ranks: int, count: int) -> Any:
    """Bytes of the standard library's modules in the order of their names; every process reads every num_ranks-th
    batch."""
    import torch

    sources = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    size = config.batch * config.seq
    held = b""
    text = chain.from_iterable(path.read_bytes() for path in sources)
    for i in range(count * num_ranks):
        held = bytes(byte for byte, _ in zip(text, range(size), strict=False))
        if i % num_ranks == rank:
            yield torch.tensor(list(held)).view(config.batch, config.seq)


# The driver


def measure(link: Link, config: Config, profile: str, is_quick: bool, folder: Path) -> dict[str, Any]:
    if not profile and not is_quick:
        profile = str(folder / "machine.toml")
        print(link.run("-m", "meshweave", "calibrate", "-o", profile), flush=True)
    load = running()
    out = link.run(str(Path(__file__)), "--worker", json.dumps(asdict(config)), "--profile", profile)
    return {"link": link.name, "load": load, **json.loads(out.strip().splitlines()[-1])}


def ratios(found: dict[str, Any], new: str, old: str) -> tuple[float, float, float]:
    """Lower quartile, median and upper quartile of new / old, step by step."""
    pairs = [a / b for a, b in zip(found["seconds"][new], found["seconds"][old], strict=True)]
    low, middle, high = statistics.quantiles(pairs, n=4)
    return low, middle, high


def _difference(found: dict[str, Any], name: str, other: str) -> float:
    """The largest relative difference of two variants' losses."""
    pairs = zip(found["losses"][name], found["losses"][other], strict=True)
    return max(abs(a / b - 1) for a, b in pairs)


def page(config: Config, found: dict[str, Any]) -> str:
    parts = [
        "# Steps with the drop-in for torch.compile, over Gloo",
        "",
        f"`python benchmarks/overlap_gloo.py`: a Llama of {config}; two processes of one machine, {found['link']} "
        f"between them; {config.steps} steps each in turns after {WARM_UP}; load of other processes "
        f"{found['load']:.1f}; communication priced x {found['factor']:.2f}. Times in ms.",
        "",
        "| variant | median step | middle half | first step (compiles) s | last loss | largest difference of losses |",
        "|---|---|---|---|---|---|",
    ]
    for name in VARIANTS:
        low, middle, high = statistics.quantiles(found["seconds"][name], n=4)
        first = VARIANTS[0] if name.startswith("fully_shard") else VARIANTS[2]
        parts.append(
            f"| {name} | {middle * 1e3:.0f} | {low * 1e3:.0f} - {high * 1e3:.0f} | {found['compiling'][name]:.1f} "
            f"| {found['losses'][name][-1]:.6f} | {_difference(found, name, first):.1e} |"
        )
    parts += ["", "| ratio of steps, pair by pair | median | middle half |", "|---|---|---|"]
    for new, old in ((1, 0), (3, 2), (2, 0), (3, 0)):
        low, middle, high = ratios(found, VARIANTS[new], VARIANTS[old])
        parts.append(f"| {VARIANTS[new]} / {VARIANTS[old]} | {middle:.3f} | {low:.3f} - {high:.3f} |")
    parts += ["", "| demand | got | wanted | met |", "|---|---|---|---|"]
    for new, old in ((1, 0), (3, 2)):
        most = _difference(found, VARIANTS[new], VARIANTS[old])
        holds = "yes" if most <= SAME_LOSS else "**no**"
        parts.append(f"| same losses, {VARIANTS[new]} | {most:.1e} apart at most | <= {SAME_LOSS:.0e} | {holds} |")
    parts += ["", "What the drop-in made of each graph, predicted ms:", ""]
    parts += ["| variant | graph | collectives | merges | before | after | bound | exposed before | exposed after |"]
    parts += ["|---|---|---|---|---|---|---|---|---|"]
    for name in VARIANTS:
        for i, report in enumerate(found["reports"][name]):
            times = [report[key] * 1e3 for key in ("before", "seconds", "bound", "exposed before", "exposed")]
            cells = " | ".join(f"{ms:.0f}" for ms in times)
            parts.append(f"| {name} | {i} | {report['collectives']} | {report['merged']} | {cells} |")
    if not found["reports"][VARIANTS[1]]:
        parts.append("\nNo graph of `fully_shard` has a collective in it: its hooks are closed to Dynamo.")
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", action="store_true", help="write results/overlap_gloo.md")
    parser.add_argument("--quick", action="store_true", help="a small model, few steps, no generated code")
    parser.add_argument("--loopback", action="store_true", help="without the link of 1 Gbit/s")
    parser.add_argument("--inner", choices=("inductor", "aot_eager"), help="what compiles; aot_eager with --quick")
    parser.add_argument("--no-merging", action="store_true")
    parser.add_argument("--worker")
    parser.add_argument("--profile", default="", help="a file of `meshweave calibrate`, in place of a calibration")
    options = parser.parse_args()
    if options.worker:
        worker(Config(**json.loads(options.worker)), options.profile)
        return 0
    chosen = QUICK if options.quick else FULL
    config = Config(**{**asdict(chosen), "inner": options.inner or chosen.inner, "bucket": not options.no_merging})
    with (loopback if options.loopback else shaped)() as link, tempfile.TemporaryDirectory() as folder:
        found = measure(link, config, options.profile, options.quick, Path(folder))
    text = page(config, found)
    print(text)
    if options.write:
        TABLE.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
