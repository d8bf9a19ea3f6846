"""A multilayer perceptron that learns a fixed random function, on 4 virtual devices.

python examples/mlp.py
meshweave check examples/mlp.py:factory --mesh dp=2,tp=2
"""

import torch
from torch import Tensor, nn

import meshweave as mw


class MLP(nn.Module):
    def __init__(self, features: int = 32, hidden: int = 96, classes: int = 10) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, hidden),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.GELU(),
            nn.LayerNorm(hidden),
            nn.Linear(hidden, classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out, batch["y"])


def make_batch(index: int, batch: int = 16) -> dict[str, Tensor]:
    """Points whose class is the largest of 10 fixed directions."""
    directions = torch.randn(32, 10, generator=torch.Generator().manual_seed(0))
    x = torch.randn(batch, 32, generator=torch.Generator().manual_seed(index + 1))
    return {"x": x, "y": (x @ directions).argmax(1)}


def factory(batch: int = 16):
    """What the command line takes: a model, its batches and the loss."""
    return MLP(), lambda index: make_batch(index, batch), loss


def main() -> None:
    torch.manual_seed(0)
    model = MLP()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = mw.compile(model, loss=loss, example=make_batch(0), optimizer=optimizer, mesh="dp=2,tp=2")
    for i in range(100):
        value = step(make_batch(i))
        if i % 20 == 0 or i == 99:
            print(f"step {i + 1:3}  loss {value:.4f}")


if __name__ == "__main__":
    main()
