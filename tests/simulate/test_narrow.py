"""Matmuls in float8: which they are, what is cast, what is gathered narrow."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.experts import mixture, own_loss, tokens
from tests.models import hugging_face

import meshweave as mw
from meshweave.cost.simulate.kernels import is_in_block, kernels_of
from meshweave.cost.simulate.matmuls import MatmulStyle, Narrow
from meshweave.errors import MeshweaveError
from meshweave.ir.values import local_values
from meshweave.ir.work import Matmul, MemoryWork
from meshweave.program import Program
from meshweave.whatif import simulate

FLOAT8 = torch.float8_e4m3fn


@pytest.fixture(scope="module")
def program() -> Program:
    model, batch, loss = hugging_face("llama", batch=4, heads=4, seq=32)
    step = mw.compile(
        copy.deepcopy(model),
        loss=loss,
        example=batch,
        mesh="fsdp=2,tp=2",
        precision=mw.Precision(param_dtype=torch.bfloat16),
    )
    return step.program


def test_matmuls_of_blocks_are_narrow_and_every_operand_is_cast_once_a_phase(program: Program) -> None:
    role = program.rank
    kernels, local = kernels_of(role, local_values(role), "compiled")
    narrow = Narrow(MatmulStyle(dtype=FLOAT8), role, local, "compiled")
    plain, cast = 0, 0
    for kernel in kernels:
        inside = is_in_block(kernel.node.meta["origin"])
        works = list(narrow.works(kernel, 0))
        matmul = [w for w in works if isinstance(w, Matmul)]
        if matmul and inside:
            assert [w.dtype for w in matmul] == [FLOAT8]
            cast += sum(isinstance(w, MemoryWork) for w in works)
            plain += 1
        elif matmul:
            assert [w.dtype for w in matmul] == [torch.bfloat16]
    assert plain == 2 * 7 * 3  # layers, projections, forward and two in backward
    assert plain < cast < 2 * plain  # q, k and v share their operand, both gradients of a layer share another


def test_weights_are_gathered_narrow_and_gradients_are_not(program: Program) -> None:
    wide, narrow = simulate(program, "h100"), simulate(program, "h100", matmul_dtype=FLOAT8)
    for a, b in zip(wide.spans, narrow.spans, strict=False):
        assert a.kind == b.kind or {a.kind, b.kind} == {"compute", "collective"}
    before = {s.name: s.bytes for s in wide.spans if s.kind == "collective"}
    after = {s.name: s.bytes for s in narrow.spans if s.kind == "collective"}
    halved = {name for name in before if after[name] == before[name] / 2}
    layers = [s for s in wide.spans if s.op == "all_gather" and s.module.endswith("proj")]
    assert layers
    assert {s.name for s in layers} <= halved
    assert not halved & {s.name for s in wide.spans if s.op in ("reduce_scatter", "all_reduce")}


def test_rows_by_expert_are_narrow_and_a_name_is_a_dtype() -> None:
    model, batch = mixture("mixtral"), tokens(batch=4)
    program = mw.compile(
        model, loss=own_loss, example=batch, mesh="ep=2", precision=mw.Precision(param_dtype=torch.bfloat16)
    ).program
    role = program.rank
    kernels, local = kernels_of(role, local_values(role), "compiled")
    narrow = Narrow(MatmulStyle(dtype=FLOAT8), role, local, "compiled")
    pieces = [list(narrow.works(k, 0)) for k in kernels if "piece" in k.nodes[0].name]
    assert len(pieces) == 2 * 2 * 3
    assert all(works[-1].dtype == FLOAT8 for works in pieces)
    casts = [w for works in pieces for w in works[:-1]]
    assert casts
    assert all(w.dtype == torch.bfloat16 for w in casts)  # not the ends of rows
    named = simulate(program, "h100", matmul_dtype="float8_e4m3fn")
    assert named.seconds == simulate(program, "h100", matmul_dtype=FLOAT8).seconds
    with pytest.raises(MeshweaveError, match="not a floating-point dtype"):
        simulate(program, "h100", matmul_dtype="float7")


def test_a_machine_without_the_dtype_says_so(program: Program) -> None:
    with pytest.raises(MeshweaveError, match="float8"):
        simulate(program, "a100", matmul_dtype=FLOAT8)
