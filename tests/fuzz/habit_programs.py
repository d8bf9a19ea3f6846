"""Random training programs of blocks as users write them, with losses, schedules and batches of theirs."""

from __future__ import annotations

from random import Random

import torch
from tests.fuzz.habits import Drop, block
from torch import nn
from torch.nn import functional as F

from meshweave.passes import Decompose, Overlap, Prefetch, Recompute, Split

VOCAB = 13


class Layer(nn.Module):
    """Two blocks that follow each other: what repeats."""

    def __init__(self, a, b):
        super().__init__()
        self.a, self.b = a, b

    def forward(self, x, mask):
        return self.b(self.a(x, mask), mask)


class Net(nn.Module):
    def __init__(self, chance, T, micro, keep, dropout_ok, stages):
        super().__init__()
        c = self.c = chance.choice([4, 6, 8, 5, 7])
        self.kind = chance.choice(["tokens", "tokens", "floats", "mixed"])
        self.emb = nn.Embedding(VOCAB, c, padding_idx=chance.choice([None, 0]), scale_grad_by_freq=False)
        self.inp = nn.Linear(3, c)
        self.pos = nn.Embedding(T, c) if chance.random() < 0.5 else None
        self.names = []
        self.blocks = nn.ModuleList()
        if chance.random() < 0.3 or not dropout_ok:  # layers that repeat
            state = chance.getstate()
            for _ in range(max(2, stages)):
                chance.setstate(state)
                a, n = block(chance, c, T, micro, keep, dropout_ok)
                b, m = block(chance, c, T, micro, keep, dropout_ok)
                self.blocks.append(Layer(a, b))
                self.names.append(f"[{n} {m}]")
        while (
            len(self.blocks) < 2
            or chance.random() < 0.6
            or sum(1 for b in self.blocks if list(b.parameters())) < stages
        ):
            b, n = block(chance, c, T, micro, keep, dropout_ok)
            self.blocks.append(b)
            self.names.append(n)
        self.head = nn.Linear(c, VOCAB, bias=False)
        self.tied = chance.random() < 0.5
        if self.tied and self.kind != "floats":
            self.head.weight = self.emb.weight
        self.form = chance.choice(["tensor", "tuple", "dict", "dict"])

    def forward(self, ids, x, mask):
        if self.kind == "tokens":
            h = self.emb(ids)
        elif self.kind == "floats":
            h = self.inp(x) + 0 * self.emb.weight.sum()
        else:
            h = self.emb(ids) + self.inp(x)
        if self.pos is not None:
            h = h + self.pos(torch.arange(h.shape[1], device=h.device))
        extra = 0.0
        for i, b in enumerate(self.blocks):
            h = b(h, mask)
            if i == 1:
                extra = h.pow(2).mean() * 0.01
        out = self.head(h)
        if self.form == "tensor":
            return out
        return (out, extra) if self.form == "tuple" else {"logits": out, "extra": extra}


MESHES = [
    "dp=2",
    "dp=3",
    "fsdp=2",
    "fsdp=3",
    "fsdp=4",
    "tp=2",
    "tp=3",
    "pp=2",
    "dp=2,tp=2",
    "fsdp=2,tp=2",
    "dp=2,fsdp=2",
    "pp=2,dp=2",
    "pp=2,fsdp=2",
    "pp=2,tp=2",
    "dp=2,fsdp=2,tp=2",
    "",
]


class Program:
    """The program of a seed, always the same: model, batches, loss, optimizer, and what compile is asked for."""

    def __init__(self, seed):
        chance = self.chance = Random(f"habits {seed}")
        torch.manual_seed(seed + 77)
        self.seed = seed
        self.mesh = chance.choice(MESHES)
        self.accumulate = chance.choice([1, 1, 1, 2, 3])
        micro = chance.choice([2, 3, 4, 5, 6])
        self.batch = micro * self.accumulate
        T = chance.choice([3, 4, 5, 7])
        stages = 2 if "pp" in self.mesh else 1
        self.dtype = chance.choice([torch.float64, torch.float64, torch.float64, torch.float32])
        recompute = chance.choice(["none", "none", "full", "selective"])
        self.steps = 3
        self.model = Net(chance, T, micro, self.accumulate, recompute == "none", stages).to(self.dtype)
        for m in self.model.modules():
            if isinstance(m, Drop):
                m.masks = m.masks.double()
        self.loss_kind = chance.choice(["ce", "ignore", "masked", "smooth", "weights", "bce", "kl", "nll_sum", "huber"])
        self.opt = chance.choice(["sgd", "nesterov", "adam", "adamw", "groups", "foreach", "amsgrad"])
        self.sched = chance.choice([None, "cosine", "step", "lambda"])
        o = self.options = {}
        self.passes = []
        if recompute != "none":
            self.passes.append(Recompute(recompute))
        if chance.random() < 0.35:
            self.passes.append(Prefetch(chance.choice([1, 2])))
        if chance.random() < 0.25:
            self.passes += [Overlap()]
            o["profile"] = "h100"
        if chance.random() < 0.3:
            self.passes.append(Decompose(when="always"))
            o["profile"] = "h100"
        if chance.random() < 0.25:
            self.passes.append(Split((2,), when="always"))
            o["profile"] = "h100"
        if self.dtype == torch.float32 and chance.random() < 0.5:
            o["precision"] = torch.bfloat16
        if chance.random() < 0.3:
            o["clip_grad_norm"] = chance.choice([0.1, 1.0])
        g = torch.Generator().manual_seed(seed)
        self.data = []
        weights = torch.rand(VOCAB, generator=g).to(self.dtype) + 0.5
        for _ in range(self.steps):
            ids = torch.randint(0, VOCAB, (self.batch, T), generator=g)
            y = torch.randint(0, VOCAB, (self.batch, T), generator=g)
            mask = torch.rand(self.batch, T, generator=g) < 0.7
            mask[:, 0] = True
            if self.loss_kind == "ignore":
                y[torch.rand(self.batch, T, generator=g) < 0.3] = -100
                y[::1, 0] = 1
            self.data.append(
                {
                    "ids": ids,
                    "x": torch.randn(self.batch, T, 3, generator=g, dtype=torch.float64).to(self.dtype),
                    "mask": mask,
                    "labels": y,
                }
            )
        self.weights = weights

    def __str__(self):
        model = f"{self.model.kind} {self.model.names} c={self.model.c} tied={self.model.tied} {self.model.form}"
        asked = f"loss={self.loss_kind} opt={self.opt} sched={self.sched} {self.options}"
        head = f"seed {self.seed} mesh {self.mesh!r} batch {self.batch} accumulate {self.accumulate} {self.dtype}"
        return f"{head}\n{model}\n{asked}"

    def loss(self, out, batch):
        extra = 0.0
        if isinstance(out, tuple):
            out, extra = out
        elif isinstance(out, dict):
            out, extra = out["logits"], out["extra"]
        y, mask = batch["labels"], batch["mask"]
        k = self.loss_kind
        if k == "ce":
            v = F.cross_entropy(out.transpose(1, 2), y)
        elif k == "ignore":
            v = F.cross_entropy(out.view(-1, VOCAB), y.view(-1), ignore_index=-100)
        elif k == "masked":
            t = F.cross_entropy(out.reshape(-1, VOCAB), y.reshape(-1), reduction="none").view_as(y)
            v = (t * mask).sum() / mask.sum()
        elif k == "smooth":
            v = F.cross_entropy(out.flatten(0, 1), y.flatten(), label_smoothing=0.1)
        elif k == "weights":
            v = F.cross_entropy(out.flatten(0, 1), y.flatten(), weight=self.weights.to(out.dtype))
        elif k == "bce":
            v = F.binary_cross_entropy_with_logits(
                out, F.one_hot(y, VOCAB).to(out.dtype), pos_weight=self.weights.to(out.dtype)
            )
        elif k == "kl":
            v = F.kl_div(
                out.log_softmax(-1), F.one_hot(y, VOCAB).to(out.dtype) * 0.9 + 0.1 / VOCAB, reduction="batchmean"
            )
        elif k == "nll_sum":
            v = F.nll_loss(out.log_softmax(-1).flatten(0, 1), y.flatten(), reduction="sum") / y.numel()
        else:
            v = F.huber_loss(out.softmax(-1), F.one_hot(y, VOCAB).to(out.dtype))
        return v + extra

    def optimizer(self, model):
        ps = [p for p in model.parameters() if p.requires_grad]
        if self.opt == "sgd":
            return torch.optim.SGD(ps, lr=0.05, momentum=0.9, weight_decay=0.01)
        if self.opt == "nesterov":
            return torch.optim.SGD(ps, lr=0.05, momentum=0.9, nesterov=True)
        if self.opt == "adam":
            return torch.optim.Adam(ps, lr=0.01, weight_decay=0.1, eps=1e-3)
        if self.opt == "adamw":
            return torch.optim.AdamW(ps, lr=0.01, eps=1e-3)
        if self.opt == "foreach":
            return torch.optim.AdamW(ps, lr=0.01, eps=1e-3, foreach=True)
        if self.opt == "amsgrad":
            return torch.optim.Adam(ps, lr=0.01, eps=1e-3, amsgrad=True)
        decay = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() > 1]
        rest = [p for n, p in model.named_parameters() if p.requires_grad and p.dim() <= 1]
        return torch.optim.AdamW(
            [
                g
                for g in ({"params": decay, "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0, "lr": 0.02})
                if g["params"]
            ],
            lr=0.01,
            eps=1e-3,
        )

    def scheduler(self, opt):
        s = torch.optim.lr_scheduler
        return {
            None: lambda: None,
            "cosine": lambda: s.CosineAnnealingLR(opt, 4),
            "step": lambda: s.StepLR(opt, 1, 0.5),
            "lambda": lambda: s.LambdaLR(opt, lambda n: min(1.0, (n + 1) / 3)),
        }[self.sched]()
