"""Seconds and memory of the two proofs on 1,024 virtual devices: completeness, and freedom from deadlock.

    python benchmarks/check_scale.py                    # every case, each in a process of its own; writes the table
    python benchmarks/check_scale.py fsdp=128,tp=8 12   # one mesh, number of layers

The model is a Llama on the meta device (hidden 1024, 16 heads, vocabulary 32,000, AdamW, clipping, bf16 autocast), an
axis pp cuts it in stages. "beyond GB" is how far the checks raise the peak that compiling has left.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

CASES = [
    ("fsdp=128,tp=8", 8),
    ("fsdp=128,tp=8", 32),
    ("dp=16,fsdp=8,tp=8", 8),
    ("fsdp=1024", 8),
    ("fsdp=341,tp=3", 8),  # nothing divides evenly
    ("pp=4,dp=32,tp=8", 8),
]
TABLE = Path(__file__).parent / "results" / "check_scale.md"


def compiled(mesh_text: str, layers: int) -> Any:
    """The compiled step of a Llama of `layers` layers."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import meshweave as mw
    from meshweave.build import Target, build_program
    from meshweave.capture.optimizers import read_optimizer
    from meshweave.capture.step import CaptureOptions, StepSource

    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=layers,
        hidden_size=1024,
        intermediate_size=4096,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        use_cache=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mesh = mw.Mesh(mesh_text)
    ids = torch.empty(mesh.num_devices, 1024, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    options = CaptureOptions(precision=mw.Precision(autocast=torch.bfloat16), clip_grad_norm=1.0)
    plan = None
    batch = {"input_ids": ids, "labels": ids}
    return build_program(
        StepSource(model, lambda out, _: out.loss), batch, optimizer, Target(mesh, plan, mw.AlphaBeta()), options
    )


def measure(mesh_text: str, layers: int) -> dict[str, object]:
    from meshweave.check.completeness import check_complete
    from meshweave.check.deadlock import check_deadlock

    program = compiled(mesh_text, layers)
    before = _peak_gb()
    start, cpu = time.perf_counter(), time.process_time()
    complete = check_complete(program.placed, program.roles)
    middle = time.perf_counter()
    free = check_deadlock(program.roles)
    return {
        "mesh": mesh_text,
        "devices": complete.num_devices,
        "layers": layers,
        "roles": complete.num_roles,
        "rank graph nodes": sum(len(r.graph.nodes) for r in program.roles),
        "communications": free.num_communications,
        "steps replayed": complete.num_steps,
        "twins": complete.num_twins,
        "completeness s": round(middle - start, 2),
        "deadlock s": round(time.perf_counter() - middle, 2),
        "cpu s": round(time.process_time() - cpu, 2),
        "beyond GB": round(_peak_gb() - before, 2),
        "peak GB": round(_peak_gb(), 2),
    }


def _peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def main() -> None:
    if len(sys.argv) > 2:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
        return
    rows = []
    for mesh, layers in CASES:
        command = [sys.executable, __file__, mesh, str(layers)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append(json.loads(done.stdout.strip().splitlines()[-1]))
        print(rows[-1], flush=True)
    TABLE.parent.mkdir(exist_ok=True)
    lines = [
        "# The proofs at scale",
        "",
        f"`python benchmarks/check_scale.py`, {time.strftime('%Y-%m-%d')}, {os.cpu_count()} cores, torch "
        f"{version('torch')}. Both checks alone, on one compiled step, in a process of its own.",
        "Of the steps of moves, twins are equal to one that was replayed. The 1,023 devices divide nothing evenly.",
        "",
        "| " + " | ".join(rows[0]) + " |",
        "|" + "---|" * len(rows[0]),
        *("| " + " | ".join(map(str, row.values())) + " |" for row in rows),
    ]
    TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
