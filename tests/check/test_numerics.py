"""check_numerics: it passes where a mesh trains as one device does, and names what differs where it does not."""

import json
from dataclasses import replace
from functools import cache

import pytest
import torch
from tests.training import compile_once
from torch import nn

import meshweave as mw
from meshweave.capture.batch import Batch
from meshweave.check.numerics import CHECK_LR, Bounds, NumericsReport, TensorError, check_numerics
from meshweave.check.runs import Recipe, Training, in_float64
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import functional
from meshweave.ir.mesh import Mesh
from meshweave.train_step import CompiledStep, TrainStep


class Net(nn.Module):
    """A key bias before a softmax has no gradient but rounding; dropout and a buffer are there too."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 10), nn.Linear(10, 6)
        self.key = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.2)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        h = self.norm(self.down(self.drop(torch.relu(self.up(x)))))
        scores = h @ self.key(h).T
        return torch.softmax(scores, -1) @ h


def loss(out, batch):
    return ((out - batch["y"]) ** 2).mean()


def make_model(seed: int = 0, kind=torch.optim.AdamW):
    torch.manual_seed(seed)
    model = Net()
    return model, kind(model.parameters(), lr=CHECK_LR)


def make_batch(index: int):
    generator = torch.Generator().manual_seed(index)
    return {"x": torch.randn(8, 6, generator=generator), "y": torch.randn(8, 6, generator=generator)}


def compiler(model, optimizer, mesh, plan) -> TrainStep:
    key = (__name__, mesh, type(optimizer), next(model.parameters()).dtype)
    return compile_once(key, model, **options_of(model, optimizer, mesh, plan))


def options_of(model, optimizer, mesh, plan):
    return {
        "loss": loss,
        "example": example_for(model),
        "optimizer": optimizer,
        "mesh": mesh,
        "plan": plan,
        "run": mw.RunOptions(keep_gradients=True),
    }


def example_for(model):
    is_wide = any(p.dtype == torch.float64 for p in model.parameters())
    return in_float64(make_batch(0)) if is_wide else make_batch(0)


def run(compile_step=compiler, mesh="dp=2", *, make=make_model, recipe=None, steps=3, **options) -> NumericsReport:
    training = Training(make, make_batch, recipe or Recipe(loss=loss), steps)
    return check_numerics(training, Mesh(mesh), None, compile_step, **options)


@cache
def sound() -> NumericsReport:
    """Of a mesh that trains as one device does."""
    return run(mesh="dp=2,tp=2")


def test_a_mesh_that_trains_as_one_device_passes():
    report = sound()
    assert report.ok
    assert report.failed == ()
    assert set(report.losses) == {"mesh", "one device", "eager"}
    assert len(report.losses["mesh"]) == 3
    kinds = {e.kind for e in report.errors if e.run == "mesh"}
    assert kinds == {"initial", "loss", "gradient 1", "gradient 3", "parameter", "buffer", "state"}
    state = [e.name for e in report.errors if e.kind == "state" and e.run == "mesh"]
    assert sorted(state) == sorted(
        f"{slot}/{n}" for slot in ("exp_avg", "exp_avg_sq") for n, _ in Net().named_parameters()
    )


def test_a_gradient_that_is_only_rounding_is_named_and_excused():
    report = sound()
    names = {e.name for e in report.within_rounding}
    assert "down.bias" in names  # batch normalisation takes it away again
    assert all(e.rounding is not None and e.error > e.bound for e in report.within_rounding)
    assert "up.weight" not in names


def test_rounding_is_no_excuse_for_a_wrong_value():
    def one_sign(model, optimizer, mesh, plan):
        step = compiler(model, optimizer, mesh, plan)
        if mesh.num_devices > 1:
            step.gradients = lambda read=step.gradients: {
                n: g + (1e-3 if n == "down.bias" else 0) for n, g in read().items()
            }
        return step

    failed = run(one_sign, steps=1).failed
    assert {e.name.rpartition("/")[2] for e in failed} == {"down.bias"}
    assert {"mesh", "mesh in float64"} == {e.run for e in failed}


def test_a_piece_that_one_rank_changes_is_found():
    def tampered(model, optimizer, mesh, plan):
        step = compiler(model, optimizer, mesh, plan)
        if mesh.num_devices > 1:
            pieces = step.session.state.pieces["param", "up.weight"]
            pieces[1] = pieces[1] * 1.01
        return step

    report = run(tampered, "dp=2", steps=1)
    assert not report.ok
    named = {(e.kind, e.name) for e in report.failed}
    assert [n for kind, n in named if kind == "initial"] == ["up.weight"]
    assert ("gradient 1", "up.weight") in named
    assert all(e.run.startswith("mesh") for e in report.failed)


def test_a_dropped_all_reduce_is_found():
    def dropped(model, optimizer, mesh, plan):
        if mesh.num_devices == 1:
            return compiler(model, optimizer, mesh, plan)
        step = mw.compile(model, **options_of(model, optimizer, mesh, plan))
        graph = step.program.rank.graph
        starts = [n for n in graph.nodes if n.target is functional.all_reduce.default]
        victim = next(n for n in reversed(starts) if n.meta["origin"].module.startswith("up"))
        (wait,) = victim.users
        wait.replace_all_uses_with(victim.args[0])
        graph.erase_node(wait)
        graph.erase_node(victim)
        fresh = TrainStep(CompiledStep(step.program, model, optimizer, step.session.world, step.session.settings))
        return fresh

    report = run(dropped, "dp=2", steps=1)
    assert not report.ok
    named = {e.name for e in report.failed}
    assert named & {"up.weight", "up.bias"}
    assert not report.errors[0].ok, "the worst comes first"


def test_nan_missing_and_misshapen_tensors_fail():
    def broken(model, optimizer, mesh, plan):
        step = compiler(model, optimizer, mesh, plan)
        if mesh.num_devices > 1:
            read = step.parameters

            def parameters():
                found = read()
                if step.num_steps:
                    found["up.bias"][0] = float("nan")
                    found["down.weight"] = found["down.weight"].T
                    del found["key.weight"]
                return found

            step.parameters = parameters
        return step

    problems = {e.name: e.problem for e in run(broken, steps=1).failed if (e.run, e.kind) == ("mesh", "parameter")}
    assert problems["up.bias"].startswith("nan instead of")
    assert problems["down.weight"] == "float32[10, 6] instead of float32[6, 10]"
    assert problems["key.weight"] == "missing in the run on mesh"
    assert len(problems) == 3


@pytest.mark.slow
def test_accumulation_and_clipping_are_compared_too():
    def step_of(model, optimizer, mesh, plan):
        return mw.compile(
            model, loss=loss, example=example_for(model), optimizer=optimizer, mesh=mesh,
            run=mw.RunOptions(keep_gradients=True),
            accumulate=2, clip_grad_norm=0.1,
        )  # fmt: skip

    def split(batch):
        return Batch.of(batch).micros(2)

    report = run(step_of, recipe=Recipe(loss=loss, split=split, clip_grad_norm=0.1), steps=2)
    assert report.ok
    unclipped = run(step_of, recipe=Recipe(loss=loss, split=split), steps=2)
    assert {e.run for e in unclipped.failed} == {"one device", "mesh in float64"}


def test_another_seed_of_dropout_is_another_loss():
    report = run(recipe=Recipe(loss=loss, seed=1), steps=1)
    assert not report.ok
    assert {e.kind for e in report.failed if e.run == "one device"} >= {"loss"}


def test_a_model_that_differs_at_every_call_is_refused():
    seeds = iter(range(9))
    with pytest.raises(MeshweaveError, match=r"differs between calls[\s\S]*down\.weight"):
        run(make=lambda: make_model(next(seeds)), steps=1)


def test_reports_as_dict_can_be_written_as_json():
    report = sound()
    held = json.loads(json.dumps(report.as_dict()))
    assert held["ok"] is True
    assert held["num_compared"] == len(report.errors)
    assert held["worst"][0]["name"] == report.errors[0].name


def test_an_empty_report_proves_nothing():
    assert not NumericsReport(mesh="dp=2", num_steps=1, bounds=Bounds(), losses={}, errors=()).ok


def test_errors_sort_by_failure_then_by_error():
    good = TensorError(run="mesh", reference="one device", kind="state", name="a", error=1e-6, bound=1e-5)
    bad, excused = replace(good, name="b", error=1.0), replace(good, name="c", error=2.0, rounding=1.0)
    missing = replace(good, name="d", problem="missing")
    ordered = sorted([good, excused, bad, missing], key=lambda e: e.badness, reverse=True)
    assert [e.name for e in ordered] == ["d", "b", "c", "a"]
