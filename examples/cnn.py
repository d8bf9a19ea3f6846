"""A small convolutional network with batch normalisation and dropout, on 4 virtual devices.

Batch statistics are those of the global batch and dropout masks are the same on every mesh, so that 4 devices train
as one does.

    python examples/cnn.py
    meshweave check examples/cnn.py:factory --mesh dp=4
"""

import torch
from torch import Tensor, nn

import meshweave as mw


class CNN(nn.Module):
    def __init__(self, channels: int = 16, classes: int = 4) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(2 * channels),
            nn.ReLU(),
        )
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(2 * channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(self.features(x).mean((2, 3))))


def loss(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out, batch["y"])


def make_batch(index: int, batch: int = 16) -> dict[str, Tensor]:
    """Noisy 12x12 images of stripes: the class is their direction and width."""
    generator = torch.Generator().manual_seed(index)
    y = torch.randint(4, (batch,), generator=generator)
    along = torch.arange(12).expand(batch, 1, 12, 12)
    along = torch.where((y % 2 == 0).view(-1, 1, 1, 1), along, along.transpose(2, 3))
    stripes = torch.sin(along * (1.0 + y // 2).view(-1, 1, 1, 1))
    return {"x": stripes + 0.3 * torch.randn(batch, 3, 12, 12, generator=generator), "y": y}


def factory(batch: int = 16):
    """What the command line takes: a model, its batches and the loss."""
    return CNN(), lambda index: make_batch(index, batch), loss


def main() -> None:
    torch.manual_seed(0)
    model = CNN()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = mw.compile(model, loss=loss, example=make_batch(0), optimizer=optimizer, mesh="dp=2,tp=2")
    for i in range(60):
        value = step(make_batch(i))
        if i % 10 == 0 or i == 59:
            print(f"step {i + 1:3}  loss {value:.4f}")


if __name__ == "__main__":
    main()
