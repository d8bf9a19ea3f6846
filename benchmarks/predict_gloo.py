"""Predicted against measured step times of real two-process runs over Gloo on this machine.

    python benchmarks/predict_gloo.py [-o benchmarks/results/predict_gloo.md] [--quick] [--only loopback|shaped]

Two links: the loopback, and one of 1 Gbit/s between two network namespaces (a veth pair shaped by `tc ... tbf`; needs
root, and is left out without). For each, `meshweave calibrate` measures the machine under that condition; then each
configuration runs as a job of two processes, its median step is taken, and the simulator predicts it from the
calibrated profile alone. No figure of a run goes into its prediction.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from links import Link, loopback, running, shaped

WARM_UP, STEPS = 4, 12


@dataclass(frozen=True)
class Config:
    hidden: int
    layers: int
    batch: int
    seq: int
    mesh: str

    @property
    def model(self) -> str:
        wide = self.hidden * 8 // 3 // 16 * 16
        return (
            f"hf:llama?num_hidden_layers={self.layers}&hidden_size={self.hidden}&intermediate_size={wide}"
            f"&num_attention_heads={self.hidden // 64}&num_key_value_heads={self.hidden // 64}&vocab_size=2048"
        )

    def __str__(self) -> str:
        return f"{self.layers} x {self.hidden}, batch {self.batch}, seq {self.seq}"


CONFIGS = (
    Config(256, 2, 8, 64, "dp=2"),
    Config(256, 2, 8, 64, "tp=2"),
    Config(256, 2, 8, 64, "fsdp=2"),
    Config(512, 4, 8, 128, "dp=2"),
    Config(512, 4, 8, 128, "tp=2"),
    Config(512, 2, 4, 128, "fsdp=2"),
    Config(768, 2, 2, 256, "dp=2"),
    Config(768, 2, 2, 256, "tp=2"),
)


# In each process of a job


def worker(config: Config, profile: str) -> None:
    """Train, time and trace; rank 0 prints what it found as JSON."""
    import torch

    import meshweave as mw
    from meshweave.cli.sources import load_source
    from meshweave.runtime.cluster import init_from_env, shutdown

    rank, _ = init_from_env()
    source = load_source(config.model, batch=config.batch, seq=config.seq, dtype=torch.float32, seed=0, device="cpu")
    optimizer = torch.optim.AdamW(source.model.parameters(), lr=1e-3)
    step = mw.compile(source.model, loss=source.loss, example=source.batch, optimizer=optimizer, mesh=config.mesh)
    batches = [source.make_batch(i) for i in range(4)]
    for i in range(WARM_UP):
        step(batches[i % 4])
    seconds = []
    for i in range(STEPS):
        began = time.perf_counter()
        step(batches[i % 4])
        seconds.append(time.perf_counter() - began)
    traced = [step.trace(batches[0]) for _ in range(3)]
    trace = sorted(traced, key=lambda one: one.seconds)[1]
    if rank == 0:
        found = {"seconds": seconds, "measured": split(trace)}
        if profile:
            found |= predicted(step.program, profile)
        print(json.dumps(found))
    shutdown(step.session.world)


def predicted(program: Any, profile: str) -> dict[str, Any]:
    """The model's seconds of a step, and where they go."""
    from meshweave.whatif import simulate

    found = simulate(program, profile)
    return {"predicted": found.seconds, "modelled": split(found)}


def split(simulation: Any) -> dict[str, float]:
    """Seconds of role 0 by class: matmul, attention, other compute, exposed communication."""
    classes = {"matmul": 0.0, "attention": 0.0, "other ops": 0.0, "host's part of communication": 0.0}
    for span in simulation.spans:
        if span.kind == "compute" and span.role == 0:
            name = span.op
            is_matmul = span.flops > 0 and "attention" not in name
            kind = "matmul" if is_matmul else "attention" if "attention" in name else "other ops"
            classes["host's part of communication" if name in ("start", "wait") else kind] += span.seconds
    role = simulation.roles[0]
    return {
        **classes,
        "exposed": role.exposed_seconds,
        "idle": role.idle_seconds,
        "communication": role.communication_seconds,
    }


# The driver


def measure(link: Link, configs: Sequence[Config], folder: Path) -> list[dict[str, Any]]:
    """A row per configuration."""
    file = folder / "machine.toml"
    print(link.run("-m", "meshweave", "calibrate", "-o", str(file)), flush=True)
    rows = []
    for config in configs:
        arguments = json.dumps([config.hidden, config.layers, config.batch, config.seq, config.mesh])
        load = running()
        out = link.run(str(Path(__file__)), "--worker", arguments, "--profile", str(file))
        found = json.loads(out.strip().splitlines()[-1])
        rows.append({"link": link.name, "config": str(config), "mesh": config.mesh, "load": load, **found})
        print(line(rows[-1]), flush=True)
        print(f"    measured {_shown(found['measured'])}\n    modelled {_shown(found['modelled'])}", flush=True)
    return rows


def _shown(classes: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds * 1e3:.1f} ms" for name, seconds in classes.items())


HEAD = (
    "| link | llama (layers x hidden) | mesh | measured ms | middle half | best | predicted ms | error | load |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def line(row: dict[str, Any]) -> str:
    middle = statistics.median(row["seconds"])
    low, _, high = statistics.quantiles(row["seconds"], n=4)
    cells = (
        row["link"],
        row["config"],
        row["mesh"],
        f"{middle * 1e3:.1f}",
        f"{low * 1e3:.1f} - {high * 1e3:.1f}",
        f"{min(row['seconds']) * 1e3:.1f}",
        f"{row['predicted'] * 1e3:.1f}",
        f"{row['predicted'] / middle - 1:+.1%}",
        f"{row['load']:.1f}",
    )
    return f"| {' | '.join(cells)} |"


def page(rows: Sequence[dict[str, Any]]) -> str:
    errors = [abs(row["predicted"] / statistics.median(row["seconds"]) - 1) for row in rows]
    parts = [
        "# Predicted and measured steps over Gloo",
        "",
        f"`python benchmarks/predict_gloo.py`: two processes of one machine, {STEPS} steps after {WARM_UP}, "
        "each profile calibrated under the same conditions right before. No figure of a run goes into its prediction. "
        "The load is that of other processes before the run, in processors.",
        "",
        HEAD,
        *map(line, rows),
        "",
        f"Median error {statistics.median(errors):.1%}, worst {max(errors):.1%}.",
        "",
        "Where the time goes on rank 0, milliseconds (measured: one traced step; the trace itself takes some):",
        "",
        "| link | llama | mesh | | " + " | ".join(rows[0]["measured"]) + " |",
        "|---|---|---|---|" + "---|" * len(rows[0]["measured"]),
    ]
    for row in rows:
        for source in ("measured", "modelled"):
            cells = " | ".join(f"{row[source][name] * 1e3:.1f}" for name in row["measured"])
            parts.append(f"| {row['link']} | {row['config']} | {row['mesh']} | {source} | {cells} |")
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="three configurations")
    parser.add_argument("--only", choices=("loopback", "shaped"))
    parser.add_argument("--worker")
    parser.add_argument("--profile", default="")
    options = parser.parse_args()
    if options.worker:
        worker(Config(*json.loads(options.worker)), options.profile)
        return 0
    links = {"loopback": loopback, "shaped": shaped}
    if os.geteuid():
        links.pop("shaped")
        print("not root: the shaped link is left out")
    rows = []
    for name, link in links.items():
        if options.only in (None, name):
            with link() as held, tempfile.TemporaryDirectory() as folder:
                rows += measure(held, CONFIGS[:3] if options.quick else CONFIGS, Path(folder))
    text = page(rows)
    print(text)
    if options.output:
        options.output.write_text(text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
