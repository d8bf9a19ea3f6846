"""A ViT of our own with an exponential moving average of its weights, which is what is evaluated and saved."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

import meshweave as mw

WIDTH, PATCH, STEPS = 48, 4, 10


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patches = nn.Conv2d(3, WIDTH, PATCH, PATCH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.randn(1, 17, WIDTH) * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x):
        h = self.patches(x).flatten(2).transpose(1, 2)
        h = torch.cat([self.token.expand(len(x), -1, -1), h], dim=1) + self.positions
        return self.head(self.layers(h)[:, 0])


def main(mesh="dp=2"):
    torch.manual_seed(0)
    model = ViT()
    images, labels = torch.randn(80, 3, 16, 16), torch.randint(0, 10, (80,))
    loader = DataLoader(
        TensorDataset(images, labels), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loss_of = lambda out, batch: F.cross_entropy(out, batch[1], label_smoothing=0.1)  # noqa: E731
    step = mw.compile(model, loss=loss_of, example=(images[:8], labels[:8]), optimizer=optimizer, mesh=mesh)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for i, (x, y) in zip(range(STEPS), loader, strict=False):
        loss = step((x, y))
        ema.update_parameters(model)
        print(f"step {i} loss {loss:.6f}")
    with torch.no_grad():
        print(f"average {F.cross_entropy(ema(images), labels).item():.6f}")
    torch.save(ema.module.state_dict(), "vit.pt")


if __name__ == "__main__":
    main()
