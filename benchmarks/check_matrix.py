"""`meshweave check` over every model and mesh that must hold, as a user would run it; a table of the worst errors.

    python benchmarks/check_matrix.py [-o benchmarks/results/check_matrix.md] [--quick]
    python benchmarks/check_matrix.py --stages      # layers split over devices: 10 steps of SGD and of AdamW

Uneven everywhere: vocabulary 257, 3 heads (on tp=2 and tp=4), batch 5 (on dp=2 and dp=4). One process per check.
"""

from __future__ import annotations

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SIZES = "num_hidden_layers=2&hidden_size=48&intermediate_size=96&num_attention_heads=3"
MODELS = {
    "llama": f"hf:llama?{SIZES}&num_key_value_heads=3&vocab_size=257",
    "gpt2": "hf:gpt2?n_layer=2&n_embd=48&n_head=3&vocab_size=257",
    "bert": f"hf:bert?{SIZES}&vocab_size=257",
    "vit": f"hf:vit?{SIZES}",
    "qwen2": f"hf:qwen2?{SIZES}&num_key_value_heads=3&vocab_size=257",
    "mlp": f"{ROOT}/examples/mlp.py:factory",
    "cnn": f"{ROOT}/examples/cnn.py:factory",
}
MESHES = ("dp=4", "tp=4", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2,tp=2")
STAGED = {
    "mlp": MODELS["mlp"],
    "llama, 4 layers": MODELS["llama"].replace("num_hidden_layers=2", "num_hidden_layers=4"),
    "gpt2, tied": MODELS["gpt2"],
    "cnn": MODELS["cnn"],
}
STAGES = ("pp=2", "pp=4", "pp=2,dp=2", "pp=2,tp=2")


def check(model: str, mesh: str, *options: str) -> dict[str, object]:
    command = [sys.executable, "-m", "meshweave", "check", model, "--mesh", mesh, "--json", *options]
    if model.startswith("hf:"):
        command += ["--batch", "5"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if lines else {}
    return {"exit": done.returncode, "error": done.stderr.strip()[-300:] if done.returncode else "", **found}


def worst(found: dict[str, object], kind: str) -> str:
    rows = [r for r in found.get("by_kind", []) if r["run"] == "mesh" and r["kind"].startswith(kind)]  # type: ignore[attr-defined, union-attr]
    return f"{max(r['error'] for r in rows):.1e}" if rows else "-"


def excused(found: dict[str, object]) -> int:
    return sum(r["excused"] for r in found.get("by_kind", []) if r["run"] == "mesh")  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--quick", action="store_true", help="two meshes only")
    parser.add_argument("--stages", action="store_true", help="layers split over devices")
    options = parser.parse_args()
    rows = [
        "| model | mesh | result | loss | gradients | parameters | state | below rounding |",
        "|---|---|---|---|---|---|---|---|",
    ]
    failures = 0
    models, meshes = (STAGED, STAGES) if options.stages else (MODELS, MESHES)
    extras = [["--steps", "10", "--optimizer", kind] for kind in ("sgd", "adamw")] if options.stages else [[]]
    for base, model in models.items():
        for mesh, extra in itertools.product(meshes[1:4:2] if options.quick else meshes, extras):
            if base in ("gpt2, tied", "mlp", "cnn") and mesh == "pp=4":
                continue  # too few layers
            name = f"{base}, {extra[-1]}" if extra else base
            found = check(model, mesh, *extra)
            failures += found["exit"] != 0
            verdict = "equal" if found["exit"] == 0 else f"FAILED {found['error']}"
            cells = [worst(found, k) for k in ("loss", "gradient", "parameter", "state")]
            rows.append(f"| {name} | {mesh} | {verdict} | {' | '.join(cells)} | {excused(found)} |")
            print(rows[-1], flush=True)
    if options.output:
        options.output.write_text("\n".join(rows) + "\n")
    return 1 if failures else 0


if __name__ == "__main__":
    raise SystemExit(main())
