"""Models that use torch.utils.checkpoint train as eager PyTorch trains them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.models import hugging_face
from tests.training import assert_tensors, batches, mse
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import meshweave as mw
from meshweave.capture.trace import GlobalRandom
from meshweave.errors import CaptureError
from meshweave.ir.graph import op_name, origin_of

again = partial(checkpoint, use_reentrant=False)
Call = Callable[..., Any]


class Block(nn.Module):
    def __init__(self, drop: float = 0.3) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(6, 12), nn.Linear(12, 6), nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(torch.tanh(self.up(self.drop(x)))))


class Net(nn.Module):
    """Two blocks, each called by `call(block, x)`, with dropout outside of them."""

    def __init__(self, call: Call, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks, self.call = nn.ModuleList(make() for _ in range(2)), call

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(x, 0.2)
        for block in self.blocks:
            x = self.call(block, x)
        return F.dropout(x, 0.2)


def plainly(function: Call, *args: Any) -> Any:
    return function(*args)


def nested(block: Block, x: Tensor) -> Tensor:
    def outer(x: Tensor) -> Tensor:
        return block.drop(again(block, F.dropout(x, 0.1)))

    return again(outer, x)


def keeps_matmuls(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.tanh.default)
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE


def sequential(block: Block, x: Tensor) -> Tensor:
    return checkpoint_sequential([block, nn.Tanh(), block], 2, x, use_reentrant=False)


def selective(block: nn.Module, x: Tensor) -> Tensor:
    return again(block, x, context_fn=partial(create_selective_checkpoint_contexts, keeps_matmuls))


def in_parts(block: Block, x: Tensor) -> Tensor:
    inner = again(lambda x: block.drop(torch.tanh(block.up(x))), x)
    return again(lambda a, b: block.drop(b) + block.down(a), inner, x)


CALLS: dict[str, tuple[Call, Call]] = {
    "plain": (again, plainly),
    "without early stop": (partial(again, early_stop=False), plainly),
    "nested": (nested, lambda block, x: block.drop(block(F.dropout(x, 0.1)))),
    "sequential": (sequential, lambda block, x: block(torch.tanh(block(x)))),
    "selective": (selective, plainly),
    "no determinism check": (partial(again, determinism_check="none"), plainly),
    "several functions": (in_parts, None),
}  # fmt: skip


def eager(model: nn.Module, data: list[dict[str, Tensor]], seed: int = 0, **_: Any) -> tuple[list[float], nn.Module]:
    """Eager PyTorch on the numbers that a captured step draws; SGD by hand."""
    model, losses = copy.deepcopy(model), []
    for i, batch in enumerate(data):
        model.zero_grad()
        with GlobalRandom(torch.tensor(i), seed):
            loss = mse(model(batch["x"]), batch)
            loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        losses.append(loss.item())
    return losses, model


def assert_as_eager(model: nn.Module, mesh: str = "", shape: tuple[int, ...] = (8, 6), **options: Any) -> mw.TrainStep:
    dtype = next(model.parameters()).dtype
    data = [{name: x.to(dtype) for name, x in batch.items()} for batch in batches(3, shape, shape)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    expected, trained = eager(model, data, 4)
    step = mw.compile(model, loss=mse, example=data[0], optimizer=optimizer, mesh=mesh, seed=4, **options)
    torch.testing.assert_close([float(step(b)) for b in data], expected, rtol=2e-6, atol=0)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in trained.named_parameters()})
    assert_tensors(step.buffers(), dict(trained.named_buffers()))
    return step


@pytest.mark.parametrize("name", CALLS)
def test_a_checkpointed_model_equals_eager(name: str) -> None:
    torch.manual_seed(0)
    call, plain = CALLS[name]
    model = Net(call)
    assert_as_eager(model, "dp=2")
    if plain is not None:  # and eager PyTorch itself draws the masks of forward again
        data = batches(2, (8, 6), (8, 6))
        other = copy.deepcopy(model)
        other.call = plain
        losses, found = eager(model, data)
        expected_losses, expected = eager(other, data)
        assert losses == expected_losses
        assert_tensors(found.state_dict(), expected.state_dict(), 1e-6)


@pytest.mark.parametrize("mesh", ["tp=2", "fsdp=2,tp=2", "pp=2"])
def test_meshes_train_a_checkpointed_model_alike(mesh: str) -> None:
    assert_as_eager(Net(again), mesh)


def test_the_reentrant_kind_is_an_error_with_what_to_do() -> None:
    model = Net(
        lambda block, x: checkpoint(block, block.up(block.down(block.up(x))).narrow(1, 0, 6), use_reentrant=True)
    )
    data = batches(1, (8, 6), (8, 6))
    with pytest.raises(CaptureError, match="reentrant kind cannot be captured") as error:
        mw.compile(model, loss=mse, example=data[0], mesh="")
    assert "use_reentrant=False" in error.value.hint


class Normed(nn.Module):
    """Eager PyTorch updates the running statistics in forward and once more when the block runs again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.seen.add_(1)
        return self.last(torch.tanh(self.norm(self.first(x)) * self.seen))


@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_buffers_are_read_and_written_when_a_function_runs_again(mesh: str) -> None:
    step = assert_as_eager(Net(again, Normed).double(), mesh)  # batch norm makes much of what float32 rounds
    assert step.buffers()["blocks.0.norm.num_batches_tracked"] == 6
    assert step.buffers()["blocks.1.seen"] == 6


def test_what_runs_again_knows_its_module_line_and_call() -> None:
    step = assert_as_eager(Net(again), "dp=2")
    nodes = [n for n in step.program.captured.graph.nodes if n.op == "call_function"]
    matmuls = [origin_of(n) for n in nodes if op_name(n.target) == "aten.mm" and "blocks.1.up" in origin_of(n).module]
    phases = [(o.phase, o.call) for o in matmuls]
    (first, call), (repeated, same) = phases[:2]
    assert (first, repeated, call) == ("forward", "backward", same)
    sources = {o.source for o in matmuls}
    assert len(sources) == 1, "forward, repeated and gradients are of one line"
    masks = [n for n in nodes if op_name(n.target) == "meshweave.chance"]
    assert len({n.args[2] for n in masks}) == 6
    assert len(masks) == 10, "the four in the blocks twice"


def test_own_seeds_and_forks_are_followed() -> None:
    def noisy(block: nn.Module, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(7)
            x = x + torch.rand_like(x)
        return block(x) + torch.randn_like(x)

    model = Net(lambda block, x: again(noisy, block, x))
    before = torch.get_rng_state()
    step = assert_as_eager(model)
    assert torch.equal(torch.get_rng_state(), before), "the user's generator is as it was"
    drawn = [n for n in step.program.captured.graph.nodes if op_name(n.target) == "meshweave.chance"]
    assert len({n.args[2] for n in drawn}) < len(drawn)


def test_without_the_state_of_the_generator_a_repeated_function_draws_anew() -> None:
    step = assert_as_eager(Net(partial(again, preserve_rng_state=False)))
    drawn = [n.args[2] for n in step.program.captured.graph.nodes if op_name(n.target) == "meshweave.chance"]
    assert sorted(drawn) == list(range(1, 11))


def test_a_generator_of_the_models_own_is_an_error() -> None:
    own = torch.Generator().manual_seed(0)
    model = Net(lambda block, x: block(x * torch.empty_like(x).bernoulli_(0.5, generator=own)))
    with pytest.raises(CaptureError, match="no mesh-independent form") as error:
        mw.compile(model, loss=mse, example=batches(1, (8, 6), (8, 6))[0], mesh="")
    assert "a generator of its own" in error.value.got


@pytest.mark.parametrize("policy", ["full", "selective"])
def test_recompute_of_a_model_that_checkpoints(policy: str) -> None:
    assert_as_eager(Net(again), "dp=2", passes=f"recompute={policy}")


@pytest.mark.parametrize(
    "options", [{"precision": torch.bfloat16}, {"precision": mw.Precision(param_dtype=torch.bfloat16)}]
)
def test_checkpoints_repeat_under_casts(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = Net(again)
    other = copy.deepcopy(model)
    other.call = plainly
    (batch,) = batches(1, (8, 6), (8, 6))
    if isinstance(options["precision"], mw.Precision):
        batch["x"] = batch["x"].to(torch.bfloat16)
    found, expected = (
        mw.compile(m, loss=mse, example=batch, mesh="dp=2", run=mw.RunOptions(keep_gradients=True), **options)
        for m in (model, other)
    )
    assert found(batch) == expected(batch)
    assert_tensors(found.gradients(), expected.gradients(), 1e-6)


@pytest.mark.slow_rows("gpt2-tp=2")
@pytest.mark.parametrize(
    ("kind", "mesh"),
    [("gpt2", "tp=2")] + [pytest.param(k, "dp=2,tp=2", marks=pytest.mark.slow) for k in ("llama", "gpt2", "bert")],
)
def test_a_hugging_face_model_with_checkpoints_and_dropout_equals_eager(kind: str, mesh: str) -> None:
    model, batch, loss = hugging_face(kind)
    for module in model.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.1  # a number in llama
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it has a newer name
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    step = mw.compile(model, loss=loss, example=batch, mesh=mesh, run=mw.RunOptions(keep_gradients=True))
    found = step(batch)
    eager = copy.deepcopy(model)
    with GlobalRandom(torch.tensor(0), 0):
        expected = loss(eager(**batch), batch)
        expected.backward()
    assert found == pytest.approx(expected.item(), rel=1e-6)
    assert_tensors(step.gradients(), {n: p.grad for n, p in eager.named_parameters()})
    masks = [n for n in step.program.captured.graph.nodes if op_name(n.target) == "meshweave.chance"]
    assert {origin_of(n).phase for n in masks} == {"forward", "backward"}
