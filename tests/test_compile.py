"""The whole way: an ordinary model becomes a training step on a mesh, equal to one device and to eager PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.models import hugging_face, make, mlp
from tests.training import assert_equals_eager

import meshweave as mw
from meshweave.check.numerics import CHECK_LR, check_numerics
from meshweave.check.runs import Recipe, Training, in_float64

MODELS = ("llama", "gpt2", "bert", "vit", "qwen2", "mlp", "cnn")
MESHES = ("dp=4", "tp=4", "dp=2,tp=2", "fsdp=2,tp=2", "dp=2,fsdp=2,tp=2")
# The whole table is behind the marker. The models that are not in this sample train beside eager PyTorch alone.
SAMPLE = {("llama", "dp=2,fsdp=2,tp=2"), ("mlp", "dp=2,tp=2"), ("cnn", "fsdp=2,tp=2")}
ALL = [
    pytest.param(model, mesh, marks=() if (model, mesh) in SAMPLE else pytest.mark.slow)
    for model in MODELS
    for mesh in MESHES
]


def compiler(example: Any, loss: Any) -> Any:
    def build(model: torch.nn.Module, optimizer: torch.optim.Optimizer, mesh: mw.Mesh, plan: Any) -> mw.TrainStep:
        is_wide = any(p.dtype == torch.float64 for p in model.parameters())
        like = in_float64(example) if is_wide else example
        options: dict[str, Any] = {
            "plan": plan,
            "run": mw.RunOptions(keep_gradients=True, backend="eager"),
        }  # compiled: tests/regions
        return mw.compile(model, loss=loss, example=like, optimizer=optimizer, mesh=mesh, **options)

    return build


@pytest.mark.slow_rows("cnn-fsdp=2,tp=2", "mlp-dp=2,tp=2")
@pytest.mark.parametrize(("name", "mesh"), ALL)
def test_mesh_equals_one_device_equals_eager(name: str, mesh: str) -> None:
    _, batch, loss = make(name)

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = make(name)[0]
        return model, torch.optim.AdamW(model.parameters(), lr=CHECK_LR)

    report = check_numerics(
        Training(fresh, lambda i: batch, Recipe(loss=loss)), mw.Mesh(mesh), None, compiler(batch, loss)
    )
    assert report.failed == ()
    assert len(report.errors) > 20
    assert {e.kind for e in report.errors} >= {"loss", "gradient 1", "gradient 3", "parameter", "state"}


@pytest.mark.slow_rows("qwen2-tp=4", "bert-tp=4")
@pytest.mark.parametrize(
    ("name", "mesh"), [("gpt2", "fsdp=2,tp=2"), ("bert", "tp=4"), ("vit", "dp=4"), ("qwen2", "tp=4")]
)
def test_one_layer_of_other_models_equals_eager(name: str, mesh: str) -> None:
    model, batch, loss = hugging_face(name, layers=1)
    assert_equals_eager(model.eval(), [batch, batch], mesh, loss=loss)


@pytest.mark.slow_rows("adam")
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_other_optimizers(optimizer: str) -> None:
    _, batch, loss = mlp()
    makers = {
        "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
        "adam": lambda p: torch.optim.Adam(p, lr=CHECK_LR, weight_decay=0.1),
    }

    def fresh() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = mlp()[0]
        return model, makers[optimizer](model.parameters())

    report = check_numerics(
        Training(fresh, lambda i: batch, Recipe(loss=loss)), mw.Mesh("fsdp=2,tp=2"), None, compiler(batch, loss)
    )
    assert report.failed == ()


def train(mesh: str, steps: int = 3, **options: Any) -> tuple[mw.TrainStep, list[float]]:
    model, batch, loss = hugging_face("llama", batch=4, heads=4, layers=1, device=options.pop("device", "cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = mw.compile(model, loss=loss, example=batch, optimizer=optimizer, mesh=mesh, **options)
    return step, [float(step(batch)) for _ in range(steps)]


def test_checkpoint_moves_to_another_mesh(tmp_path: Path) -> None:
    first, _ = train("dp=4")
    first.save(str(tmp_path / "ckpt"))
    _, batch, _ = hugging_face("llama", batch=4, heads=4)
    expected = [first(batch).item() for _ in range(3)]
    second, _ = train("dp=2,tp=2", steps=0, device="meta", seed=0)
    second.load(str(tmp_path / "ckpt"))
    assert second.num_steps == 3
    for name, value in second.optimizer_state().items():
        assert value.abs().max() > 0, name
    assert [second(batch).item() for _ in range(3)] == pytest.approx(expected, rel=1e-5)


def test_checkpoint_of_another_model_is_refused(tmp_path: Path) -> None:
    step, _ = train("dp=2", steps=1)
    step.save(str(tmp_path / "ckpt"))
    model, batch, loss = mlp()
    other = mw.compile(
        model, loss=loss, example=batch, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), mesh="dp=2"
    )
    before = other.parameters()
    with pytest.raises(mw.CheckpointError):
        other.load(str(tmp_path / "ckpt"))
    assert all(torch.equal(value, before[name]) for name, value in other.parameters().items())


def test_meta_parameters_are_the_same_on_any_mesh() -> None:
    found = [train(mesh, steps=0, device="meta")[0].parameters() for mesh in ("", "tp=4", "dp=2,fsdp=2")]
    for other in found[1:]:
        assert found[0].keys() == other.keys()
        assert all(torch.equal(value, other[name]) for name, value in found[0].items())


def test_compiled_size_does_not_depend_on_the_number_of_ranks() -> None:
    def nodes(mesh: str) -> int:
        from meshweave.build import Target, build_program
        from meshweave.capture.step import CaptureOptions, StepSource

        model, _, loss = hugging_face("llama", heads=4, layers=1, device="meta")
        ids = torch.empty(4096, 16, dtype=torch.long, device="meta")
        batch = {"input_ids": ids, "labels": ids}
        program = build_program(
            StepSource(model, loss), batch, None, Target(mw.Mesh(mesh), None, mw.AlphaBeta()), CaptureOptions()
        )
        return len(program.rank.graph.nodes)

    assert nodes("fsdp=4,tp=4") == nodes("fsdp=16,tp=4")
    assert nodes("fsdp=1024,tp=4") == nodes("fsdp=4096,tp=4")  # more devices than rows: most pieces are empty


def test_explain_names_the_models_lines() -> None:
    step, _ = train("fsdp=2,tp=2", steps=0)
    rows = step.explain()
    reduces = [r for r in rows if r.kind == "all_reduce" and r.module.startswith("model.layers.0")]
    assert len(reduces) == 4  # two forward, two backward: what Megatron does by hand
    assert all("modeling_llama.py:" in r.line for r in reduces)
    gathers = [r for r in rows if r.name == "model_layers_0_mlp_up_proj_weight"]
    assert [r.phase for r in gathers] == ["forward", "backward"]


BAD_INPUT = {
    "an unknown profile": ({"profile": "h10"}, mw.MeshweaveError, "h100"),
    "an unknown axis in the plan": ({"plan": mw.Plan.dp("data")}, mw.MeshError, "data"),
    "a plan that matches nothing": ({"plan": mw.Plan.tp("tp", {"*.q_projj": "colwise"})}, mw.PlanError, "q_proj"),
    "accumulation that does not divide": ({"accumulate": 3}, mw.PlanError, "divide"),
}


@pytest.mark.parametrize("case", BAD_INPUT)
def test_bad_input(case: str) -> None:
    options, kind, word = BAD_INPUT[case]
    with pytest.raises(kind) as error:
        train("dp=2,tp=2", steps=0, **options)  # type: ignore[arg-type]
    assert word in str(error.value)
