"""LoRA on a Hugging Face GPT-2 (random weights): the base is frozen, adapters of rank 4 are trained."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

SEQ, STEPS, RANK = 32, 10, 4


class LoRA(nn.Module):
    def __init__(self, base: nn.Module, inside: int, out: int):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(inside, RANK) / inside**0.5)
        self.up = nn.Parameter(torch.zeros(RANK, out))

    def forward(self, x):
        return self.base(x) + x @ self.down @ self.up


def main():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=SEQ, n_embd=48, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0
    )
    model = GPT2LMHeadModel(config).requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = LoRA(block.attn.c_attn, 48, 144)
    text = torch.tensor(list(Path(torch.__file__).with_name("functional.py").read_bytes()))
    rows = text[: len(text) // SEQ * SEQ].view(-1, SEQ)
    loader = DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for i, tokens in zip(range(STEPS), loader, strict=False):
        batch = {"input_ids": tokens, "labels": tokens}
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {i} loss {loss:.6f}")
    adapters = {name: value for name, value in model.state_dict().items() if name.endswith((".down", ".up"))}
    torch.save(adapters, "lora.pt")


if __name__ == "__main__":
    main()
