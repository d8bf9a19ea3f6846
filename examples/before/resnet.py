"""A small ResNet with batch normalisation on images: SGD with momentum, OneCycleLR, a last batch that is smaller."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS = 2


class Residual(nn.Module):
    def __init__(self, inside: int, out: int, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(inside, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        self.skip = nn.Sequential(nn.Conv2d(inside, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return F.relu(self.skip(x) + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


def resnet() -> nn.Module:
    stem = [nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    blocks = [Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2)]
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


def main():
    torch.manual_seed(0)
    model = resnet()
    images, labels = torch.randn(44, 3, 16, 16), torch.randint(0, 10, (44,))
    loader = DataLoader(
        TensorDataset(images, labels), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=EPOCHS * len(loader))
    for epoch in range(EPOCHS):
        for x, y in loader:
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            print(f"epoch {epoch} loss {loss:.6f}")
        model.eval()
        with torch.no_grad():
            right = (model(images).argmax(1) == labels).float().mean()
        model.train()
        print(f"epoch {epoch} accuracy {right.item():.6f}")
    torch.save(model.state_dict(), "resnet.pt")


if __name__ == "__main__":
    main()
