"""Processor seconds of questions about a step, answered from few equal layers and from all, and how these differ.

    python benchmarks/questions.py            # all; writes results/questions.md
    python benchmarks/questions.py llama3-8b  # one model

The first answer of a study, then another batch, mesh, machine and recomputation, of the same model. Each model runs in
a process of its own, which imports everything before: `start` is what that takes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TABLE = Path(__file__).parent / "results" / "questions.md"
MODELS = ("llama3-8b", "llama3-70b", "qwen3-30b-a3b", "llama3-405b")
QUESTIONS: dict[str, dict[str, Any]] = {
    "first": {},
    "another batch": {"rows": 2},
    "another mesh": {"mesh": "fsdp=128"},
    "another machine": {"profile": "h200"},
    "recomputation": {"passes": "recompute=full"},
    "tensor parallelism": {"mesh": "fsdp=8,tp=8"},
}
WHOLE = ("llama3-8b", "llama3-70b")  # of which the answers from all layers are compared: minutes for more


def measure(name: str) -> dict[str, Any]:
    """Processor seconds of the questions about a model, and the largest differences from answers with all layers."""
    import torch

    import meshweave as mw
    from meshweave.cli.sources import load_source

    began = time.process_time()
    source = load_source(name, batch=1, seq=8192, device="meta")
    optimizer = torch.optim.AdamW(source.model.parameters())
    study = mw.Study(source.model, loss=source.loss, optimizer=optimizer)
    result: dict[str, Any] = {"model": name, "start": time.process_time(), "model_s": time.process_time() - began}
    rows: dict[str, Any] = {}
    for title, changes in QUESTIONS.items():
        question = {"mesh": "fsdp=64", "profile": "h100", "framework": "torchtitan", "rows": 1, **changes}
        mesh = mw.Mesh(question["mesh"])
        ids = torch.empty(question.pop("rows") * mesh.size("fsdp"), 8192, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        answers, seconds = [], []
        for every_layer in (False, True)[: 1 + (name in WHOLE)]:
            began = time.process_time()
            how = {"clip_grad_norm": 1.0, "precision": torch.bfloat16, "every_layer": every_layer, **question}
            answers.append(study.simulate(batch, **how))
            seconds.append(time.process_time() - began)
        few, whole = answers[0], answers[-1]
        errors = [abs(few.seconds / whole.seconds - 1), abs(few.peak_bytes / whole.peak_bytes - 1)]
        is_few = any("equal layers" in note for note in few.notes)
        rows[title] = {"few_s": seconds[0], "whole_s": seconds[-1], "error": max(errors), "is_few": is_few}
    return {**result, "rows": rows}


def main() -> None:
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    asked = sys.argv[1:] or MODELS
    lines = [
        "# Questions about a step",
        "",
        "Processor seconds on one core, `python benchmarks/questions.py`; as torchtitan, 64 H100, 8,192 tokens: from",
        "few equal layers, and from all; the largest difference in seconds of the step or its peak.",
        "",
        "| model | question | few layers | all layers | difference |",
        "|---|---|---:|---:|---:|",
    ]
    for name in asked:
        output = subprocess.run(
            [sys.executable, __file__, "--measure", name], capture_output=True, text=True, check=True
        ).stdout
        found = json.loads(output.splitlines()[-1])
        lines.append(f"| {name} | imports and model | {found['start']:.1f} | | |")
        for title, row in found["rows"].items():
            has_whole = name in WHOLE
            whole, error = (f"{row['whole_s']:.1f}", f"{row['error']:.0e}") if has_whole else ("", "")
            few = f"{row['few_s']:.1f}" + ("" if row["is_few"] else " (all)")
            lines.append(f"| {name} | {title} | {few} | {whole} | {error} |")
            print(lines[-1], flush=True)
    if not sys.argv[1:]:
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
