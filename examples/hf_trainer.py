"""A Hugging Face Llama (random weights), trained by Trainer on compiled steps."""

from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments

from meshweave.integrations.hf import MeshweaveTrainer

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
    arguments = TrainingArguments(
        output_dir="run", per_device_train_batch_size=4, gradient_accumulation_steps=2, max_steps=STEPS,
        learning_rate=2e-3, warmup_steps=3, lr_scheduler_type="cosine", logging_steps=1, save_strategy="no",
        report_to=[], disable_tqdm=True, use_cpu=not torch.cuda.is_available(),
        accelerator_config={"split_batches": True},  # a batch is as large on several processes
    )  # fmt: skip
    data = [{"input_ids": row, "labels": row} for row in rows]
    trainer = MeshweaveTrainer(model, arguments, train_dataset=data, compile_options={"mesh": mesh})
    trainer.train()
    for i, entry in enumerate(entry for entry in trainer.state.log_history if "loss" in entry):
        print(f"step {i} loss {entry['loss']:.6f}")
    trainer.save_model("llama")


if __name__ == "__main__":
    main()
