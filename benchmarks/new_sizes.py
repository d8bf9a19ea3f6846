"""Seconds of a step on a batch of a size that is new to it, beside eager PyTorch, by model and mesh.

python benchmarks/new_sizes.py [--sizes 8] [--models gnn,encoder,convnet] [--meshes 1,dp=2,fsdp=2]
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn

import meshweave as mw

Batch = dict[str, Tensor]


class GNN(nn.Module):
    """Two rounds of messages along edges: nodes x [n, 16], edges [e, 2]."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.first, self.message = nn.Linear(16, hidden), nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))
        self.last = nn.Linear(hidden, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.message:
            sent = layer(h.index_select(0, edges[:, 0]))
            h = h + torch.zeros_like(h).index_add(0, edges[:, 1], sent).relu()
        return self.last(h)


class Encoder(nn.Module):
    """Two layers of nn.TransformerEncoder on tokens [4, length]."""

    def __init__(self, width: int = 64, vocabulary: int = 100) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.last = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(self.embed(x)))


class ConvNet(nn.Module):
    """Three convolutions with batch norm on crops [4, 3, height, width]."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        channels = (3, width, 2 * width, 2 * width)
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
                for a, b in pairwise(channels)
            )
        )
        self.last = nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layers(x).mean((2, 3)))


def graph(i: int) -> Batch:
    n, e = 40 + 3 * i, 120 + 7 * i
    return {"x": torch.randn(n, 16), "edges": torch.randint(0, n, (e, 2)), "y": torch.randint(0, 4, (n,))}


def sequence(i: int) -> Batch:
    return {"x": torch.randint(0, 100, (4, 24 + 3 * i)), "y": torch.randint(0, 4, (4, 24 + 3 * i))}


def crop(i: int) -> Batch:
    return {"x": torch.randn(4, 3, 32 + 5 * i, 48 + 3 * i), "y": torch.randint(0, 4, (4,))}


def loss(out: Tensor, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), batch["y"].flatten())


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Batch]]] = {
    "gnn": (GNN, graph), "encoder": (Encoder, sequence), "convnet": (ConvNet, crop),
}  # fmt: skip


def eager(name: str, sizes: int) -> list[float]:
    model, make = MODELS[name][0](), MODELS[name][1]
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: Batch) -> None:
        optimizer.zero_grad()
        inputs = {key: value for key, value in batch.items() if key != "y"}
        loss(model(**inputs), batch).backward()
        optimizer.step()

    return timed(step, make, sizes)


def compiled(name: str, mesh: str, sizes: int) -> list[float]:
    model, make = MODELS[name][0](), MODELS[name][1]
    step = mw.compile(model, loss=loss, example=make(0), optimizer=torch.optim.AdamW(model.parameters()), mesh=mesh)
    return timed(step, make, sizes)


def timed(step: Callable[[Batch], object], make: Callable[[int], Batch], sizes: int) -> list[float]:
    """Processor seconds of each step, the first size (which is compiled for) left out."""
    seconds = []
    for batch in map(make, range(sizes + 1)):
        start = time.process_time()
        step(batch)
        seconds.append(time.process_time() - start)
    return seconds[1:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, default=6)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", default="dp=1,dp=2,fsdp=2")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in options.models.split(","):
        print(f"{name:8} eager  {statistics.median(eager(name, options.sizes)) * 1e3:8.1f} ms")
        for mesh in options.meshes.split(","):
            seconds = compiled(name, mesh, options.sizes)
            print(f"{name:8} {mesh:6} {statistics.median(seconds) * 1e3:8.1f} ms (first {seconds[0] * 1e3:.1f})")


if __name__ == "__main__":
    main()
