"""Lists of passes: text, and passes of one's own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

import pytest
import torch
from tests.models import mlp

import meshweave as mw
from meshweave.cli.simulate import SimulateCommandOptions
from meshweave.errors import MeshweaveError, PlanError, VerifyError
from meshweave.ir.collectives import COLLECTIVES, WAIT
from meshweave.ir.rank import copied
from meshweave.passes import (
    PASSES,
    Decompose,
    Keep,
    MeshProgram,
    Overlap,
    Pass,
    Prefetch,
    Recompute,
    Split,
    parse_passes,
    pass_list_of,
)
from meshweave.passes.base import STAGES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (None, ()),
        ("none", ()),
        ("exact", (Keep(), Overlap())),
        ("default", (Keep(), Split(), Decompose(), Overlap())),
        ("default,split=4", (Keep(), Split((4,)), Decompose(), Overlap())),
        ("overlap,split", (Split(), Overlap())),
        ("overlap, split=4 ,recompute=selective", (Recompute("selective"), Split((4,)), Overlap())),
        ("prefetch=2,decompose", (Prefetch(2), Decompose())),
        ([Overlap(bucket=False), Recompute()], (Overlap(bucket=False), Recompute())),
    ],
)
def test_text_and_lists(text: Any, expected: tuple[Pass[Any], ...]) -> None:
    assert parse_passes(text) == expected


def test_a_memory_cap_implies_overlap() -> None:
    assert pass_list_of(memory_cap_bytes=1 << 30).passes == pass_list_of("overlap").passes
    assert pass_list_of("overlap", memory_cap_bytes=1 << 30).passes == (Overlap(),)


def test_every_pass_says_what_it_is() -> None:
    assert [one.stage for one in PASSES.values()] == sorted((one.stage for one in PASSES.values()), key=STAGES.index)
    for name, kind in PASSES.items():
        assert name == kind.name
        assert kind.numerics == ("reassociates" if name in ("recompute", "ring", "split", "decompose") else "exact")
        assert fields(kind)  # type: ignore[arg-type]
        assert kind() == parse_passes(name)[0]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"passes": "faster"}, "unknown pass"),
        ({"passes": "overlap,overlap"}, "asked for twice"),
        ({"passes": "split=2,split=4"}, "asked for twice"),
        ({"passes": "default,default"}, "asked for twice"),
        ({"passes": [Split(), Split((4,))]}, "asked for twice"),
        ({"passes": "split=1"}, "two or more chunks"),
        ({"passes": "recompute=most"}, "not a recomputation policy"),
        ({"passes": "overlap=2"}, "takes no value"),
        ({"passes": [Overlap]}, "not a list of passes"),
        ({"passes": 3}, "not a list of passes"),
        ({"memory_cap_bytes": 0}, "not a size"),
    ],
)
def test_bad_input(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(MeshweaveError, match=message):
        pass_list_of(**asked)


def test_a_negative_number_of_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match="to prefetch is negative"):
        compiled(passes=[Prefetch(-1)])


def test_the_command_line_takes_the_same_text() -> None:
    asked = SimulateCommandOptions(model="x", mesh=["dp=2"], passes="default,split=4,recompute=full")
    expected = pass_list_of("default,split=4,recompute=full")
    assert asked.pass_list == expected


# passes of a user's own


@dataclass(frozen=True, slots=True)
class Double(Pass[MeshProgram]):
    """Doubles the first sum over devices, or with `times` 1 nothing."""

    name: ClassVar = "double"
    numerics: ClassVar = "exact"
    stage: ClassVar = "ordered"
    times: int = 2

    def run(self, program: MeshProgram, costs: Any) -> tuple[MeshProgram, tuple[Any, ...]]:
        roles = tuple(copied(role) for role in program.roles)
        node = next(n for n in roles[0].graph.nodes if n.target in COLLECTIVES)
        source = node.args[0]
        assert isinstance(source, torch.fx.Node)
        with roles[0].graph.inserting_before(node):
            made = roles[0].graph.call_function(torch.ops.aten.mul.Tensor, (source, self.times))
        made.meta = dict(source.meta)
        if self.times != 1:
            node.args = (made, *node.args[1:])
        else:
            roles[0].graph.erase_node(made)
        return replace(program, roles=roles), ()


def compiled(**options: Any) -> mw.TrainStep:
    model, batch, loss = mlp()
    return mw.compile(
        model, loss=loss, example=batch, optimizer=torch.optim.SGD(model.parameters()), mesh="dp=2", **options
    )


def test_a_pass_of_ones_own_runs_and_is_proven() -> None:
    step = compiled(passes=[Double(1), Recompute("none")])
    assert step.program.optimized.reports == {"double": ()}
    assert step.program.roles is not step.program.expanded
    with pytest.raises(VerifyError):
        compiled(passes=[Double(2)])


def test_a_program_that_a_pass_has_edited_in_place_is_verified() -> None:
    role = copied(compiled().program.roles[0])
    program = MeshProgram((role,))
    program.verify(program)
    wait = next(n for n in role.graph.nodes if n.target is WAIT)
    with role.graph.inserting_after(wait):
        role.graph.call_function(WAIT, wait.args).meta = dict(wait.meta)
    with pytest.raises(VerifyError, match="wait"):
        program.verify(program)


def test_progress_names_passes() -> None:
    stages: list[str] = []
    compiled(passes=[Double(1), Prefetch(1)], run=mw.RunOptions(progress=stages.append))
    assert stages == ["capture", "place", "expand", "double", "start"]
