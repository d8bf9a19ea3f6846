"""Other frameworks' steps: whose kernels, buckets, messages and sums are simulated."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.optimizers import read_optimizer
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.cost.hardware import load_profile
from meshweave.cost.simulate.frameworks import FRAMEWORKS, framework_named
from meshweave.errors import MeshweaveError
from meshweave.passes import pass_list_of
from meshweave.program import Program
from meshweave.whatif import simulate

OTHERS = [name for name in FRAMEWORKS if name != "meshweave"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(2048, 2048, bias=False)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


@pytest.fixture(scope="module")
def program() -> Program:
    with torch.device("meta"):
        model, data = Model(), {"x": torch.empty(2**15, 2048, dtype=torch.bfloat16)}
    source = StepSource(model, lambda out, batch: out.square().mean())
    optimizer = read_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model)
    target = Target(mw.Mesh("fsdp=8"), None, load_profile("h100"))
    options = CaptureOptions(precision=mw.Precision(param_dtype=torch.bfloat16))
    return build_program(source, data, optimizer, target, options, pass_list_of("prefetch=1"))


def test_a_framework_is_its_settings(program: Program) -> None:
    its = FRAMEWORKS["torchtitan"]
    asked = simulate(program, "h100", framework="torchtitan")
    machine = load_profile("h100").with_attention("flash2").with_update("fused")
    by_hand = simulate(program, machine, fusion=its.fusion, buckets="blocks")
    assert asked.seconds == by_hand.seconds
    assert asked.spans == by_hand.spans
    assert "as torchtitan" in asked.notes[-1]
    assert simulate(program, "h100").notes == simulate(program, "h100", framework="meshweave").notes


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("profile", ["h100", "gb200"])
def test_each_is_simulated_on_each_machine_and_names_its_sources(program: Program, name: str, profile: str) -> None:
    its = FRAMEWORKS[name]
    found = simulate(program, profile, framework=name)
    assert found.seconds > 0
    assert its.source
    assert its.source in found.notes[-1]


def test_what_is_stated_goes_first(program: Program) -> None:
    single = simulate(program, "h100", framework="fsdp1", buckets="none")
    assert len(single.spans) > len(simulate(program, "h100", framework="fsdp1").spans)
    own = load_profile("h100").with_update("fused")
    assert own.update == "fused"
    assert simulate(program, own, framework="fsdp1").profile == own.name
    assert FRAMEWORKS["fsdp1"].machine(own).update == "foreach"


def test_gathers_move_in_the_dtype_of_the_framework(program: Program) -> None:
    def gathered(name: str) -> float:
        found = simulate(
            program, "h100", framework=replace(FRAMEWORKS[name], buckets="none"), matmul_dtype="float8_e4m3fn"
        )
        return sum(span.bytes for span in found.spans if span.op == "all_gather")

    assert gathered("torchtitan") == gathered("meshweave") == gathered("megatron")
    assert gathered("deepspeed") == 2 * gathered("torchtitan")


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ("default", "prefetch=1"),
        ("none", "prefetch=1"),
        ("recompute=full", "prefetch=1,recompute=full"),
        ("default, recompute=full", "prefetch=1,recompute=full"),
        ("prefetch=1", "prefetch=1"),
        ("overlap,prefetch=2", "overlap,prefetch=2"),
    ],
)
def test_passes(asked: str, expected: str) -> None:
    assert FRAMEWORKS["torchtitan"].passes_with(asked) == expected
    assert FRAMEWORKS["meshweave"].passes_with(asked) == asked
    pass_list_of(expected)


def test_unknown_names_are_refused(program: Program) -> None:
    with pytest.raises(MeshweaveError, match=r"unknown framework(.|\n)*torchtitan"):
        simulate(program, "h100", framework="torchtitam")
    assert framework_named("nemo").buckets == FRAMEWORKS["megatron"].buckets
