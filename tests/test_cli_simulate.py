"""`meshweave simulate` and `explain`: one machine or several meshes, files, comparisons, bad input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from meshweave.cli import app
from meshweave.cli.plan import ExplainOptions
from meshweave.cli.screen import Screen

MODEL = (
    "hf:llama?num_hidden_layers=1&hidden_size=64&intermediate_size=128&num_attention_heads=4&num_key_value_heads=4"
    "&vocab_size=512"
)

NET = """
import torch
from torch import nn

def net(batch: int = 16):
    model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))
    return model, lambda i: (torch.full((batch, 64), i + 1.0) + torch.arange(64),), lambda out, _: (out * out).mean()
"""


@pytest.fixture(scope="module")
def net(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("models") / "net.py"
    path.write_text(NET)
    return f"{path}:net"


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, [*arguments])


def last_line(result: Any) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_one_mesh_with_page_and_trace(tmp_path: Path) -> None:
    page, trace = tmp_path / "step.html", tmp_path / "step.json"
    files = ("--report", str(page), "--trace", str(trace))
    found = last_line(run("simulate", MODEL, "--mesh", "fsdp=8", "--profile", "h100", *files, "--json"))
    assert found["mesh"] == "fsdp=8"
    assert 0 < found["exposed_seconds"] < found["seconds"]
    assert found["tokens_per_s_per_gpu"] == pytest.approx(2048 / found["seconds"])  # a sequence of its context a device
    assert 0 < found["mfu"] < 1
    assert 0 < found["peak_bytes"] <= found["reserved_bytes"]
    assert found["fits"]
    assert "<html" in page.read_text()
    events = json.loads(trace.read_text())["traceEvents"]
    assert any(e.get("ph") == "X" for e in events)


def test_buckets_and_the_attention_kernel_are_stated() -> None:
    found = last_line(run("simulate", MODEL, "--mesh", "fsdp=64", "--passes", "prefetch=1", "--json"))
    stated = ("--buckets", "blocks", "--scale", "attention=cudnn")
    joined = last_line(run("simulate", MODEL, "--mesh", "fsdp=64", "--passes", "prefetch=1", *stated, "--json"))
    assert joined["seconds"] < found["seconds"]
    refused = run("simulate", MODEL, "--mesh", "fsdp=64", "--buckets", "many")
    assert refused.exit_code != 0
    assert "--buckets" in refused.output


def test_the_table_says_what_is_exposed_and_why() -> None:
    result = run("simulate", MODEL, "--mesh", "fsdp=8", "--passes", "none")
    assert result.exit_code == 0, result.output
    assert "modelled: h100" in result.output
    assert "late: its input is ready" in result.output


def test_several_meshes_are_compared_and_the_best_is_marked(net: str) -> None:
    meshes = ("--mesh", "fsdp=8", "--mesh", "fsdp=4,tp=2", "--mesh", "tp=8", "--passes", "none")
    found = last_line(run("simulate", net, *meshes, "--json"))
    rates = [one["tokens_per_s_per_gpu"] for one in found["simulations"]]
    assert [one["mesh"] for one in found["simulations"]] == ["fsdp=8", "fsdp=4,tp=2", "tp=8"]
    assert found["best"] == rates.index(max(rates))
    assert "best" in run("simulate", net, *meshes).output


def test_a_difference_names_what_moved(net: str) -> None:
    found = last_line(
        run("simulate", net, "--mesh", "fsdp=4", "--mesh", "tp=4", "--passes", "none", "--diff", "--json")
    )
    assert {row["op"] for row in found["diff"]} >= {"all_gather", "all_reduce"}
    assert run("simulate", net, "--mesh", "fsdp=4", "--diff").exit_code == 2


@pytest.mark.slow
def test_what_if(tmp_path: Path) -> None:
    def seconds(*options: str) -> float:
        model = MODEL.replace("layers=1", "layers=2")  # two alike, to be recomputed
        return float(last_line(run("simulate", model, "--mesh", "fsdp=16", *options, "--json"))["seconds"])

    base, plain = seconds(), seconds("--passes", "none")
    assert base < plain
    assert seconds("--scale", "bandwidth=2,latency=0.5") < base
    assert seconds("--passes", "prefetch=1") < plain
    assert seconds("--passes", "recompute=full") > plain
    assert seconds("--fusion", "ops") > base
    assert seconds("--profile", "gb200") != base


def test_a_model_that_does_not_fit_is_simulated_all_the_same(net: str) -> None:
    result = run("simulate", net, "--mesh", "fsdp=2", "--scale", "memory_bytes=2.0001e9", "--json")
    found = last_line(result)
    assert not found["fits"]
    assert "does not fit" in found["verdict"]
    assert found["mfu"] is None
    assert found["seconds"] > 0


def test_explain_why() -> None:
    found = last_line(
        run("explain", MODEL, "--mesh", "fsdp=4", "--passes", "none", "--why", "layers.0.mlp.up_proj", "--json")
    )
    rows = found["communications"]
    assert {row["op"] for row in rows} == {"all_gather", "reduce_scatter"}
    for row in rows:
        assert row["layout"]
        assert sum(r["seconds"] for r in row["reasons"]) == pytest.approx(row["exposed_seconds"])
    shown = run("explain", MODEL, "--mesh", "fsdp=4").output
    assert "communications," in shown
    assert "modelled by h100" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--mesh", "fsdp=8", "--profile", "h10"), "h100"),
        (("--mesh", "fsdp=8", "--scale", "speed=2"), "changes nothing of a machine"),
        (("--mesh", "fsdp=8", "--scale", "num_devices=4"), "cannot hold"),
        (("--mesh", "fsdp=8", "--scale", "devices_per_node=3.5"), "whole numbers"),
        (("--mesh", "fsdp=8", "--buckets", "Blocks"), "none, blocks, or"),
        (("--mesh", "fsdp=8", "--plan", "zero3:fsdp"), "ZeRO-3"),
        (("--mesh", "fsdp=8", "--plan", "fsdp:fsdp", "--plan", "dp:fsdp"), "plans and meshes differ"),
        (("--mesh", "fsdp=8", "--report", "/nowhere/x.html"), "cannot be written"),
    ],
)
def test_bad_input(net: str, arguments: tuple[str, ...], expected: str) -> None:
    result = run("simulate", net, *arguments)
    assert result.exit_code == 2, result.output
    assert expected in result.output


def test_explain_of_nothing(net: str) -> None:
    result = run("explain", net, "--mesh", "fsdp=4", "--why", "layers.9")
    assert result.exit_code == 2
    assert "no communication matches" in result.output


def test_a_profile_with_a_wrong_figure_names_its_field(net: str, tmp_path: Path) -> None:
    import meshweave.cost.hardware

    text = (Path(meshweave.cost.hardware.__file__).parent / "data" / "h100.toml").read_text()
    at = next(i for i, line in enumerate(text.splitlines()) if line.startswith("launch_s"))
    lines = text.splitlines()
    lines[at] = "launch_s = -1.0"
    file = tmp_path / "mine.toml"
    file.write_text("\n".join(lines))
    result = run("simulate", net, "--mesh", "fsdp=8", "--profile", str(file))
    assert result.exit_code == 2
    assert "mine.toml" in result.output
    assert "'launch_s' is out of range" in result.output


def test_a_run_measures_its_last_step_beside_the_model(net: str, tmp_path: Path) -> None:
    page = tmp_path / "run.html"
    plain = last_line(run("run", net, "--mesh", "fsdp=2", "--steps", "3", "--json"))
    found = last_line(run("run", net, "--mesh", "fsdp=2", "--steps", "3", "--report", str(page), "--json"))
    assert found["losses"] == plain["losses"]
    assert found["num_steps"] == 3
    assert "measured" in page.read_text()


def test_meshes_are_compared_on_one_batch_and_what_is_assumed_is_said() -> None:
    meshes = ("--mesh", "fsdp=8", "--mesh", "fsdp=2,tp=4")
    result = run("simulate", MODEL, *meshes, "--passes", "none")
    assert result.exit_code == 0, result.output
    assumed = "; global batch input_ids [8, 2048], labels [8, 2048]; bfloat16 compute, float32 parameters; adamw"
    assert result.output.count("assumed: ") == 1
    assert assumed in result.output.replace("\n", " ")
    stated = run("simulate", MODEL, *meshes, "--passes", "none", "--seq", "32", "--local-batch", "3")
    assert "input_ids [24, 32]" in stated.output.replace("\n", " ")


def test_the_table_comes_first_and_details_only_when_asked(net: str) -> None:
    meshes = ("--mesh", "fsdp=8", "--mesh", "fsdp=4,tp=2")
    short = run("simulate", net, *meshes)
    assert short.output.splitlines()[0].split()[:3] == ["mesh", "plan", "step"]
    assert "no order is below" not in short.output
    assert "capture" not in short.output
    long = run("simulate", net, *meshes, "--verbose").output
    assert "fsdp=8: capture ..." in long
    assert "no order is below" in long


def test_a_named_model_is_simulated_and_titles_its_page(tmp_path: Path) -> None:
    page = tmp_path / "step.html"
    model = "qwen3-0.6b?num_hidden_layers=1"
    result = run("simulate", model, "--mesh", "fsdp=8", "--seq", "64", "--passes", "none", "--report", str(page))
    assert result.exit_code == 0, result.output
    assert "171.3 M parameters (num_hidden_layers=1)" in result.output.replace("\n", " ")
    assert "<title>qwen3-0.6b on fsdp=8 - meshweave</title>" in page.read_text()


@pytest.mark.parametrize(
    ("words", "completed"),
    [
        ("simulate mixtral", "mixtral-8x7b mixtral-8x22b"),
        ("simulate gpt2 --profile h", "h100 h100-500w h200"),
        ("simulate gpt2 --mesh fsdp=8,t", "fsdp=8,tp="),
    ],
)
def test_shells_complete_names(words: str, completed: str) -> None:
    variables = {"_MESHWEAVE_COMPLETE": "complete_bash", "COMP_WORDS": f"meshweave {words}"}
    cword = str(len(words.split()))
    result = CliRunner().invoke(app, [], prog_name="meshweave", env={**variables, "COMP_CWORD": cword})
    assert result.output.split() == completed.split()


def test_too_few_layers_for_the_stages_say_how_to_get_more() -> None:
    arguments = ("--mesh", "pp=3", "--seq", "16", "--passes", "none")
    refused = run("simulate", "hf:llama", *arguments)
    assert refused.exit_code == 2
    (field,) = [word for word in refused.output.split() if word.startswith("?num_hidden_layers=")]
    assert run("simulate", f"hf:llama{field}", *arguments).exit_code == 0


@pytest.mark.parametrize(("plan", "in_shards"), [("", True), ("zero1:fsdp", False)])
def test_explain_adds_up_gradients_as_the_framework_does(plan: str, in_shards: bool) -> None:
    options = ExplainOptions(
        model="hf:llama?num_hidden_layers=1",
        mesh="fsdp=2",
        plan=plan,
        framework="torchtitan",
        passes="none",
        seq=16,
        accumulate=2,
    )
    program = options.compiled(Screen("explain", json=False), options.mesh, options.plan)
    assert ("in shards" in program.accumulation) == in_shards
