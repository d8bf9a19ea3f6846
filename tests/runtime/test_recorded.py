"""Recorded passes: on a processor with recordings of ops in place of CUDA graphs, on a GPU with CUDA graphs."""

from __future__ import annotations

import ctypes
from bisect import insort
from collections import Counter
from collections.abc import Callable
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from tests.processes import Job
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import meshweave as mw
from meshweave.interop.pytree import tree_map, tree_map_only
from meshweave.runtime import batched_updates, recorded, session
from meshweave.runtime.cuda_graphs import CudaGraphs, Place, RecordingFailed


def _copy(target: Any, source: Any) -> None:
    if isinstance(target, Tensor):
        target.copy_(source)


ON_GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))
EAGER = mw.RunOptions(backend="eager")
EMPTY = torch.ops.aten.empty_strided.default
WAITS = torch.ops.aten._local_scalar_dense.default


class _Ops(TorchDispatchMode):
    """The ops that run. `memory`: where their results are, if anywhere in particular."""

    def __init__(self, memory: Arena | None = None) -> None:
        super().__init__()
        self.memory = memory
        self.calls: list[tuple[Any, Any, Any, Any]] = []  # op, operands and result, with their places for tensors
        self.awaits = False
        self.old: dict[int, tuple[Tensor, Tensor]] = {}  # what they write into, and what it was

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, memory = kwargs or {}, self.memory
        self.awaits |= op is WAITS
        if memory is None:
            return op(*args, **kwargs)
        if op is WAITS:
            raise RuntimeError("the host waits")
        if op._schema.is_mutable:
            written = args[0] if isinstance(args[0], list) else [args[0]]
            for x in written:
                self.old.setdefault(x.data_ptr(), (x, x.clone()))
        result = op(*args, **kwargs)
        if op is EMPTY:
            result.zero_()  # indices, say, while it is recorded
        if not op._schema.is_mutable and not op.is_view:
            result = tree_map_only(Tensor, memory.with_value, result)
        self.calls.append((op, *(tree_map_only(Tensor, memory.placed, x) for x in (args, kwargs, result))))
        return result


class Arena:
    """Memory in which what is released is used again, as that of CUDA graphs."""

    def __init__(self, size: int = 1 << 24) -> None:
        self.bytes = np.zeros(size, np.uint8)
        self.start = self.bytes.ctypes.data
        self.free: list[tuple[int, int]] = [(0, size)]  # offsets and sizes
        self.old: list[tuple[Any, Any]] = []  # parts that were used again, and what was in them

    def with_value(self, value: Tensor) -> Tensor:
        """A copy in this memory, which is used again once nothing holds the copy's storage."""
        steps = zip(value.shape, value.stride(), strict=True)
        size = -(-(1 + sum((n - 1) * step for n, step in steps)) * value.element_size() // 64) * 64
        if not value.numel():
            return value
        at = next(i for i, (_, room) in enumerate(self.free) if room >= size)
        offset, room = self.free.pop(at)
        if room > size:
            self.free.insert(at, (offset + size, room - size))
        part = self.bytes[offset : offset + size]
        finalize(part, self._release, offset, size)
        self.old.append((self.bytes[offset : offset + size], part.copy()))
        place = torch.from_numpy(part).view(value.dtype).as_strided(value.shape, value.stride())
        return place.copy_(value)

    def _release(self, offset: int, size: int) -> None:
        insort(self.free, (offset, size))
        for i in range(len(self.free) - 1, 0, -1):
            (first, room), (second, more) = self.free[i - 1 : i + 1]
            if first + room == second:
                self.free[i - 1 : i + 1] = [(first, room + more)]

    def placed(self, value: Tensor) -> Any:
        """Where a value is, if it is here: a recording does not keep it."""
        return Place.of(value) if self.start <= value.data_ptr() < self.start + len(self.bytes) else value


class FakeGraphs:
    """Recordings of ops: a replay computes them again on the operands in the recorded places, into the recorded places
    of results. Recordings use the memory of values that are gone again. Between two steps all of it is NaN."""

    def __init__(self) -> None:
        self._user: object | None = None
        self.memory = Arena()
        self.recordings: list[list[tuple[Any, Any, Any, Any]]] = []
        self.num_replays = 0

    @property
    def user(self) -> object | None:
        return self._user

    @user.setter
    def user(self, value: object | None) -> None:
        self._user = value
        if value is None:
            self.memory.bytes[:] = 0xFF

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        ops = _Ops(self.memory)
        try:
            with ops:
                run()
        except Exception as error:
            raise RecordingFailed(str(error)) from error
        finally:
            for x, before in ops.old.values():
                x.copy_(before)
            for part, values in reversed(self.memory.old):  # as if nothing had run
                part[:] = values
            self.memory.old.clear()
        self.recordings.append(ops.calls)
        calls, ops.old = ops.calls, {}

        def replay() -> None:
            self.num_replays += 1
            with torch.no_grad():
                for op, *places in calls:
                    args, kwargs, result = (tree_map_only(Place, self.at, x) for x in places)
                    if op._schema.is_mutable:
                        op(*args, **kwargs)
                    elif not op.is_view and op is not EMPTY:
                        tree_map(_copy, result, op(*args, **kwargs))

        return replay

    def at(self, place: Place) -> Tensor:
        if not place.shape.numel():
            return torch.empty_strided(place.shape, place.stride, dtype=place.dtype)
        steps = zip(place.shape, place.stride, strict=True)
        size = (1 + sum((n - 1) * step for n, step in steps)) * place.dtype.itemsize
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(place.address), dtype=torch.uint8)
        return memory.view(place.dtype).as_strided(place.shape, place.stride)

    def is_here(self, value: Tensor) -> bool:
        return True

    def awaits(self, run: Callable[[], None]) -> bool:
        with _Ops() as ops:
            run()
        return ops.awaits


class Net(nn.Module):
    """Buffers, random numbers, tied and frozen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.BatchNorm1d(16)
        self.b.weight = nn.Parameter(self.a.weight.detach().t().clone())
        self.frozen = nn.Linear(8, 8)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(nn.functional.dropout(self.norm(self.a(self.frozen(x))).relu(), 0.2, self.training))


def mse(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return ((out - batch["y"]) ** 2).mean()


def data(num: int, rows: int = 6) -> list[dict[str, Tensor]]:
    chance = torch.Generator().manual_seed(0)
    return [{name: torch.randn(rows, 8, generator=chance) for name in "xy"} for _ in range(num)]


def compiled(device: str = "cpu", run: mw.RunOptions = EAGER, **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = Net().to(device)
    step = mw.compile(
        model,
        loss=mse,
        example=data(1)[0],
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
        mesh="",
        forward=lambda m, batch: m(batch["x"]),
        run=run,
        **options,
    )
    return step, model


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> FakeGraphs:
    fake = FakeGraphs()
    monkeypatch.setattr(session.Session, "_recorder", lambda self, _: fake if self.settings.accumulate == 1 else None)
    return fake


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: x.detach().clone() for name, x in model.state_dict().items()}


Act = Callable[[Any, nn.Module, int], Any]


def train(act: Act, num: int = 8, **how: Any) -> tuple[list[Any], dict[str, Tensor]]:
    """The losses and what `act` returned in each step, and the trained values."""
    step, model = compiled(**how)
    seen: list[Any] = []
    for i, batch in enumerate(data(num)):
        seen.append(act(step, model, i))
        seen.append(step(batch))
        seen += [step.metrics["loss"]]
    return seen, values(model)


def evaluate(step: Any, model: nn.Module, i: int) -> Any:
    return step.evaluate(data(1, rows=6)[0])


def outputs(step: Any, model: nn.Module, i: int) -> Any:
    return step.forward_only(data(1)[0])


def schedule(step: Any, model: nn.Module, i: int) -> None:
    step.optimizer.param_groups[0]["lr"] = 1e-2 / (i + 1)


def write(step: Any, model: nn.Module, i: int) -> None:
    if i == 5:
        with torch.no_grad():
            model.a.weight.mul_(0.5)


def replace(step: Any, model: nn.Module, i: int) -> None:
    if i == 5:
        model.a.weight.data = model.a.weight.data * 0.5


def other_rows(step: Any, model: nn.Module, i: int) -> Any:
    return step(data(1, rows=4)[0]) if i % 2 else None


def trace(step: Any, model: nn.Module, i: int) -> None:
    if i == 5:
        step.trace(data(1)[0])


def fail(step: Any, model: nn.Module, i: int) -> None:
    if i in (2, 5):
        with pytest.raises(mw.MeshweaveError, match="loss"):
            step({"x": torch.full((6, 8), torch.inf), "y": torch.zeros(6, 8)})


def fail_at_first(step: Any, model: nn.Module, i: int) -> None:
    """The update of the first two steps does not run: it is recorded later than the rest would be."""
    if i == 0:
        for _ in range(2):
            with pytest.raises(mw.MeshweaveError, match="loss"):
                step({"x": torch.full((6, 8), torch.inf), "y": torch.zeros(6, 8)})


def reload(step: Any, model: nn.Module, i: int) -> None:
    if i == 5:
        model.load_state_dict({name: x * 0.9 if x.is_floating_point() else x for name, x in values(model).items()})


def accumulate(step: Any, model: nn.Module, i: int) -> Any:
    return step(data(1)[0], accumulate=2) if i % 2 else None


def nothing(step: Any, model: nn.Module, i: int) -> None:
    pass


ACTS = [
    nothing,
    evaluate,
    outputs,
    schedule,
    write,
    replace,
    other_rows,
    trace,
    fail,
    reload,
    accumulate,
]


@pytest.mark.parametrize("act", ACTS, ids=lambda act: act.__name__)
def test_recorded_steps_equal_others_to_the_bit(graphs: FakeGraphs, act: Act, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded_run = train(act)
    assert graphs.num_replays >= 12
    monkeypatch.undo()
    plain_run = train(act)
    torch.testing.assert_close(recorded_run, plain_run, rtol=0, atol=0)


def test_a_step_is_recorded_once(graphs: FakeGraphs) -> None:
    counts: list[int] = []
    train(lambda step, model, i: counts.append(len(graphs.recordings)))
    assert counts[:3] == [0, 0, 0]
    assert counts[3] > 3
    assert set(counts[3:]) == {counts[3]}


@pytest.mark.parametrize("act", [pytest.param(act, marks=ON_GPU, id=act.__name__) for act in ACTS])
def test_cuda_graphs_equal_single_launches_to_the_bit(act: Act, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "LEAST_TASKS", 1)
    counts = count_recordings(monkeypatch)
    recorded_run = train(act, device="cuda", run=mw.RunOptions(backend="inductor"))
    assert counts["recorded"] >= 3
    assert not counts["failed"]
    plain_run = train(act, device="cuda", run=mw.RunOptions(backend="inductor", cuda_graphs=False))
    torch.testing.assert_close(recorded_run, plain_run, rtol=0, atol=0)


def count_recordings(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    counts, record = Counter[str](), CudaGraphs.record

    def counting(self: CudaGraphs, run: Callable[[], None]) -> Callable[[], None]:
        try:
            replay = record(self, run)
        except RecordingFailed as error:
            counts["failed"] += 1
            print("not recorded:", error)
            raise
        counts["recorded"] += 1
        return replay

    monkeypatch.setattr(CudaGraphs, "record", counting)
    return counts


def language_model(family: str) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        family,
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        use_cache=False,
    )
    return transformers.AutoModelForCausalLM.from_config(config).cuda()  # type: ignore[no-any-return]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_language_models_train_by_cuda_graphs(family: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "LEAST_TASKS", 1)  # layers are few
    counts = count_recordings(monkeypatch)
    losses: dict[bool, list[float]] = {}
    for cuda_graphs in (True, False):
        model = language_model(family).to(dtype)
        ids = torch.arange(128, device="cuda").view(2, 64) % 250
        batch = {"input_ids": ids, "labels": ids}
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        step = mw.compile(
            model,
            loss=lambda out, _: out.loss,
            example=batch,
            optimizer=optimizer,
            mesh="",
            clip_grad_norm=1.0,
            run=mw.RunOptions(backend="inductor", cuda_graphs=cuda_graphs),
        )
        losses[cuda_graphs] = [float(step({"input_ids": ids + i, "labels": ids + i})) for i in range(6)]
        losses[cuda_graphs].append(float(step.evaluate(batch)))
    assert counts["recorded"] >= 3
    assert not counts["failed"]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(losses[True], losses[False], rtol=tolerance, atol=0)


def job(pipe: Any, mesh: str) -> dict[str, Any]:
    """Losses with recordings and without, and the values that both have trained; and how many communications have
    read operands that stayed as they were until the wait, or changed before it."""
    batched_updates.LARGEST = 0
    fake, plain = FakeGraphs(), session.Session._recorder
    counts, flying = Counter[str](), dict[int, tuple[Tensor, Tensor]]()
    prepare = recorded.RecordedPasses.__post_init__

    def watch(passes: recorded.RecordedPasses) -> None:
        prepare(passes)
        run = passes.others

        def others(task: Any, env: Any) -> None:
            slot = task.args[0].index
            if task.is_start and not task.owns_operand and isinstance(at := fake.memory.placed(env[slot]), Place):
                flying[task.out] = (fake.at(at), env[slot].clone())
            run(task, env)
            if task.is_wait and (sent := flying.pop(slot, None)):
                counts["same" if torch.equal(*sent) else "changed"] += 1

        passes.others = others

    recorded.RecordedPasses.__post_init__ = watch  # type: ignore[method-assign]
    runs = []
    for recorder in (lambda self, _: fake, plain):
        session.Session._recorder = recorder  # type: ignore[method-assign, assignment]
        torch.manual_seed(0)
        model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        step = mw.compile(
            model,
            loss=mse,
            example=data(1)[0],
            optimizer=optimizer,
            mesh=mesh,
            forward=lambda m, batch: m(batch["x"]),
            profile="alpha-beta",
        )
        losses = [float(step(batch)) for batch in data(6)]
        runs.append((losses, {name: x.tolist() for name, x in step.parameters().items()}))
    return {"is_same": runs[0] == runs[1], "replays": fake.num_replays, **counts}


@pytest.mark.multiprocess
@pytest.mark.slow_rows("dp=2", "tp=2")
@pytest.mark.parametrize("mesh", ["dp=2", "fsdp=2", "tp=2"])
def test_processes_record_what_they_compute_between_communications(start: Callable[..., Job], mesh: str) -> None:
    for outcome in start(f"{__name__}:job", 2, mesh).finish(120):
        assert outcome["is_same"], outcome
        assert outcome["replays"] >= 12  # several in each of the last steps
        assert outcome["same"] > 0
        assert "changed" not in outcome
