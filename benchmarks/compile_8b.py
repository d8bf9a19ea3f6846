"""Compile time, memory and size of the compiled step of an 8B Llama, for 64 and for 16,384 ranks.

    python benchmarks/compile_8b.py                        # all, each in a process of its own
    python benchmarks/compile_8b.py fsdp=8,tp=8            # one mesh
    python benchmarks/compile_8b.py fsdp=8,tp=8 default    # with the default passes, priced for H100

The default passes run twice, with an empty cache and with what the first start left in it. Reads
CPU seconds beside wall seconds, since machines are shared. The model is on the meta device.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from typing import Any

MESHES = ("fsdp=8,tp=8", "fsdp=2048,tp=8")


def measure(mesh_text: str, passes: str = "none", layers: int = 32) -> dict[str, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    import meshweave as mw
    from meshweave.build import Target, build_program
    from meshweave.capture.optimizers import read_optimizer
    from meshweave.capture.step import CaptureOptions, StepSource
    from meshweave.passes import pass_list_of
    from meshweave.search import alone

    config = AutoConfig.for_model(
        "llama",
        num_hidden_layers=layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    mesh = mw.Mesh(mesh_text)
    ids = torch.empty(2 * mesh.size("fsdp"), 8192, dtype=torch.long, device="meta")
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=3e-4), model)
    options = CaptureOptions(precision=mw.Precision(autocast=torch.bfloat16), clip_grad_norm=1.0)
    costs = mw.AlphaBeta() if passes == "none" else mw.load_profile("h100")
    pass_list = replace(pass_list_of(passes), recalls=alone)
    wall, cpu = time.perf_counter(), time.process_time()
    program = build_program(
        StepSource(model, lambda out, batch: out.loss),
        {"input_ids": ids, "labels": ids},
        optimizer,
        Target(mesh, None, costs),
        options,
        pass_list,
    )
    return {
        "mesh": mesh_text,
        "passes": passes,
        "taken": program.optimized.name,
        "ranks": mesh.num_devices,
        "layers": layers,
        "parameters": sum(p.numel() for p in model.parameters()),
        "wall_s": round(time.perf_counter() - wall, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6, 2),
        "captured_nodes": len(program.captured.graph.nodes),
        "placed_nodes": len(program.placed.graph.nodes),
        "rank_graph_nodes": len(program.rank.graph.nodes),
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "none")))
        return
    runs = [(mesh, "none") for mesh in MESHES] + [(MESHES[0], "default")] * 2  # an empty cache, then a full one
    with tempfile.TemporaryDirectory() as cache:
        for run in runs:
            line = [sys.executable, __file__, *run]
            environment = {**os.environ, "MESHWEAVE_CACHE": cache}
            done = subprocess.run(line, check=True, stdout=subprocess.PIPE, text=True, env=environment)
            print(done.stdout.strip().splitlines()[-1], flush=True)


if __name__ == "__main__":
    main()
