"""What people pass to `compile` at first: every form that has one meaning works, every other is a clear error."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshweave as mw
from meshweave.build import Target, build_program
from meshweave.capture.step import CaptureOptions, StepSource
from meshweave.place.resolve import batch_axes
from meshweave.runtime.cluster import init_from_env
from meshweave.runtime.collectives import Pending
from meshweave.runtime.process_groups import ClusterCommunicator, check_sends_from_gpu
from meshweave.runtime.watch import ConnectionLost


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Twice(Net):
    """A buffer and a parameter with two names each in one module."""

    def __init__(self) -> None:
        super().__init__()
        shift = torch.arange(4.0)
        self.register_buffer("shift", shift)
        self.register_buffer("same", shift)
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.again = self.scale

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.again + self.same) * self.scale + self.shift


class Experts(nn.Module):
    """Four experts over all tokens, weighted by a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(4, 4), nn.Module()
        self.experts.up = nn.Parameter(torch.linspace(-1, 1, 4 * 4 * 4).reshape(4, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.einsum("td,edh->eth", x, self.experts.up)
        return torch.einsum("eth,te->th", outputs, torch.softmax(self.gate(x), -1))


def compiled(model: nn.Module | None = None, **options: Any) -> mw.TrainStep:
    torch.manual_seed(0)
    model = Net() if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = {"mesh": "dp=2", "loss": lambda out, batch: out.pow(2).mean(), "example": batch(), **options}
    return mw.compile(model, optimizer=optimizer, **given)


def batch() -> dict[str, Tensor]:
    return {"x": torch.arange(16.0).reshape(4, 4) / 16}


@pytest.mark.parametrize(
    "options",
    [
        {"mesh": {"dp": 2}},
        {"mesh": mw.Mesh(dp=2)},
        {"plan": "dp:dp"},
        {"mesh": {"fsdp": 2, "tp": 2}, "plan": "fsdp:fsdp+auto_tp:tp"},
    ],
    ids=str,
)
def test_meshes_and_plans_in_every_form(options: dict[str, Any]) -> None:
    assert compiled(**options)(batch()) == pytest.approx(compiled(mesh="")(batch()).item(), rel=1e-6)


BAD: list[tuple[dict[str, Any], type[mw.MeshweaveError], str]] = [
    ({"mesh": {"dp": "two"}}, mw.MeshError, "the size of axis 'dp' is not a number"),
    ({"mesh": {2: 2}}, mw.MeshError, "cannot name an axis"),
    ({"mesh": 2}, mw.MeshError, "not a mesh"),
    ({"mesh": ("dp", 2)}, mw.MeshError, "not a mesh"),
    ({"plan": "x"}, mw.PlanError, "'x' is not a scheme of plans"),
    ({"plan": {"up": "[{dp}, {}]"}}, mw.PlanError, "not a plan"),
    ({"precision": "bfloat16"}, mw.PlanError, "not a precision"),
    ({"precision": torch.int8}, mw.PlanError, "autocast is not a floating-point dtype"),
    ({"run": {"backend": "eager"}}, mw.PlanError, "not options of a run"),
    ({"clip_grad_norm": "a"}, mw.PlanError, "invalid norm"),
    ({"clip_grad_norm": True}, mw.PlanError, "invalid norm"),
    ({"accumulate": 2.0}, mw.PlanError, "invalid number of microbatches"),
    ({"seed": "a"}, mw.PlanError, "the seed is not an integer"),
    ({"passes": ""}, mw.MeshweaveError, "unknown pass"),
    ({"memory_cap_bytes": "40GB"}, mw.MeshweaveError, "memory_cap_bytes is not a size"),
    ({"shapes": 5}, mw.PlanError, "takes a list of batches"),
    ({"shapes": {"input": 5}}, mw.PlanError, "takes a list of batches"),
    ({"device": "meta"}, mw.MeshError, "cannot run on this device"),
    ({"device": "cuda:99"}, mw.MeshError, "cannot run on this device"),
    ({"device": "gpu"}, mw.MeshError, "cannot run on this device"),
]


@pytest.mark.parametrize(("options", "kind", "message"), BAD, ids=[str(options) for options, *_ in BAD])
def test_bad_arguments(options: dict[str, Any], kind: type[mw.MeshweaveError], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        compiled(**options)
    assert caught.value.got


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_cuda_that_is_not_there() -> None:
    with pytest.raises(mw.MeshError, match="0 CUDA devices") as caught:
        compiled(device="cuda")
    assert "omit device" in caught.value.hint


def test_a_model_that_torch_compile_has_wrapped() -> None:
    part = Net()
    part.up = torch.compile(part.up, backend="eager")  # type: ignore[assignment]
    called = Net()
    called.compile(backend="eager")
    whole = torch.compile(Net(), backend="eager")
    for model, name in ((part, "up"), (called, ""), (whole, "")):
        with pytest.raises(mw.CaptureError, match=r"torch\.compile") as caught:
            compiled(model)  # type: ignore[arg-type]
        assert caught.value.where.startswith(f"module '{name}'")
        assert "remove torch.compile" in caught.value.hint


def test_a_function_under_torch_compile_runs_eagerly() -> None:
    """Dynamo does not compile the tracer with it."""

    def never(graph: Any, inputs: Any) -> Any:
        raise AssertionError

    net = Net()
    net.up.forward = torch.compile(net.up.forward, backend=never)  # type: ignore[method-assign]
    compiled(net)


def test_gradients_before_a_step() -> None:
    step = compiled(run=mw.RunOptions(keep_gradients=True))
    with pytest.raises(mw.StepError, match="before the first step"):
        step.gradients()
    step(batch())
    assert step.gradients().keys() == step.parameters().keys()


def test_a_tensor_with_two_names_in_one_module() -> None:
    torch.manual_seed(0)
    eager = Twice()
    loss = eager(batch()["x"]).pow(2).mean()
    loss.backward()
    torch.manual_seed(0)
    step = compiled(Twice(), run=mw.RunOptions(keep_gradients=True))
    assert step(batch()) == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(step.gradients()["scale"], eager.scale.grad)
    assert set(step.buffers()) == {"shift"}


def test_ep_is_expert_parallelism_where_there_are_experts() -> None:
    torch.manual_seed(0)
    step = compiled(Experts(), mesh="dp=2,ep=2")
    torch.manual_seed(0)
    alone = compiled(Experts(), mesh="")
    assert [float(step(batch())) for _ in range(2)] == pytest.approx(
        [alone(batch()).item() for _ in range(2)], rel=1e-6
    )
    stored = {layout for item, layout in step.session.state.items if item.name == "experts.up"}
    assert [str(layout) for layout in stored] == ["[{ep}, {}, {}]"]
    assert batch_axes(mw.Mesh("dp=2,ep=2"), None) == ("dp", "ep")


def test_a_loss_of_torch_is_told_what_a_loss_takes() -> None:
    with pytest.raises(mw.CaptureError, match=r"takes \(outputs, targets\)") as error:
        mw.compile(nn.Linear(3, 2), loss=nn.MSELoss(), example=(torch.ones(2, 3), torch.ones(2, 2)), mesh="dp=2")
    assert "criterion(outputs, batch[1])" in error.value.hint


def test_parameters_that_no_optimizer_has_are_named(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD([model.weight], lr=0.1)
    loss = lambda out, batch: out.sum()  # noqa: E731
    mw.compile(model, loss=loss, example=(torch.ones(2, 3),), optimizer=optimizer, mesh="dp=2")
    assert "1 parameters require gradients, but are in no group of the optimizer (bias)" in caplog.text


def test_a_mesh_that_is_too_large_to_be_proven() -> None:
    model = nn.Linear(2, 2)
    target = Target(mw.Mesh("dp=100000"), None, mw.AlphaBeta())
    source = StepSource(model, lambda out, batch: out.sum())
    with pytest.raises(mw.MeshError, match="too large to be planned") as raised:
        build_program(source, {"input": torch.ones(2, 2)}, None, target, CaptureOptions())
    assert raised.value.got == "100,000 devices"


def test_a_rank_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "3"),
        ("WORLD_SIZE", "4"),
        ("LOCAL_RANK", "1"),
        ("MASTER_ADDR", "x"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(mw.MeshError, match="this rank has no GPU") as caught:
        init_from_env("nccl")
    assert caught.value.got == "LOCAL_RANK=1 on a host with 1 CUDA devices"


def test_two_ranks_on_a_gpu() -> None:
    refusal = (
        "NCCL error in ProcessGroupNCCL.cpp, invalid usage\nDuplicate GPU detected : rank 1 and rank 0 both on 18000"
    )

    def begin() -> Any:
        raise RuntimeError(refusal)

    with pytest.raises(mw.StepError, match="two ranks have the same GPU") as caught:
        ClusterCommunicator(mw.Mesh("dp=2"), 1, True)._begin(begin)
    assert caught.value.got == refusal.splitlines()[1]
    assert "NCCL_HOSTID" in caught.value.hint


def test_an_error_of_nccl_is_that_of_a_communication() -> None:
    class Work:
        def wait(self) -> None:
            raise dist.DistBackendError("NCCL communicator was aborted on rank 1")

    pending = Pending((Work(),), (), lambda: None)
    with pytest.raises(ConnectionLost, match=r"interrupted(.|\n)*was aborted on rank 1"):
        ClusterCommunicator(mw.Mesh("dp=2"), 1, True).wait(pending)


@pytest.mark.parametrize(("config", "is_refused"), [("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", False)])
def test_gloo_sends_nothing_from_a_gpu(config: str, is_refused: bool) -> None:
    with pytest.raises(mw.StepError, match="NCCL for CUDA") if is_refused else nullcontext():
        check_sends_from_gpu(config)
