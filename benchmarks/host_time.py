"""What a step costs the processor where the arithmetic is small: meshweave as it comes against PyTorch's own loops.

    python benchmarks/host_time.py [--json] [--write] [--rounds 7] [--steps 40] [--widths 32 128 384]

An MLP of 8 parameters and AdamW, batch 32: two processes over Gloo on the loopback (dp against DistributedDataParallel,
fsdp against FSDP2), and one process (against the plain loop); an LSTM of 50 steps on two virtual devices, against the
plain loop on the whole batch. One thread each. All ways take their steps in turns, so that what disturbs the machine
disturbs all alike; times are CPU milliseconds of a process and step, medians over rounds.

--json: one object with the ratios (ours / the peer) by row. --write: results/host_time.md.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import meshweave as mw

TABLE = Path(__file__).parent / "results" / "host_time.md"
WIDTHS, CLASSES, BATCH, WARM = (32, 128, 384), 8, 32, 20
PEERS = {"dp": "DDP", "fsdp": "FSDP2", "one device": "eager", "LSTM, two virtual devices": "eager"}
Batch = dict[str, Tensor]
Step = Callable[[], object]


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(width, width, batch_first=True), nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.lstm(x)
        result: Tensor = self.out(hidden[:, -1])
        return result


def mlp(width: int) -> nn.Module:
    """The same weights each time."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def loss_of(out: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out, batch["y"])


def ours(model: nn.Module, batch: Batch, mesh: str) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = mw.compile(
        model, loss=loss_of, example=batch, optimizer=optimizer, mesh=mesh, forward=lambda m, b: m(b["x"])
    )
    return lambda: step(batch).item()


def loop(model: nn.Module, batch: Batch) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step() -> float:
        optimizer.zero_grad()
        loss = loss_of(model(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def wrapped(model: nn.Module, way: str) -> nn.Module:
    if way == "dp":
        return DistributedDataParallel(model)
    for layer in model.children():
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    return model


def in_turns(ways: Mapping[str, Step], rounds: int, steps: int) -> dict[str, float]:
    """CPU milliseconds of this process per step of each way, medians of rounds."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(rounds + 1):
        for name, step in ways.items():
            if dist.is_initialized():
                dist.barrier()
            began = time.process_time()
            for _ in range(steps if i else WARM):
                step()
            if i:
                times[name].append((time.process_time() - began) / steps * 1e3)
    return {name: statistics.median(its) for name, its in times.items()}


def batch_of(width: int) -> Batch:
    torch.manual_seed(1)
    return {"x": torch.randn(BATCH, width), "y": torch.randint(CLASSES, (BATCH,))}


def rank(index: int, store: str, settings: argparse.Namespace) -> None:
    """A process of two; the first writes the rows to `store`.json."""
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=index, world_size=2)
    rows = []
    for way in ("dp", "fsdp"):
        for width in settings.widths:
            batch, half = batch_of(width), BATCH // 2
            own = {name: value[index * half : (index + 1) * half] for name, value in batch.items()}
            ways = {"ours": ours(mlp(width), batch, f"{way}=2"), "peer": loop(wrapped(mlp(width), way), own)}
            rows.append({"way": way, "width": width, **in_turns(ways, settings.rounds, settings.steps)})
    if index == 0:
        Path(f"{store}.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def measured(settings: argparse.Namespace) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        store = os.path.join(folder, "store")
        mp.spawn(rank, (store, settings), nprocs=2)  # type: ignore[no-untyped-call]
        rows: list[dict[str, Any]] = json.loads(Path(f"{store}.json").read_text(encoding="utf-8"))
    for width in settings.widths:
        batch = batch_of(width)
        ways = {"ours": ours(mlp(width), batch, "dp=1"), "peer": loop(mlp(width), batch)}
        rows.append({"way": "one device", "width": width, **in_turns(ways, settings.rounds, settings.steps)})
    torch.manual_seed(1)
    batch = {"x": torch.randn(BATCH, 50, 32), "y": torch.randint(CLASSES, (BATCH,))}
    models = [Recurrent(32) for _ in range(2)]
    ways = {"ours": ours(models[0], batch, "dp=2"), "peer": loop(models[1], batch)}
    rows.append({"way": "LSTM, two virtual devices", "width": 32, **in_turns(ways, settings.rounds, 10)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "# Host time of small steps\n",
        f"`python benchmarks/host_time.py --write`, torch {torch.__version__}, {os.cpu_count()} cores: an MLP of 8 "
        f"parameters, AdamW, batch {BATCH}; an LSTM of 50 steps. CPU ms of a process and step, medians, all ways in "
        "turns, one thread.\n",
        "| step | width | peer | peer, ms | ours, ms | ours / peer |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ratio = row["ours"] / row["peer"]
        name = PEERS[row["way"]]
        lines.append(
            f"| {row['way']} | {row['width']} | {name} | {row['peer']:.2f} | {row['ours']:.2f} | {ratio:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--widths", type=int, nargs="+", default=WIDTHS)
    settings = parser.parse_args()
    logging.disable(logging.WARNING)
    rows = measured(settings)
    if settings.write:
        TABLE.write_text(table(rows), encoding="utf-8")
    ratios = {f"{row['way']}, {row['width']}": round(row["ours"] / row["peer"], 3) for row in rows}
    print(json.dumps(ratios | {"rows": rows}) if settings.json else table(rows))


if __name__ == "__main__":
    main()
