"""A Hugging Face Llama (random weights), trained with a warm-up schedule and written with save_pretrained."""

from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup

import meshweave as mw

SEQ, STEPS = 32, 10


def main(mesh="dp=2"):
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=SEQ,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    text = torch.tensor(list(Path(torch.__file__).with_name("functional.py").read_bytes()))
    rows = text[: len(text) // SEQ * SEQ].view(-1, SEQ)
    loader = DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=3, num_training_steps=STEPS)
    batch, options = {"input_ids": rows[:8], "labels": rows[:8]}, {"optimizer": optimizer, "clip_grad_norm": 1.0}
    step = mw.compile(model, loss=lambda out, batch: out.loss, example=batch, mesh=mesh, **options)
    for i, tokens in zip(range(STEPS), loader, strict=False):
        batch = {"input_ids": tokens, "labels": tokens}
        loss = step(batch)
        schedule.step()
        print(f"step {i} loss {loss:.6f}")
    model.save_pretrained("llama", state_dict=step.parameters())


if __name__ == "__main__":
    main()
