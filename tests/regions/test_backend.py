"""Compiled compute against compute op by op: the same steps, in each way to train."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests import models
from tests.models import Made, hugging_face
from tests.training import mse
from torch import Tensor, nn
from torch.nn import functional as F

import meshweave as mw
from meshweave.interop import inductor
from meshweave.runtime.regions.compiler import Runner, backend_for


def linear(batch: int) -> Made:
    """The least that has a region for each part of a step: every kernel that is compiled takes most of a second."""
    _, example, loss = models.mlp(batch=batch)
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 7)), example, loss


MODELS: dict[str, Callable[[], Made]] = {
    "llama": lambda: hugging_face("llama", batch=4, heads=4),
    "gpt2": lambda: hugging_face("gpt2", batch=4),
    "cnn": lambda: models.cnn(batch=4),
    "mlp": lambda: models.mlp(batch=4),
    "linear": lambda: linear(batch=4),
}


def trained(
    name: str, backend: str, mesh: str = "", steps: int = 3, **options: Any
) -> tuple[mw.TrainStep, list[float]]:
    model, batch, loss = MODELS[name]()
    optimizer = torch.optim.SGD(
        model.parameters(), lr=1e-2, momentum=0.9
    )  # Adam's first steps are signs: rounding shows
    step = mw.compile(
        model, loss=loss, example=batch, optimizer=optimizer, mesh=mesh, run=mw.RunOptions(backend=backend), **options
    )
    return step, [float(step(batch)) for _ in range(steps)]


def assert_alike(found: mw.TrainStep, expected: mw.TrainStep, tolerance: float = 2e-5) -> None:
    """Parameters, buffers and optimizer state, each within `tolerance` of its largest element."""
    for read in (mw.TrainStep.parameters, mw.TrainStep.buffers, mw.TrainStep.optimizer_state):
        ours, theirs = read(found), read(expected)
        assert set(ours) == set(theirs)
        for key, want in theirs.items():
            scale = max(float(want.abs().max()), 1e-3) if want.is_floating_point() and want.numel() else 1.0
            difference = (ours[key].double() - want.double()).abs().max() if want.numel() else 0.0
            assert float(difference) <= tolerance * scale, key


@pytest.fixture(autouse=True)
def no_bytes_of_bools(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor refuses what it refuses in torch 2.11: `view` of a bool as another dtype."""
    compile_inner = inductor.compile_fx_inner

    def compile_all_but_those(traced: Any, *rest: Any, **options: Any) -> Any:
        for node in traced.graph.find_nodes(op="call_function", target=torch.ops.aten.view.dtype):
            if torch.bool in (node.args[0].meta["val"].dtype, node.args[1]):
                raise TypeError("torch.bool is not supported by torch.iinfo")
        return compile_inner(traced, *rest, **options)

    monkeypatch.setattr(inductor, "compile_fx_inner", compile_all_but_those)


def num_regions(step: mw.TrainStep) -> int:
    return sum(
        task.fused is not None and isinstance(task.function, Runner)
        for part in step.session.ranks[0].tasks.values()
        for task in part
    )


CASES = [
    ("mlp", "", {}),
    ("linear", "dp=2", {"accumulate": 2}),
    *(
        pytest.param(name, mesh, options, marks=pytest.mark.slow)
        for name, mesh, options in (
            ("llama", "", {}),
            ("llama", "fsdp=2", {"accumulate": 2, "clip_grad_norm": 1.0}),
            ("llama", "tp=2", {}),
            ("llama", "fsdp=2,tp=2", {"precision": torch.bfloat16}),
            ("gpt2", "dp=2", {}),
            ("gpt2", "fsdp=2", {}),
            ("cnn", "", {}),
            ("cnn", "dp=2", {}),
        )
    ),
]


@pytest.mark.slow_rows("mlp--options0")
@pytest.mark.parametrize(("name", "mesh", "options"), CASES)
def test_compiled_regions_train_as_ops_do(name: str, mesh: str, options: dict[str, Any]) -> None:
    eager, expected = trained(name, "eager", mesh, **options)
    step, losses = trained(name, "inductor", mesh, **options)
    is_narrow = "precision" in options
    assert losses == pytest.approx(expected, rel=1e-2 if is_narrow else 1e-5)
    assert_alike(step, eager, 0.1 if is_narrow else 1e-4)
    assert num_regions(step)
    assert not num_regions(eager)
    assert not step.session.compiler.notes
    batch = MODELS[name]()[1]
    assert float(step.evaluate(batch)) == pytest.approx(float(eager.evaluate(batch)), rel=1e-2 if is_narrow else 1e-5)


class Viewed(nn.Module):
    """Parameters that are read through views alone."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.pair = nn.Parameter(torch.randn(64)), nn.Parameter(torch.rand(16))

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.pair.chunk(2)
        return F.gelu((x @ self.wide.reshape(8, 8)) * low + high).sigmoid() * high.unsqueeze(0)


@pytest.mark.slow_rows("kept")
@pytest.mark.parametrize("plan", [mw.Plan.zero1("dp"), mw.Plan.fsdp("dp") + mw.Plan.keep("*")], ids=["zero1", "kept"])
def test_microbatches_share_what_views_are_of(plan: mw.Plan) -> None:
    """A region repeats the views that it reads, so later microbatches need what these are views of."""
    trained = []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model, batch = Viewed(), {"x": torch.randn(12, 8), "y": torch.randn(12, 8)}
        optimizer, run = torch.optim.SGD(model.parameters(), lr=0.1), mw.RunOptions(backend=backend)
        step = mw.compile(
            model, loss=mse, example=batch, optimizer=optimizer, mesh="dp=2", plan=plan, accumulate=3, run=run
        )
        step(batch)
        assert bool(num_regions(step)) == (backend == "inductor")
        trained.append(step.parameters())
    for name, value in trained[0].items():
        torch.testing.assert_close(trained[1][name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["fsdp=2", "dp=2", "tp=2"])
def test_passes_that_are_exact_op_by_op_round_otherwise_at_most(mesh: str) -> None:
    """They cut the compute elsewhere: what is fused with what, and what runs by itself, is not the same."""
    profile = mw.load_profile("cpu-gloo")
    plain, expected = trained("llama", "inductor", mesh, passes="none", profile=profile)
    step, losses = trained("llama", "inductor", mesh, passes="exact", profile=profile)
    assert not step.session.compiler.notes
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_alike(step, plain, 1e-5)


def test_auto_compiles_for_a_gpu_of_its_own() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda", 1)
    assert [backend_for("auto", *where) for where in ((gpu, 1), (gpu, 2), (cpu, 1))] == ["background", "eager", "eager"]
    assert backend_for("inductor", cpu, 2) == "inductor"
    assert backend_for("eager", gpu, 1) == "eager"
    step, _ = trained("mlp", "auto", steps=1)
    assert not step.session.compiler.compiled


def test_a_program_that_is_only_simulated_compiles_nothing() -> None:
    step, _ = trained("linear", "inductor", steps=0)
    assert not step.session.compiler.compiled
    step(MODELS["linear"]()[1])
    assert num_regions(step)


def test_loading_inductor_draws_no_random_numbers_of_the_user() -> None:
    code = "import random; from meshweave.runtime.regions.compiler import load_inductor; a = random.getstate(); "
    code += "load_inductor(); assert a == random.getstate()"
    subprocess.run([sys.executable, "-c", code], check=True)


class Previous(torch.optim.Optimizer):
    """Keeps values of the step before: as they were, exchanged, or transposed."""

    def __init__(self, params: Any, what: str) -> None:
        super().__init__(params, {"lr": 0.1, "what": what})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state.update({name: torch.zeros_like(p) for name in ("mean", "before", "weight")})
            mean, before = state["mean"], state["before"]
            if group["what"] == "exchanged":
                other = mean.clone()
                mean.copy_(before)
                before.copy_(other)
                before.mul_(0.9).add_(p.grad)
            else:
                before.copy_(mean.t() if p.dim() == 2 and group["what"] == "transposed" else mean)
                mean.mul_(0.9).add_(p.grad)
            state["weight"].copy_(p)
            p.add_(mean - 0.5 * before + 0.01 * state["weight"], alpha=-group["lr"])


def previous(param: Tensor, grad: Tensor, state: Any, n: Any) -> tuple[Tensor, dict[str, Tensor]]:
    mean, before = state["mean"], state["before"]
    if n["what"] == "exchanged":
        mean, before = before, mean * 0.9 + grad
    else:
        before = mean.t() if param.dim() == 2 and n["what"] == "transposed" else mean
        mean = mean * 0.9 + grad
    new = param + (mean - 0.5 * before + 0.01 * param) * n["size"]
    return new, {"mean": mean, "before": before, "weight": param}


mw.register_update(
    Previous,
    previous,
    lambda options, kept: ({"size": -options["lr"], "what": options["what"]}, {}),
    dict.fromkeys(("mean", "before", "weight"), 0.0),
)


@pytest.mark.parametrize("what", ["kept", "exchanged", "transposed"])
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_an_optimizer_may_keep_the_previous_value_of_what_it_updates(what: str, backend: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    reference = copy.deepcopy(model)
    optimizers = [Previous(own.parameters(), what) for own in (model, reference)]
    batches = [torch.randn(8, 16) for _ in range(4)]
    step = mw.compile(
        model,
        loss=lambda out, _: out.square().mean(),
        example=batches[0],
        optimizer=optimizers[0],
        mesh="",
        run=mw.RunOptions(backend=backend),
    )
    for batch in batches:
        step(batch)
        optimizers[1].zero_grad()
        reference(batch).square().mean().backward()
        optimizers[1].step()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        torch.testing.assert_close(optimizers[0].state[ours], optimizers[1].state[theirs], rtol=1e-5, atol=1e-7)


class Decay(torch.optim.Optimizer):
    """Uses no gradients."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(group["lr"])


mw.register_update(
    Decay, lambda p, grad, state, n: (p * n["lr"], {}), lambda options, kept: ({"lr": options["lr"]}, {}), {}
)


def test_gradients_that_no_update_uses_are_not_computed_in_regions() -> None:
    model, batch, loss = MODELS["mlp"]()
    before = copy.deepcopy(dict(model.named_parameters()))
    optimizer = Decay(model.parameters(), {"lr": 0.5})
    step = mw.compile(
        model, loss=loss, example=batch, optimizer=optimizer, mesh="", run=mw.RunOptions(backend="inductor")
    )
    step(batch)
    for name, p in model.named_parameters():
        assert torch.equal(p, 0.5 * before[name])


def test_updates_are_in_place() -> None:
    step, _ = trained("linear", "inductor", "", steps=1)
    key = ("param", "0.weight")
    before = step.session.state.pieces[key][0].data_ptr()
    values = step.parameters()["0.weight"].clone()
    own = step.model.get_parameter("0.weight").square().sum()  # its gradient needs the old values
    step(MODELS["linear"]()[1])
    assert step.session.state.pieces[key][0].data_ptr() == before
    assert step.model.get_parameter("0.weight").data_ptr() == before
    assert not torch.equal(step.parameters()["0.weight"], values)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        own.backward()


def test_a_region_that_inductor_refuses_runs_op_by_op(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compile_graph = inductor.compile_graph

    def refuse(function: Any, *rest: Any, **options: Any) -> Any:
        if "tanh" in function.key:
            raise RuntimeError("no loops for this")
        return compile_graph(function, *rest, **options)

    monkeypatch.setattr(inductor, "compile_graph", refuse)
    _eager, expected = trained("mlp", "eager")
    with caplog.at_level(logging.WARNING, "meshweave"):
        step, losses = trained("mlp", "inductor")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert any("aten.tanh" in note and "no loops for this" in note for note in step.session.compiler.notes)
    assert "Inductor failed" in caplog.text


def test_without_a_compiler_steps_run_op_by_op() -> None:
    _eager, expected = trained("mlp", "eager")
    with inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}):
        step, losses = trained("mlp", "inductor")
    assert losses == expected
    assert not num_regions(step)
    assert len(step.session.compiler.notes) == 1
    assert "C++ compiler" in step.session.compiler.notes[0]


def test_a_region_is_one_span_of_a_trace() -> None:
    step, _ = trained("linear", "inductor", "", steps=1)
    found = step.trace(MODELS["linear"]()[1])
    regions = [span for span in found.spans if len(span.names) > 1]
    assert len(regions) == num_regions(step)
    assert sum(span.flops for span in regions) > 0
