"""A session: what it keeps from step to step, what it lets go, and what a failure leaves."""

from __future__ import annotations

import copy
import gc
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests import models
from tests.state_meter import StateMeter, classify
from tests.training import assert_equals_eager, assert_tensors, batches, mse, sgd, train_eagerly
from torch import Tensor, fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshweave as mw
from meshweave.errors import CheckpointError, LayoutError, PlanError, StepError
from meshweave.ir.graph import op_name, origin_of
from meshweave.ir.rank import SYMBOLS
from meshweave.program import Program
from meshweave.runtime import batched_updates
from meshweave.runtime.session import Pace, Session, SessionSettings
from meshweave.runtime.state import State
from meshweave.runtime.world import LocalWorld
from meshweave.train_step import CompiledStep

aten = torch.ops.aten
ADAM = partial(torch.optim.AdamW, lr=0.01)


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Deep(nn.Module):
    def __init__(self, width: int = 8, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(width) for _ in range(depth))
        self.stats = nn.BatchNorm1d(width)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.stats(x)


class Reads(TorchDispatchMode):
    """Fails where the host reads a value, for which it would wait on a GPU: `.item()`, ops whose results have sizes
    that depend on values, and copies to the host."""

    READING = (aten._local_scalar_dense, aten.item, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert op.overloadpacket not in self.READING, op
        result = op(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.device.type == "cpu":
            assert not any(isinstance(x, Tensor) and x.device.type != "cpu" for x in args), f"{op} copies to the host"
        return result


@contextmanager
def without_synchronisation(device: str) -> Iterator[None]:
    """Inside, an op for which the host waits for a GPU is an error."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
ROWS_OF_READS = [
    *(("cpu", mesh, 1) for mesh in ("fsdp=2", "dp=2", "tp=2", "cp=2", "pp=2")),
    *(("cpu", mesh, 2) for mesh in ("dp=2", "fsdp=2,tp=2", "pp=2")),
    *(pytest.param("cuda", mesh, 1, marks=ON_GPU) for mesh in ("dp=1", "fsdp=2", "cp=2")),
]


@pytest.mark.slow_rows("cpu-dp=2-1", "cpu-tp=2-1", "cpu-cp=2-1", "cpu-pp=2-1", "cpu-dp=2-2", "cpu-fsdp=2,tp=2-2")
@pytest.mark.parametrize(("device", "mesh", "accumulate"), ROWS_OF_READS)
def test_the_host_reads_no_value_between_the_ops_of_a_step(
    device: str, mesh: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without check_finite, that is: loss and norm are read before the update. (Virtual devices read copies of
    parameters between steps; on processors random numbers read the number of the step.) On GPUs PyTorch itself looks
    for synchronisations, too."""
    model, batch, loss = models.hugging_face("llama", batch=4, heads=4, layers=2 if mesh == "pp=2" else 1)
    model, batch = model.to(device), {name: value.to(device) for name, value in batch.items()}
    optimizer = ADAM(model.parameters())
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    options = mw.RunOptions(check_finite=False, backend="eager")
    step = mw.compile(
        model, loss=loss, example=batch, optimizer=optimizer, mesh=mesh, accumulate=accumulate, clip_grad_norm=1.0,
        run=options, device=device,
    )  # fmt: skip
    step(batch)
    names = list[str]()

    def without_reads(part: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            names.append(part.__name__)
            with Reads(), without_synchronisation(device):
                return part(*args)

        return run

    executor = type(step.session.turns.executors[0])
    for owner, name in ((Session, "_differentiate"), (Session, "_keep_results"), (executor, "run")):
        monkeypatch.setattr(owner, name, without_reads(getattr(owner, name)))
    for _ in range(2):
        schedule.step()
        step(batch)
    ahead = ["run"] * (accumulate > 1)  # the number of valid tokens
    assert names == [*ahead, "_differentiate", *["run"] * (2 * accumulate + 1), "_keep_results"] * 2


def _storages(tensors: Iterable[Tensor | None]) -> set[int]:
    return {t.untyped_storage().data_ptr() for t in tensors if t is not None}


class Watch:
    """A meter of tensors by weak reference. `lost` are the nodes that were freed while a tensor of theirs lives on
    and no other node, and no state, shares its memory; `peak` is the largest number of nodes held at once."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.held: dict[tuple[int, fx.Node], list[weakref.ref[Tensor]]] = {}
        self.lost: list[str] = []
        self.peak = 0

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        flat = [t for t in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(t, Tensor)]
        self.held[index, node] = [weakref.ref(t) for t in flat]
        self.peak = max(self.peak, sum(i == index for i, _ in self.held))

    def freed(self, index: int, node: fx.Node) -> None:
        left = [r() for r in self.held.pop((index, node), []) if r() is not None]
        shared = self.lasting() | _storages(r() for refs in self.held.values() for r in refs)
        if _storages(left) - shared:
            self.lost.append(node.name)

    def lasting(self) -> set[int]:
        return _storages(t for pieces in self.state.pieces.values() for t in pieces)


class Trips:
    """A meter that runs `action` when the n-th value of a phase appears."""

    def __init__(self, phase: str, count: int, action: Callable[[], None]) -> None:
        self.phase, self.left, self.action = phase, count, action

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        if index == 0 and origin_of(node).phase == self.phase:
            self.left -= 1
            if self.left == 0:
                self.action()

    def freed(self, index: int, node: fx.Node) -> None:
        pass


@cache
def _program(
    kind: type[nn.Module], mesh: str, make: Callable[..., Any], options: tuple[tuple[str, Any], ...]
) -> Program:
    """Programs hold no state: tests share them."""
    model, batch = kind(), batches(1, (4, 8), (4, 8))[0]
    step = mw.compile(model, loss=mse, example=batch, optimizer=make(model.parameters()), mesh=mesh, **dict(options))
    return step.program


def compiled(
    mesh: str = "fsdp=2",
    model: nn.Module | None = None,
    make: Callable[..., Any] = sgd,
    *,
    accumulate: int = 1,
    seed: int = 0,
    run: mw.RunOptions | None = None,
    clip_grad_norm: float | None = None,
) -> tuple[mw.TrainStep, list[dict[str, Tensor]]]:
    """A fresh step, and six batches."""
    model = Deep() if model is None else model
    options = (("accumulate", accumulate), ("clip_grad_norm", clip_grad_norm))
    program = _program(type(model), mesh, make, options)
    settings = SessionSettings(accumulate=accumulate, seed=seed, run=run or mw.RunOptions())
    step = mw.TrainStep(CompiledStep(program, model, make(model.parameters()), LocalWorld(program.mesh), settings))
    return step, batches(6, (4, 8), (4, 8))


def bytes_of(state: State) -> list[int]:
    """Bytes on each device."""
    total = dict.fromkeys(state.devices, 0)
    for item, layout in state.items:
        for device, piece in zip(state.holders(layout), state.pieces[item.kind, item.name], strict=True):
            total[device] += piece.nbytes
    return list(total.values())


def everything(step: mw.TrainStep) -> dict[str, Tensor]:
    """A copy of the whole state."""
    kinds = {"param": step.parameters(), "buffer": step.buffers(), "state": step.optimizer_state()}
    return {f"{k}/{n}": t.clone() for k, held in kinds.items() for n, t in held.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


# values that are let go


@pytest.mark.slow_rows("tp=2-1")
@pytest.mark.parametrize(("mesh", "accumulate"), [("", 1), ("dp=2", 2), ("fsdp=2", 1), ("tp=2", 1), ("fsdp=2,tp=2", 2)])
def test_a_value_is_let_go_after_its_last_use(mesh: str, accumulate: int) -> None:
    step, data = compiled(mesh, accumulate=accumulate)
    watch = step.session.turns.meter = Watch(step.session.state)
    step(data[0])
    assert watch.lost == []
    alive = _storages(r() for refs in watch.held.values() for r in refs)
    assert alive - watch.lasting() == set()
    num_values = sum(n.op == "call_function" and n.target not in SYMBOLS for n in step.program.rank.graph.nodes)
    assert watch.peak < num_values / 2


def test_gradients_are_let_go_unless_they_are_kept() -> None:
    kept, data = compiled(run=mw.RunOptions(keep_gradients=True))
    kept(data[0])
    assert set(kept.gradients()) == set(kept.parameters())
    loose, _ = compiled()
    loose(data[0])
    with pytest.raises(StepError, match="gradients were not kept") as error:
        loose.gradients()
    assert error.value.hint == "compile with run=mw.RunOptions(keep_gradients=True)"


@pytest.mark.slow_rows("options0", "options1")
@pytest.mark.parametrize(
    "options", [{}, {"accumulate": 2, "run": mw.RunOptions(keep_gradients=True), "clip_grad_norm": 1.0}]
)
def test_a_hundred_steps_hold_no_more_than_five(options: dict[str, Any]) -> None:
    step, data = compiled(make=ADAM, **options)

    def held() -> tuple[int, int]:
        gc.collect()
        tensors = [o for o in gc.get_objects() if type(o) in (Tensor, nn.Parameter)]
        storages = {
            t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.device.type == "cpu"
        }
        return len(tensors), sum(storages.values())

    for i in range(5):
        step(data[i % 6])
    before = held()
    for i in range(5, 100):
        step(data[i % 6])
    assert held() == before
    assert step.num_steps == 100


# state in bytes


@pytest.mark.slow_rows("fsdp=4")
@pytest.mark.parametrize("mesh", ["fsdp=4", "fsdp=2,tp=2"])
def test_fsdp_holds_its_share_and_at_most_two_gathered_layers(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batched_updates, "LARGEST", 0)  # as for parameters that are not small
    width, depth = 32, 6
    model = nn.Sequential(*(Layer(width) for _ in range(depth)))
    batch = {"input": torch.randn(4, width), "y": torch.randn(4, width)}
    step = mw.compile(model, loss=mse, example=batch, optimizer=ADAM(model.parameters()), mesh=mesh)
    meter = StateMeter([step.program.rank] * 4)
    step.session.turns.meter = meter
    params = sum(p.nbytes for p in model.parameters())
    layer = sum(p.nbytes for p in model[0].parameters())
    for _ in range(2):
        meter.begin(step.session.state)
        step(batch)
        total = 4 * params  # parameters, gradients and two moments
        assert max(meter.peak) <= total / 4 + 2 * layer
        # Three of the four are always held; the gradients are not all there before the first update.
        assert min(meter.peak) >= 3 * params / 4
    assert max(meter.peak) < params + 3 * params / 4  # what parameters kept whole would need
    assert bytes_of(step.session.state) == pytest.approx([3 * params / 4] * 4, rel=0.05)


def test_without_fsdp_every_device_holds_everything() -> None:
    model = nn.Sequential(*(Layer(16) for _ in range(4)))
    batch = {"input": torch.randn(4, 16), "y": torch.randn(4, 16)}
    step = mw.compile(model, loss=mse, example=batch, optimizer=ADAM(model.parameters()), mesh="dp=2")
    meter = step.session.turns.meter = StateMeter([step.program.rank] * 2)
    meter.begin(step.session.state)
    step(batch)
    params = sum(p.nbytes for p in model.parameters())
    assert min(meter.peak) >= 3 * params
    assert bytes_of(step.session.state) == [3 * params] * 2


def test_the_meter_knows_parameters_gradients_and_state_from_activations() -> None:
    step, _ = compiled("fsdp=2", make=ADAM)
    graph = step.program.rank
    kinds = classify(graph)
    by_name = {n.name: k for n, k in kinds.items()}
    assert by_name["layers_0_up_weight"] == "param"
    assert by_name["state_exp_avg_layers_0_up_weight"] == "state"
    assert not any(op_name(n.target) in ("aten.relu", "aten.native_layer_norm") for n in kinds)
    gathered = [n for n in graph.graph.nodes if op_name(n.target).endswith("all_gather_into_tensor")]
    assert gathered
    assert all(kinds[n] == "param" for n in gathered)
    scattered = [n for n in graph.graph.nodes if op_name(n.target).endswith("reduce_scatter_tensor")]
    assert scattered
    assert all(kinds[n] == "grad" for n in scattered)


# failures


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_changes_nothing(bad: float) -> None:
    step, data = compiled(make=ADAM)
    step(data[0])
    before = everything(step)
    spoilt = {"x": data[1]["x"].clone(), "y": data[1]["y"].clone()}
    spoilt["y"][0, 0] = bad
    with pytest.raises(StepError, match=f"the loss of step 2 is {bad}") as error:
        step(spoilt)
    assert error.value.got == "a loss that is not finite; nothing was updated"
    assert "check_finite=False" in error.value.hint
    assert_same(everything(step), before)
    assert (step.num_steps, step.metrics["loss"]) == (1, step.metrics["loss"])
    fresh, _ = compiled(make=ADAM, model=Deep())
    assert fresh.num_steps == 0


def test_check_finite_off_carries_on() -> None:
    step, data = compiled(run=mw.RunOptions(check_finite=False))
    spoilt = {"x": data[0]["x"], "y": torch.full((4, 8), float("nan"))}
    assert step(spoilt) != step.metrics["loss"]  # NaN differs from itself
    assert step.num_steps == 1
    assert all(bool(p.isnan().any()) for n, p in step.parameters().items() if n.startswith("layers.0.down"))


@pytest.mark.parametrize(
    ("change", "got", "expected"),
    [
        (lambda b: {**b, "x": b["x"][:3]}, "float32[3, 8]", "float32[4,8]"),
        (lambda b: {**b, "y": torch.zeros(4, 9)}, "float32[4, 9]", "float32[4,8]"),
        (lambda b: {**b, "y": b["y"].double()}, "float64[4, 8]", "float32[4,8]"),
        (lambda b: {"x": b["x"].repeat(2, 1), "y": b["y"].repeat(2, 1)}, "float32[8, 8]", "float32[4,8]"),
    ],
)
def test_a_batch_of_another_shape_states_both(change: Callable[..., Any], got: str, expected: str) -> None:
    step, data = compiled()
    before = everything(step)
    with pytest.raises(LayoutError, match="differs from the example") as error:
        step(change(data[0]))
    assert (error.value.got, error.value.expected) == (got, expected)
    assert "that differ from the example only in sizes" in error.value.hint
    assert_same(everything(step), before)


def test_a_batch_of_another_size_under_accumulation_says_so() -> None:
    step, data = compiled(accumulate=2)
    with pytest.raises(LayoutError) as error:
        step({k: v.repeat(2, 1) for k, v in data[0].items()})
    assert (error.value.got, error.value.expected) == ("float32[4, 8]", "float32[2,8] in each of 2 microbatches")
    with pytest.raises(PlanError, match="does not divide into microbatches"):
        step({k: v[:3] for k, v in data[0].items()})


def test_a_batch_that_lacks_an_entry_is_an_error_and_one_with_more_is_not() -> None:
    step, data = compiled()
    with pytest.raises(LayoutError, match="lacks entries") as error:
        step({"x": data[0]["x"]})
    assert (error.value.got, error.value.expected) == ("x", "x, y")
    twin, _ = compiled(model=_same(step))
    assert step({**data[0], "more": torch.zeros(1)}) == twin(data[0])


def _same(step: mw.TrainStep) -> nn.Module:
    model = Deep()
    model.load_state_dict({**step.parameters(), **step.buffers()})
    return model


def _interrupt() -> None:
    raise KeyboardInterrupt


def _fail() -> None:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("phase", "count", "accumulate", "action", "kind"),
    [
        ("forward", 1, 1, _interrupt, KeyboardInterrupt),
        ("forward", 20, 1, _interrupt, KeyboardInterrupt),
        ("backward", 15, 2, _interrupt, KeyboardInterrupt),
        ("loss", 2, 1, _fail, RuntimeError),
        ("forward", 30, 2, _fail, RuntimeError),
    ],
)
def test_a_step_that_stops_before_its_update_leaves_the_last_one(
    phase: str, count: int, accumulate: int, action: Callable[[], None], kind: type[BaseException]
) -> None:
    model = Deep()
    step, data = compiled(model=copy.deepcopy(model), make=ADAM, accumulate=accumulate)
    twin, _ = compiled(model=model, make=ADAM, accumulate=accumulate)
    losses = [twin(batch) for batch in data[:2]]
    assert step(data[0]) == losses[0]
    before = everything(step)
    step.session.turns.meter = Trips(phase, count, action)
    with pytest.raises(kind):
        step(data[1])
    assert_same(everything(step), before)
    assert step.num_steps == 1
    step.session.turns.meter = None
    assert step(data[1]) == losses[1]
    assert_same(everything(step), everything(twin))


class Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 4)
        self.out = nn.Linear(4, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.table(tokens))


@pytest.mark.parametrize("device", [0, 1])
def test_an_op_that_fails_on_one_device_names_it_and_the_line(device: int) -> None:
    model = Looks()
    batch = {"tokens": torch.arange(4), "y": torch.ones(4, 4)}
    step = mw.compile(model, loss=mse, example=batch, optimizer=sgd(model.parameters()), mesh="dp=2")
    first = step(batch)
    before = everything(step)
    bad = {**batch, "tokens": batch["tokens"].clone()}
    bad["tokens"][2 * device] = 7
    with pytest.raises(StepError, match=f"aten.embedding failed on device {device}") as error:
        step(bad)
    assert error.value.where.endswith("in forward (table) [forward]")
    assert "test_session.py:" in error.value.where
    assert error.value.got == "IndexError: index out of range in self"
    assert_same(everything(step), before)
    assert step(batch) < first


# the update


def test_an_interrupt_during_the_update_waits_for_its_end() -> None:
    model = Deep()
    step, data = compiled(model=copy.deepcopy(model), make=ADAM)
    twin, _ = compiled(model=model, make=ADAM)
    twin(data[0])
    step.session.turns.meter = Trips("update", 3, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):
        step(data[0])
    assert (step.num_steps, step.session.state.torn) == (1, False)
    assert_same(everything(step), everything(twin))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    step.session.turns.meter = None
    for batch in data[1:]:
        assert step(batch) == twin(batch)
        assert_same(everything(step), everything(twin))  # the optimizer has counted the interrupted step
    assert step.metrics == twin.metrics


def test_an_interrupt_between_two_parts_ends_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step, data = compiled(make=ADAM)
    twin, _ = compiled(model=_same(step), make=ADAM)
    monkeypatch.setattr(step.session, "_update", lambda *_: _interrupt())
    with pytest.raises(KeyboardInterrupt):
        step(data[0])
    monkeypatch.undo()
    assert step(data[0]) == twin(data[0])


def test_an_interrupt_during_the_update_goes_to_the_handler_of_the_program() -> None:
    """Of torchrun's processes the one in its update would stop at once, and the others after the next step."""
    step, data = compiled(make=ADAM)
    noted: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: noted.append(step.num_steps))
    try:
        step.session.turns.meter = Trips("update", 3, lambda: signal.raise_signal(signal.SIGINT))
        step(data[0])
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [1]


def test_a_torn_state_refuses_to_run_and_to_be_saved_until_a_checkpoint_is_loaded(tmp_path: Path) -> None:
    step, data = compiled(make=ADAM)
    step(data[0])
    step.save(str(tmp_path / "good"))
    before = everything(step)
    step.session.turns.meter = Trips("update", 9, _fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        step(data[1])
    step.session.turns.meter = None
    assert step.session.state.torn
    assert step.num_steps == 1
    for use in (lambda: step(data[1]), lambda: step.save(str(tmp_path / "bad"))):
        with pytest.raises(StepError, match="the last update was interrupted half-way") as error:
            use()
        assert error.value.hint == "load the last checkpoint"
    assert not (tmp_path / "bad").exists()
    step.load(str(tmp_path / "good"))
    assert_same(everything(step), before)
    assert step.num_steps == 1
    step(data[1])
    assert step.num_steps == 2


def test_a_torn_state_stays_torn_when_the_load_fails(tmp_path: Path) -> None:
    step, data = compiled()
    step.session.turns.meter = Trips("update", 5, _fail)
    with pytest.raises(RuntimeError, match="out of luck"):
        step(data[0])
    step.session.turns.meter = None
    with pytest.raises(CheckpointError):
        step.load(str(tmp_path / "nowhere"))
    with pytest.raises(StepError, match="interrupted half-way"):
        step(data[0])


def test_a_load_that_fails_changes_nothing_or_leaves_the_state_torn(tmp_path: Path) -> None:
    step, data = compiled(make=ADAM, seed=1)
    step(data[0])
    step.save(str(tmp_path / "saved"))
    other, _ = compiled(make=ADAM, seed=2)
    other(data[1])
    before = everything(other)
    with pytest.raises(CheckpointError, match="trained with another seed"):
        other.load(str(tmp_path / "saved"))
    (largest,) = sorted((tmp_path / "saved").glob("*.distcp"), key=lambda p: p.stat().st_size)[-1:]
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 0xFF
    largest.write_bytes(bytes(content))
    twin, _ = compiled(make=ADAM, seed=1)
    twin(data[1])
    twin.save(str(tmp_path / "good"))
    held = everything(twin)
    with pytest.raises(CheckpointError):
        twin.load(str(tmp_path / "saved"))
    with pytest.raises(StepError, match="interrupted half-way"):  # some of its tensors may have been read
        twin(data[2])
    assert_same(everything(other), before)
    twin.load(str(tmp_path / "good"))
    assert_same(everything(twin), held)
    assert (other.num_steps, twin.num_steps) == (1, 1)
    twin(data[2])


# the rest


def test_an_optimizer_that_has_stepped_already_goes_on() -> None:
    model, data = Deep(), batches(4, (4, 8), (4, 8))
    model.stats = nn.Identity()  # before it biases have no gradient, and AdamW makes steps of their rounding
    optimizer = ADAM(model.parameters())

    def eagerly(model: nn.Module, optimizer: torch.optim.Optimizer, batch: dict[str, Tensor]) -> float:
        optimizer.zero_grad()
        value = mse(model(batch["x"]), batch)
        value.backward()
        optimizer.step()
        return value.item()

    for batch in data[:2]:
        eagerly(model, optimizer, batch)
    twin, other = copy.deepcopy((model, optimizer))
    step = mw.compile(model, loss=mse, example=data[0], optimizer=optimizer, mesh="fsdp=2")
    assert step.num_steps == 2
    found = [float(step(batch)) for batch in data[2:]]
    torch.testing.assert_close(found, [eagerly(twin, other, batch) for batch in data[2:]], rtol=1e-5, atol=0)
    assert_tensors(step.parameters(), {n: p.detach() for n, p in twin.named_parameters()})


def test_a_buffer_made_of_the_batch_is_not_the_callers_tensor() -> None:
    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(8))
            self.register_buffer("last", torch.zeros(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            self.last.copy_(x)
            return x * self.w

    step, data = compiled("", model=Keeps())
    step(data[0])
    expected = data[0]["x"].clone()
    data[0]["x"].zero_()
    assert torch.equal(step.buffers()["last"], expected)


def test_steps_that_take_far_longer_than_before_are_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    pace = Pace()
    for seconds in [*[0.5] * 15, 0.01, *[0.02] * 16, *[9.0] * 15, 0.01]:
        pace.add(seconds)  # compiling, other work, a pause
    assert not caplog.messages
    for _ in range(32):
        pace.add(0.1)
    (message,) = caplog.messages
    assert message.startswith("steps take 10.0 times as long as before (0.1 s, before 0.01 s)")


def test_metrics_are_those_of_the_last_step() -> None:
    step, data = compiled(clip_grad_norm=0.5)
    norms: list[float] = []
    eager, losses = train_eagerly(
        _same(step),
        data[:2],
        after_backward=lambda m: norms.append(float(nn.utils.clip_grad_norm_(m.parameters(), 0.5))),
    )
    for i in range(2):
        step(data[i])
        assert step.metrics == pytest.approx({"loss": losses[i], "grad_norm": norms[i]}, rel=1e-5)
    assert len(list(eager.parameters())) == len(step.parameters())


def test_batch_norm_and_layers_train_alike() -> None:
    assert_equals_eager(Deep(), batches(3, (4, 8), (4, 8)), "fsdp=2,tp=2")
