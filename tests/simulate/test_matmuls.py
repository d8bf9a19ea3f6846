"""What the matmuls of other frameworks do beside multiplying: add, round sums, run beside communication in chunks."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.models import hugging_face

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.frameworks import FRAMEWORKS
from meshweave.cost.simulate.matmuls import PLAIN, MatmulStyle
from meshweave.cost.simulate.result import Simulation
from meshweave.passes import Recompute, pass_list_of
from meshweave.program import Program
from meshweave.whatif import simulate

MICROBATCHES = 4


@pytest.fixture(scope="module")
def program() -> Program:
    model, batch, loss = hugging_face("llama", batch=2 * MICROBATCHES, heads=4, seq=64)
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    plan = mw.Plan.zero1("dp") + mw.Plan.hf_tp("tp") + mw.Plan.sequence_parallel("tp")
    options = CaptureOptions(accumulate=MICROBATCHES, precision=mw.Precision(param_dtype=torch.bfloat16))
    target = Target(mw.Mesh("dp=2,tp=2"), plan, load_profile("h100"))
    return build_program(StepSource(model, loss), batch, optimizer, target, options, pass_list_of("none"))


def simulated(program: Program, style: MatmulStyle, **how: object) -> Simulation:
    framework = replace(FRAMEWORKS["megatron"], matmuls=style, buckets="none")
    return simulate(program, "h100", framework=framework, **how)  # type: ignore[arg-type]


def test_sums_are_added_up_by_matmuls(program: Program) -> None:
    """A gradient of a weight is one kernel with its cast and its sum, and is not in memory beside it."""
    plain, adding = simulated(program, PLAIN), simulated(program, MatmulStyle(adds=True))
    assert adding.seconds < plain.seconds
    assert adding.peak_bytes <= plain.peak_bytes
    assert adding.flops == plain.flops
    fused = [s for s in adding.spans if s.flops and "add" in s.op and s.phase == "backward"]
    of_block = 7 + 3  # weights, and what q, k, v and gate, up send back
    assert len({s.name for s in fused if "layers.0" in s.module}) == of_block
    assert not [s for s in plain.spans if s.flops and "add" in s.op]


def test_sums_in_16_bits_take_half_and_are_reduced_so(program: Program) -> None:
    def reduced(found: Simulation) -> float:
        return sum(s.bytes for s in found.spans if s.op == "reduce_scatter" and s.phase == "reduce" and s.group == "dp")

    wide, narrow = simulated(program, PLAIN), simulated(program, MatmulStyle(sum_dtype=torch.bfloat16))
    assert reduced(narrow) == reduced(wide) / 2 > 0
    assert narrow.peak_bytes < wide.peak_bytes


def test_chunks_run_beside_matmuls(program: Program) -> None:
    """Bytes are the same, in two parts each: one before or behind the matmul, the other beside it."""

    def moved(found: Simulation) -> dict[str, float]:
        spans = [s for s in found.spans if s.kind == "collective" and s.group == "tp"]
        return {name: sum(s.bytes for s in spans if s.name == name) for name in {s.name for s in spans}}

    whole, chunks = simulated(program, PLAIN), simulated(program, MatmulStyle(in_chunks=True))
    assert moved(whole) == pytest.approx(moved(chunks))
    assert len(chunks.spans) > len(whole.spans)
    assert chunks.exposed_seconds < whole.exposed_seconds
    assert chunks.seconds < whole.seconds


def test_parameters_and_their_gradients_are_no_operands_in_chunks() -> None:
    model, batch, loss = hugging_face("llama", batch=8, heads=4, seq=64)
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters()), model)
    target = Target(mw.Mesh("fsdp=4"), mw.Plan.fsdp("fsdp"), load_profile("h100"))
    program = build_program(StepSource(model, loss), batch, optimizer, target, CaptureOptions(), pass_list_of("none"))
    whole, chunks = simulated(program, PLAIN), simulated(program, MatmulStyle(in_chunks=True))
    assert whole.spans == chunks.spans


def test_parameters_are_kept_in_8_bits_with_a_transpose_where_matmuls_need_it(program: Program) -> None:
    hopper = load_profile("h100")
    other = replace(hopper, matmul=replace(hopper.matmul, float8_copies=1))
    framework = replace(FRAMEWORKS["megatron"], matmuls=MatmulStyle(keeps=True), buckets="none")
    transposed, single = (
        simulate(program, machine, framework=framework, matmul_dtype="float8_e4m3fn") for machine in (hopper, other)
    )
    assert single.peak_bytes < transposed.peak_bytes
    assert single.seconds == transposed.seconds


def test_megatron_saves_what_its_kernels_read() -> None:
    named = {each.name: each for each in pass_list_of(FRAMEWORKS["nemo"].passes_with("default")).passes}
    assert named["recompute"] == Recompute("pointwise", is_optional=True)
    assert FRAMEWORKS["nemo"].passes_with("recompute=full") == "prefetch=1,recompute=full"
