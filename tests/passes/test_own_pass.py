"""One pass of a user's in compile, in the backend of torch.compile and on the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.models import mlp
from tests.passes.own_passes import Counted, Doubled, Impatient, Negated, Unreduced, neg
from torch import Tensor, fx
from typer.testing import CliRunner

import meshweave as mw
from meshweave.cli import app
from meshweave.errors import MeshweaveError, VerifyError
from meshweave.ir.collectives import WAIT, functional
from meshweave.passes import Decompose, Pass, parse_passes
from meshweave.torch_compile import backend

OWN = str(Path(__file__).with_name("own_passes.py"))


def losses(**options: Any) -> tuple[list[float], mw.TrainStep]:
    model, batch, loss = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    step = mw.compile(model, loss=loss, example=batch, optimizer=optimizer, mesh="dp=2", **options)
    return [float(step(batch)) for _ in range(2)], step


def test_in_compile() -> None:
    plain, before = losses()
    negated, step = losses(passes=[Negated()])
    assert negated == plain
    (report,) = step.program.optimized.reports["negated"]
    assert report.num_sums > 0  # type: ignore[attr-defined]
    own = before.program.roles[0].graph.find_nodes(op="call_function", target=neg)
    nodes = step.program.roles[0].graph.find_nodes(op="call_function", target=neg)
    assert len(nodes) - len(own) == 2 * report.num_sums  # type: ignore[attr-defined]
    assert all("spec" in n.meta for n in nodes)


def test_compile_proves_what_passes_of_every_stage_leave() -> None:
    with pytest.raises(VerifyError, match=r"partial|contribution|state"):
        losses(passes=[Unreduced()])


@pytest.fixture
def group() -> Iterator[str]:
    dist.init_process_group("fake", rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    torch._dynamo.reset()
    dist.destroy_process_group()


def compiled(group: str, *passes: Pass[Any], **options: Any) -> tuple[Tensor, list[list[Any]], list[Any]]:
    """A result, the ops of the graph that is compiled, and the reports."""
    graphs: list[list[Any]] = []
    reports: list[Any] = []

    def model(x: Tensor, w: Tensor) -> Tensor:
        for _ in range(3):
            x = WAIT(functional.all_reduce.default(x @ w, "sum", group))
        return x

    def inner(gm: fx.GraphModule, inputs: Any) -> Any:
        graphs.append([n.target for n in gm.graph.nodes])
        return gm.forward

    own = backend(passes=passes, inner=inner, cost=lambda node: 1e-3, report=reports.append, **options)
    x, w = torch.arange(12.0).view(3, 4), torch.eye(4) * 2
    with torch.no_grad():
        return torch.compile(model, backend=own, fullgraph=True)(x, w), graphs, reports


def test_in_the_backend_beside_passes_of_ours(group: str) -> None:
    result, graphs, reports = compiled(group, mw.passes.Overlap(), Negated())
    torch.testing.assert_close(result, 8 * torch.arange(12.0).view(3, 4), rtol=0, atol=0)
    assert graphs[0].count(neg) == 6
    assert Counted(3) in reports
    assert [type(report).__name__ for report in reports] == ["Counted", "OverlapReport"], "in the order of stages"


@pytest.mark.parametrize(
    ("wrong", "message"), [(Impatient(), "wait"), (Doubled(), "the inputs or outputs of a graph")], ids=lambda x: str(x)
)
def test_the_backend_verifies_after_each(group: str, wrong: Pass[Any], message: str) -> None:
    with pytest.raises(Exception, match=message) as caught:
        compiled(group, wrong)
    cause: BaseException | None = caught.value
    while cause is not None and not isinstance(cause, VerifyError):
        cause = cause.__cause__ or getattr(cause, "inner_exception", None)
    assert cause is not None


def test_a_pass_of_a_users_is_not_taken_from_a_cache() -> None:
    cost = mw.load_profile("h100")
    assert backend(cost=cost, passes=[Decompose()]).settings.key() is not None
    assert backend(cost=cost, passes=[Decompose(), Negated()]).settings.key() is None


def test_on_the_command_line() -> None:
    model = "examples/mlp.py:factory"
    arguments = ["simulate", model, "--mesh", "dp=2", "--profile", "h100", "-v", "--passes", f"overlap,{OWN}:Negated"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "sums of negated parts" in result.output
    result = CliRunner().invoke(app, [*arguments[:-1], f"{OWN}:Impatient"])
    assert result.exit_code != 0
    assert "wait" in result.output


def test_text_names_a_pass_by_file_or_module() -> None:
    assert type(parse_passes(f"overlap,{OWN}:Negated")[1]).__name__ == "Negated"
    assert parse_passes("tests.passes.own_passes:Negated") == (Negated(),)
    with pytest.raises(MeshweaveError, match="there is no such module"):
        parse_passes("no_such_module:Negated")
    with pytest.raises(MeshweaveError, match="no such file"):
        parse_passes("no_such_file.py:Negated")
    with pytest.raises(MeshweaveError, match="has no pass 'Counted'"):
        parse_passes("tests.passes.own_passes:Counted")
