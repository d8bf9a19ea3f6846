"""A GPT of our own, trained on bytes of text: parameter groups, a cosine schedule, clipping, evaluation as it goes."""

import math
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

SEQ, WIDTH, HEADS, LAYERS, STEPS = 32, 48, 4, 2, 12


class Text(Dataset):
    def __init__(self, begin: float, end: float):
        data = Path(torch.__file__).with_name("functional.py").read_bytes()
        self.data = torch.tensor(list(data[int(begin * len(data)) : int(end * len(data))]))

    def __len__(self):
        return (len(self.data) - 1) // SEQ

    def __getitem__(self, i):
        return self.data[i * SEQ : (i + 1) * SEQ], self.data[i * SEQ + 1 : (i + 1) * SEQ + 1]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        b, s, w = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, s, 3, HEADS, w // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, s, w))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, x):
        h = self.tokens(x) + self.positions(torch.arange(x.shape[1], device=x.device))
        return self.head(self.norm(self.blocks(h)))


def loss_of(logits, y):
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def main():
    torch.manual_seed(0)
    model = GPT()
    decay = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: 0.5 * (1 + math.cos(math.pi * i / STEPS)))
    loader = DataLoader(Text(0, 0.8), batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    x_val, y_val = next(iter(DataLoader(Text(0.8, 1), batch_size=16)))
    for i, (x, y) in zip(range(STEPS), loader, strict=False):
        loss = loss_of(model(x), y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        print(f"step {i} loss {loss:.6f}")
        if i % 4 == 3:
            model.eval()
            with torch.no_grad():
                print(f"step {i} validation {loss_of(model(x_val), y_val).item():.6f}")
            model.train()
    torch.save(model.state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
