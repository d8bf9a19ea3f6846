"""What the README and the pages of docs/ show runs as it stands there; their links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from typer.testing import CliRunner

import meshweave as mw
from meshweave.cli import app

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks_of(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.S)


def test_the_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    block, _ = blocks_of("README.md")
    model, batch, _ = hugging_face("llama", batch=4, heads=4)
    monkeypatch.chdir(tmp_path)
    scope: dict[str, Any] = {"model": model, "batch": batch, "loader": [batch, batch]}
    exec(block, scope)
    assert scope["loss"] < 5.6
    assert scope["step"].num_steps == 2
    assert (tmp_path / "ckpt" / ".metadata").exists()
    assert "all_gather" in capsys.readouterr().out


def test_the_block_on_moves_runs() -> None:
    (block,) = blocks_of("docs/moves.md")
    mesh = mw.Mesh("a=4,b=8")
    ends = {name: mw.Layout.parse(text, mesh) for name, text in (("source", "[{}, {b}]"), ("target", "[{b,a}, {}]"))}
    scope: dict[str, Any] = {"mw": mw, "torch": torch, **ends}
    exec(block, scope)
    assert 0 < scope["plan"].lower_bound_seconds <= scope["plan"].seconds


def test_the_block_on_machines_runs(capsys: Any) -> None:
    block, _ = blocks_of("docs/simulate.md")
    model, batch, loss = hugging_face("llama", batch=4, heads=4)
    step = mw.compile(model, loss=loss, example=batch, mesh="fsdp=4")
    scope: dict[str, Any] = {"mw": mw, "step": step}
    exec(block, scope)
    assert 0 < scope["result"].exposed_seconds < scope["result"].seconds
    assert "Reason(kind=" in capsys.readouterr().out


def test_the_block_on_many_questions_runs(capsys: Any) -> None:
    _, block = blocks_of("docs/simulate.md")
    model, batch, loss = hugging_face("llama", batch=128, heads=4)
    exec(block, {"mw": mw, "torch": torch, "model": model, "batch": batch, "loss": loss})
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["fsdp=64", "fsdp=32,tp=2", "fsdp=128"]


def test_the_block_on_overlap_runs(capsys: Any) -> None:
    """The graph is what make_fx traces of a gather and a matmul; torch.compile makes no call here."""
    _, block = blocks_of("README.md")
    c10d = torch.ops._c10d_functional

    def gathered(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(weight, 8, "fsdp"))
        return torch.mm(torch.relu(x), whole)

    with FakeTensorMode():
        graph_module = make_fx(gathered)(torch.empty(64, 64), torch.empty(8, 64))
    block = block.replace('cost=mw.load_profile("h100")', 'cost=mw.load_profile("h100"), groups={"fsdp": range(8)}')
    scope: dict[str, Any] = {"mw": mw, "torch": torch, "model": torch.nn.Linear(2, 2), "graph_module": graph_module}
    exec(block, scope)
    assert scope["report"].seconds <= scope["report"].seconds_before
    assert "no order is below" in capsys.readouterr().out


# The check is run by tests/test_cli.py.
@pytest.mark.parametrize(
    "line",
    re.findall(
        r"^meshweave ((?:plan|run|move|simulate|explain) .*?)\s*(?:#.*)?$", (ROOT / "docs" / "cli.md").read_text(), re.M
    ),
)
def test_command_lines_run(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = [str(ROOT / w) if w.startswith("examples/") else w.replace("20", "2") for w in shlex.split(line)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output


def test_the_page_on_plans_names_every_plan_and_operator() -> None:
    page = (ROOT / "docs" / "plans.md").read_text()
    constructors = {name for name, member in vars(mw.Plan).items() if isinstance(member, staticmethod)}
    assert set(re.findall(r"`Plan\.(\w+)\(", page)) == constructors
    assert all(callable(getattr(mw, name)) for name in re.findall(r"`mw\.(\w+)\(", page))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_site_has_every_page_and_every_public_name() -> None:
    nav = set(re.findall(r"(\w+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M))
    assert nav == {page.name for page in PAGES} - {"README.md"} | {"index.md"}
    named = re.findall(r"^::: (\w+)$", (ROOT / "docs" / "api.md").read_text(), re.M)
    assert sorted(named) == sorted(mw.__all__)
