"""The module's tensors are the step's state: training scripts as people write them, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.training import assert_tensors, batches, compile_once, mse
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import meshweave as mw
from meshweave.errors import StepError

DATA = batches(6, (4, 8), (4, 8))


class Tied(nn.Module):
    """Two layers with one weight, uneven sizes, and statistics in buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.middle, self.again = nn.Linear(8, 5), nn.Linear(5, 5), nn.Linear(5, 5, bias=False)
        self.again.weight = self.middle.weight
        self.norm, self.down = nn.BatchNorm1d(5), nn.Linear(5, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.middle(self.up(x)))
        return self.down(self.norm(self.again(x))) * self.scale


@dataclass
class Script:
    """A model that is trained, by eager PyTorch or by a compiled step, and what a script keeps beside it."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: mw.TrainStep | None = None
    seen: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)

    def train(self, batch: dict[str, Tensor]) -> float:
        if self.step is not None:
            return float(self.step(batch))
        self.optimizer.zero_grad()
        value = mse(self.model(batch["x"]), batch)
        value.backward()
        self.optimizer.step()
        return value.item()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)


def pair(mesh: str) -> tuple[Script, Script]:
    """The compiled script and the eager one, from the same weights."""
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer = adamw(model)
    step = compile_once((__name__, mesh), model, loss=mse, example=DATA[0], optimizer=optimizer, mesh=mesh)
    return Script(model, optimizer, step), Script(twin, adamw(twin))


# What a script does between steps. It sees the model alone, as any script does.


@torch.no_grad()
def average(script: Script, i: int) -> None:
    mean = script.extra.setdefault("mean", [p.clone() for p in script.model.parameters()])
    for m, p in zip(mean, script.model.parameters(), strict=True):
        m.lerp_(p, 0.3)
    script.seen = [m.clone() for m in mean]


def average_by_torch(script: Script, i: int) -> None:
    mean = script.extra.setdefault("mean", AveragedModel(script.model))
    mean.update_parameters(script.model)
    script.seen = [p.detach().clone() for p in mean.parameters()]


@torch.no_grad()
def evaluate_the_average(script: Script, i: int) -> None:
    """As EMA classes do: weights aside, the average in their place by `.data`, back again."""
    mean = script.extra.setdefault("mean", [p.clone() for p in script.model.parameters()])
    own = [p.detach().clone() for p in script.model.parameters()]
    for m, p in zip(mean, script.model.parameters(), strict=True):
        m.lerp_(p, 0.3)
        p.data.copy_(m.data)
    script.seen.append(evaluated(script))
    for o, p in zip(own, script.model.parameters(), strict=True):
        p.data.copy_(o.data)


@torch.no_grad()
def evaluated(script: Script) -> Tensor:
    script.model.eval()
    out = script.model(DATA[-1]["x"])
    script.model.train()
    return out


def evaluate(script: Script, i: int) -> None:
    script.seen.append(evaluated(script))


def keep_the_average(script: Script, i: int) -> None:
    """From the third step on the weights are their average."""
    average(script, i)
    if i == 2:
        for m, p in zip(script.extra["mean"], script.model.parameters(), strict=True):
            p.data.copy_(m)


def go_back(script: Script, i: int) -> None:
    if i == 0:
        script.extra["kept"] = copy.deepcopy(script.model.state_dict())
    if i == 2:
        script.model.load_state_dict(script.extra["kept"])


def clip_weights(script: Script, i: int) -> None:
    for p in script.model.parameters():
        p.data.clamp_(-0.2, 0.2)


def assign_data(script: Script, i: int) -> None:
    script.model.middle.weight.data = script.model.middle.weight.data * 0.5


@torch.no_grad()
def write_in_place(script: Script, i: int) -> None:
    script.model.middle.weight.add_(0.1)


def start_a_layer_again(script: Script, i: int) -> None:
    torch.manual_seed(i)
    script.model.down.reset_parameters()
    script.model.norm.reset_running_stats()


def write_a_buffer(script: Script, i: int) -> None:
    script.model.scale.mul_(1.1)


def nothing(script: Script, i: int) -> None:
    pass


BETWEEN = [
    nothing,
    average,
    average_by_torch,
    evaluate_the_average,
    evaluate,
    keep_the_average,
    go_back,
    clip_weights,
    assign_data,
    write_in_place,
    start_a_layer_again,
    write_a_buffer,
]


ROWS: list[Any] = [(f, mesh) for f in BETWEEN for mesh in ("", "fsdp=2,tp=2")]
ROWS += [
    pytest.param(f, mesh, marks=pytest.mark.slow)
    for f in (average, go_back, clip_weights, assign_data)
    for mesh in ("dp=2", "fsdp=2")
]


@pytest.mark.slow_rows(
    "average-",
    "evaluate_the_average-",
    "nothing-",
    "keep_the_average-",
    "write_in_place-",
    "assign_data-",
    "average_by_torch-",
    "evaluate-",
    "start_a_layer_again-",
)
@pytest.mark.parametrize(("between", "mesh"), ROWS, ids=lambda v: getattr(v, "__name__", v))
def test_a_script_sees_and_changes_the_weights_as_in_eager_pytorch(between: Callable[..., None], mesh: str) -> None:
    ours, eager = pair(mesh)
    identities = [id(p) for p in ours.model.parameters()]
    losses: list[list[float]] = [[], []]
    for i, batch in enumerate(DATA[:5]):
        for script, kept in zip((ours, eager), losses, strict=True):
            kept.append(script.train(batch))
            between(script, i)
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours.seen, eager.seen, rtol=1e-4, atol=1e-5)
    assert_tensors(dict(ours.model.state_dict()), dict(eager.model.state_dict()), 1e-4)
    assert [id(p) for p in ours.model.parameters()] == identities
    assert ours.model.again.weight is ours.model.middle.weight


@pytest.mark.parametrize("mesh", ["", "fsdp=2,tp=2"])
def test_state_dict_is_a_checkpoint_that_eager_pytorch_continues(mesh: str, tmp_path: Path) -> None:
    ours, eager = pair(mesh)
    for batch in DATA[:3]:
        ours.train(batch)
        eager.train(batch)
    torch.save(ours.model.state_dict(), tmp_path / "model.pt")
    fresh = Tied()
    fresh.load_state_dict(torch.load(tmp_path / "model.pt"))
    torch.testing.assert_close(fresh(DATA[3]["x"]), eager.model(DATA[3]["x"]), rtol=1e-4, atol=1e-5)
    ours.model.load_state_dict(torch.load(tmp_path / "model.pt"))
    torch.testing.assert_close(ours.train(DATA[3]), eager.train(DATA[3]), rtol=1e-4, atol=1e-5)


def test_one_device_holds_parameters_once() -> None:
    ours, _ = pair("")
    ours.train(DATA[0])
    for name, p in ours.model.named_parameters():
        assert p.data_ptr() == ours.step.session.state.pieces["param", name][0].data_ptr()


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_a_model_on_the_meta_device_becomes_real(mesh: str) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.Linear(5, 8))
    identities = [id(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    example = {"input": DATA[0]["x"], "y": DATA[0]["y"]}
    step = mw.compile(model, loss=mse, example=example, optimizer=optimizer, mesh=mesh)
    twin = copy.deepcopy(model)
    assert torch.isfinite(model(DATA[1]["x"])).all()
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == identities
    step(example)
    value = mse(twin(DATA[0]["x"]), DATA[0])
    value.backward()
    with torch.no_grad():
        twin[0].weight.sub_(0.1 * twin[0].weight.grad)
    torch.testing.assert_close(model[0].weight, twin[0].weight, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_a_loaded_checkpoint_is_in_the_model(mesh: str, tmp_path: Path) -> None:
    ours, _ = pair(mesh)
    ours.train(DATA[0])
    ours.step.save(str(tmp_path / "saved"))
    saved = copy.deepcopy(ours.model.state_dict())
    ours.train(DATA[1])
    ours.step.load(str(tmp_path / "saved"))
    torch.testing.assert_close(dict(ours.model.state_dict()), dict(saved), rtol=0, atol=0)


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
def test_two_steps_of_one_model_train_it_in_turns(mesh: str) -> None:
    """A second compile, for another batch say, goes on where the first one is."""
    torch.manual_seed(0)
    model = Tied()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    short = {k: v[:2] for k, v in DATA[1].items()}
    steps = {
        len(b["x"]): mw.compile(model, loss=mse, example=b, optimizer=optimizer, mesh=mesh) for b in (DATA[0], short)
    }
    eager = Script(twin, other)
    for batch in (DATA[0], short, DATA[2], short):
        assert steps[len(batch["x"])](batch) == pytest.approx(eager.train(batch), rel=1e-5)
    assert_tensors(dict(model.state_dict()), dict(twin.state_dict()), 1e-4)


class OneMemory(nn.Module):
    """Buffers that no step changes, the second in the memory of the first."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("table", torch.ones(3, 8))
        self.register_buffer("row", self.table[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.table[0] + self.row


@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_a_write_to_a_buffer_shows_in_those_that_share_its_memory(mesh: str) -> None:
    torch.manual_seed(0)
    model = OneMemory()
    twin = copy.deepcopy(model)
    assert twin.row.data_ptr() == twin.table[1].data_ptr()
    optimizer, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
    ours = Script(model, optimizer, mw.compile(model, loss=mse, example=DATA[0], optimizer=optimizer, mesh=mesh))
    eager = Script(twin, other)
    for batch, write in zip(
        DATA, (lambda m: None, lambda m: m.table.mul_(3), lambda m: m.row.add_(1), lambda m: None), strict=False
    ):
        for script in (ours, eager):
            write(script.model)
        assert ours.train(batch) == pytest.approx(eager.train(batch), rel=1e-5)
    assert_tensors(dict(model.state_dict()), dict(twin.state_dict()), 1e-5)


OTHERS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "another shape": (
        lambda m: setattr(m.down.bias, "data", torch.zeros(9)),
        "'down.bias' of the model has changed",
    ),
    "another dtype": (lambda m: m.down.double(), "of the model has changed its shape or dtype"),
    "another parameter": (
        lambda m: setattr(m.down, "bias", nn.Parameter(torch.zeros(8))),
        "the parameter 'down.bias' of the model was replaced after compile",
    ),
    "load_state_dict by assignment": (
        lambda m: m.load_state_dict({k: v.clone() for k, v in m.state_dict().items()}, assign=True),
        "of the model was replaced after compile",
    ),
    "another buffer": (
        lambda m: setattr(m, "scale", torch.ones(8)),
        "the buffer 'scale' of the model was replaced after compile",
    ),
}


@pytest.mark.parametrize("mesh", ["", "fsdp=2"])
@pytest.mark.parametrize("row", OTHERS)
def test_what_cannot_be_taken_over_is_an_error(row: str, mesh: str) -> None:
    change, detail = OTHERS[row]
    ours, _ = pair(mesh)
    ours.train(DATA[0])
    change(ours.model)
    with pytest.raises(StepError) as error:
        ours.train(DATA[1])
    assert detail in str(error.value)
    assert ours.step.num_steps == 1
