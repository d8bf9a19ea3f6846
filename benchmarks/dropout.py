"""What dropout costs: steps of meshweave against DistributedDataParallel, each with dropout 0.1 and with none.

    python benchmarks/dropout.py [--json] [--write] [--steps 8] [--layers 2]

GPT-2 (on embeddings, attention scores, results of attention and of MLP) and Llama (on attention scores), one process
and one thread. All four ways have a copy of the model and take their steps in turns, so that what disturbs the machine
disturbs all alike; times are CPU seconds of the process, medians. One process has no communication, which would hide
or cover the cost: DDP is what it wraps, PyTorch's own step.

--json: one object with `ratio` (ours with dropout / DDP with dropout, the worst row), `own_ratio` (ours with / without)
and rows. --write: results/dropout.md.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import meshweave as mw

TABLE = Path(__file__).parent / "results" / "dropout.md"
FAMILIES = ("gpt2", "llama")
SEQUENCE, HIDDEN, VOCABULARY, BATCH = 256, 512, 4096, 4
Step = Callable[[Tensor], float]


def model_of(family: str, layers: int, p: float) -> nn.Module:
    """The same weights each time."""
    import transformers

    torch.manual_seed(0)
    if family == "gpt2":
        gpt2 = transformers.GPT2Config(
            n_embd=HIDDEN, n_layer=layers, n_head=HIDDEN // 64, vocab_size=VOCABULARY, n_positions=SEQUENCE,
            resid_pdrop=p, embd_pdrop=p, attn_pdrop=p,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(gpt2)
    llama = transformers.LlamaConfig(
        hidden_size=HIDDEN, intermediate_size=3 * HIDDEN, num_hidden_layers=layers, num_attention_heads=HIDDEN // 64,
        num_key_value_heads=HIDDEN // 64, vocab_size=VOCABULARY, max_position_embeddings=SEQUENCE, attention_dropout=p,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(llama)


def ours(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    example = {"input_ids": torch.zeros(BATCH, SEQUENCE, dtype=torch.long)}
    example["labels"] = example["input_ids"]
    step = mw.compile(model, loss=lambda out, batch: out.loss, example=example, optimizer=optimizer, mesh="dp=1")
    return lambda tokens: step({"input_ids": tokens, "labels": tokens})


def ddp(model: nn.Module) -> Step:
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step(tokens: Tensor) -> float:
        loss: Tensor = wrapped(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    return step


def measured(family: str, layers: int, num_steps: int) -> dict[str, Any]:
    """Medians of CPU seconds of a step of each way."""
    ways = {
        f"{name}, {p}": make(model_of(family, layers, p))
        for p in (0.0, 0.1)
        for name, make in (("ours", ours), ("ddp", ddp))
    }
    generator = torch.Generator().manual_seed(1)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for i in range(num_steps + 2):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
        for name, step in ways.items():
            began = time.process_time()
            step(tokens)
            if i >= 2:
                seconds[name].append(time.process_time() - began)
    found = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "family": family,
        "seconds": found,
        "ratio": found["ours, 0.1"] / found["ddp, 0.1"],
        "own_ratio": found["ours, 0.1"] / found["ours, 0.0"],
        "ddp_own_ratio": found["ddp, 0.1"] / found["ddp, 0.0"],
    }


def table(rows: list[dict[str, Any]], layers: int) -> str:
    lines = [
        "# Dropout",
        "",
        f"`python benchmarks/dropout.py --write`, torch {torch.__version__}: {layers} layers of {HIDDEN}, batch "
        f"{BATCH} x {SEQUENCE}, AdamW, one thread. CPU ms of a step, medians, all ways in turns.",
        "",
        "| model | DDP, none | DDP, 0.1 | ours, none | ours, 0.1 | ours / DDP, 0.1 | dropout adds: ours | DDP |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        ms = [1e3 * row["seconds"][name] for name in ("ddp, 0.0", "ddp, 0.1", "ours, 0.0", "ours, 0.1")]
        cells = [f"{x:.0f}" for x in ms] + [f"{row['ratio']:.2f}"]
        cells += [f"{100 * (row[name] - 1):.0f}%" for name in ("own_ratio", "ddp_own_ratio")]
        lines.append(f"| {row['family']} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=2)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    rows = [measured(family, asked.layers, asked.steps) for family in FAMILIES]
    dist.destroy_process_group()
    if asked.write:
        TABLE.write_text(table(rows, asked.layers))
    worst = {name: max(row[name] for row in rows) for name in ("ratio", "own_ratio")}
    print(json.dumps({**worst, "rows": rows}) if asked.json else table(rows, asked.layers))


if __name__ == "__main__":
    main()
