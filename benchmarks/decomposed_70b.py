"""A step of Llama-70B under tensor parallelism of 8 with sequence parallelism, simulated on h100: collectives whole, in
another order, and taken apart beside their matmuls.

    python benchmarks/decomposed_70b.py               # 8 of 80 layers, 1 and 2 sequences of 8,192 tokens
    python benchmarks/decomposed_70b.py --write       # and writes results/decomposed_70b.md, anew after each row
    python benchmarks/decomposed_70b.py --layers 2

Forward, loss and backward without an update, parameters in bfloat16, compiled from the Hugging Face configuration on
the meta device. `ordered` is the overlap pass on the rank graph, `taken apart` that of `optimize.decompose`, which the
gate decides with the same profile, `rows in 2 chunks` the batch split. All are played by the simulator of whole steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from predictions import MODELS
from transformers import AutoConfig, AutoModelForCausalLM

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware.profile import MachineProfile
from meshweave.cost.simulate.step import simulate_roles
from meshweave.ir.device_program import rewrite_role
from meshweave.ir.rank import RankGraph
from meshweave.optimize.batch_split import split_program
from meshweave.optimize.decompose import DecomposeOptions, DecomposeReport, decompose
from meshweave.optimize.overlap.steps import overlap_roles
from meshweave.place.plans import Plan
from meshweave.program import Program

TABLE = Path(__file__).parent / "results" / "decomposed_70b.md"
TP, SEQ = 8, 8192
_PARTS = ("pipelined",)
PARTS = DecomposeOptions(all_gather=_PARTS, reduce_scatter=_PARTS, all_reduce=_PARTS)
HEAD = (
    "| layers | sequences | program | step ms | of whole | exposed ms | peak GB | taken apart | seconds of the pass |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Row:
    """A program as simulated: seconds of the step, in which nothing is computed, bytes at the peak."""

    layers: int
    batch: int
    name: str
    seconds: float
    exposed: float
    peak_bytes: int
    taken: str
    pass_seconds: float

    def text(self, whole: float) -> str:
        cells = (
            self.layers,
            self.batch,
            self.name,
            f"{self.seconds * 1e3:.1f}",
            f"{self.seconds / whole:.3f}",
            f"{self.exposed * 1e3:.1f}",
            f"{self.peak_bytes / 1e9:.2f}",
            self.taken,
            f"{self.pass_seconds:.1f}",
        )
        return f"| {' | '.join(map(str, cells))} |"


def compiled(layers: int, batch: int, machine: MachineProfile) -> Program:
    sizes = {**MODELS["70B"], "num_hidden_layers": layers, "num_key_value_heads": 8, "vocab_size": 128256}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, use_cache=False))
    ids = torch.empty(batch, SEQ, dtype=torch.long, device="meta")
    plan, options = (
        Plan.hf_tp("tp") + Plan.sequence_parallel("tp"),
        CaptureOptions(precision=mw.Precision(param_dtype=torch.bfloat16)),
    )
    example = {"input_ids": ids, "labels": ids}
    return build_program(
        StepSource(model, lambda out, _: out.loss), example, None, Target(mw.Mesh(tp=TP), plan, machine), options
    )


def rows_of(layers: int, batch: int, machine: MachineProfile) -> Iterator[Row]:
    role = compiled(layers, batch, machine).rank

    def row(name: str, one: RankGraph, taken: str, began: float) -> Row:
        took = time.perf_counter() - began
        found = simulate_roles([one], machine)
        (only,) = found.roles
        return Row(layers, batch, name, found.seconds, only.exposed_seconds, only.peak_bytes, taken, took)

    def ordered(one: RankGraph) -> RankGraph:
        (made,) = overlap_roles([one], machine).roles
        return made

    def of(report: DecomposeReport) -> str:
        return f"{report.num_taken} of {len(report.rows)}"

    for name in ("whole", "rows in 2 chunks")[:batch]:
        began = time.perf_counter()
        one = role if name == "whole" else rewrite_role(role, split_program)[0]
        yield row(name, one, "", began)
        began = time.perf_counter()
        yield row(f"{name}, ordered", ordered(one), "", began)
        for how, options in (("taken apart", None), ("in parts", PARTS)):
            began = time.perf_counter()
            apart, report = decompose(one, machine, options)
            yield row(f"{name}, {how}", apart, of(report), began)
            yield row(f"{name}, {how}, ordered", ordered(apart), of(report), began)


def page(rows: list[Row]) -> str:
    whole = {(row.layers, row.batch): row.seconds for row in rows if row.name == "whole"}
    return "\n".join(
        [
            "# Llama-70B, collectives taken apart",
            "",
            f"`python benchmarks/decomposed_70b.py --write`, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}. "
            f"Simulated on h100: {TP} devices,",
            "tensor and sequence parallelism; forward, loss and backward, bfloat16. `ordered` is the overlap pass on",
            "the rank graph; what is taken apart is the gate's choice with the same profile, `in parts` with",
            "collectives of parts alone, no messages from device to device.",
            "",
            HEAD,
            *(row.text(whole[row.layers, row.batch]) for row in rows),
            "",
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--batch", type=int, action="append", help="sequences; 1 and 2")
    parser.add_argument("--write", action="store_true", help="write results/decomposed_70b.md")
    options = parser.parse_args()
    machine, rows = mw.load_profile("h100"), list[Row]()
    for batch in options.batch or (1, 2):
        for row in rows_of(options.layers, batch, machine):
            rows.append(row)
            print(page(rows).splitlines()[-1], flush=True)
            if options.write:
                TABLE.write_text(page(rows))
    print(page(rows))


if __name__ == "__main__":
    main()
