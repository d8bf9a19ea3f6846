"""A recommender in the manner of DLRM (Naumov et al., arXiv:1906.00091): large tables, pairwise products, Adagrad."""

from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import meshweave as mw

TABLES, WIDTH, DENSE, STEPS = [501, 200, 37], 16, 13, 10


def mlp(*sizes: int) -> nn.Sequential:
    layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


class DLRM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in TABLES)
        self.bottom, self.top = mlp(DENSE, 32, WIDTH), mlp(WIDTH + 6, 32, 1)

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        h = torch.stack([x, *(table(sparse[:, i]) for i, table in enumerate(self.tables))], dim=1)
        products = torch.bmm(h, h.transpose(1, 2)).flatten(1)
        pairs = [4 * i + j for i in range(4) for j in range(i)]
        return self.top(torch.cat([x, products[:, pairs]], dim=1)).squeeze(1)


def main(mesh="dp=2"):
    torch.manual_seed(0)
    model = DLRM()
    dense, clicks = torch.randn(160, DENSE), torch.randint(0, 2, (160,)).float()
    sparse = torch.stack([torch.randint(0, rows, (160,)) for rows in TABLES], dim=1)
    data = TensorDataset(dense, sparse, clicks)
    loader = DataLoader(data, batch_size=16, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    loss_of = lambda out, batch: F.binary_cross_entropy_with_logits(out, batch[2])  # noqa: E731
    step = mw.compile(model, loss=loss_of, example=data[:16], optimizer=optimizer, mesh=mesh)
    for i, (x, ids, y) in zip(range(STEPS), loader, strict=False):
        loss = step((x, ids, y))
        print(f"step {i} loss {loss:.6f}")
    torch.save(model.state_dict(), "dlrm.pt")


if __name__ == "__main__":
    main()
