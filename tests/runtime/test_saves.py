"""Asynchronous saves: what they write, what waits for them, and where their errors come out."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Timer
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import Job, free_port
from tests.training import batches, compile_once, mse
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import meshweave as mw
from meshweave.errors import CheckpointError

WRITE = FileSystemWriter.write_data


class Net(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def train_step(mesh: str = "fsdp=2", seed: int = 0) -> mw.TrainStep:
    torch.manual_seed(seed)
    model = Net(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    example = batches(1, (4, 8), (4, 8))[0]
    options = {"loss": mse, "example": example, "optimizer": optimizer, "mesh": mesh, "profile": "alpha-beta"}
    return compile_once((__name__, mesh), model, **options)


DATA = batches(6, (4, 8), (4, 8))


def everything(step: mw.TrainStep) -> dict[str, Tensor]:
    """A copy of the whole state."""
    kinds = {"param": step.parameters(), "state": step.optimizer_state()}
    return {f"{kind}/{name}": t.clone() for kind, values in kinds.items() for name, t in values.items()}


def assert_same(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def beside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


@contextmanager
def writes_wait(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Nothing is written before the event is set, which the end of the block does."""
    may_write = Event()

    def write(*args: Any) -> Any:
        assert may_write.wait(60)
        return WRITE(*args)

    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", write)
        try:
            yield may_write
        finally:
            may_write.set()


def no_space(*_: Any) -> None:
    raise OSError("No space left on device")


@pytest.mark.parametrize("mesh", ["", "fsdp=2", "fsdp=2,tp=2"])
def test_it_writes_the_state_of_its_call_while_steps_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh: str
) -> None:
    step, path = train_step(mesh), tmp_path / "at"
    step(DATA[0])
    before = everything(step)
    with writes_wait(monkeypatch) as may_write:
        saved = step.async_save(str(path))
        losses = [float(step(batch)) for batch in DATA[1:4]]
        assert not saved.done()
        assert not path.exists()
        may_write.set()
        saved.result(60)
    assert beside(path) == ["at"]
    assert step.num_steps == 4
    assert all(not torch.equal(value, before[name]) for name, value in everything(step).items() if "param" in name)
    other = train_step("fsdp=2", seed=1)
    other.load(str(path))
    assert_same(everything(other), before)
    assert other.num_steps == 1
    if mesh == "fsdp=2":
        assert [float(other(batch)) for batch in DATA[1:4]] == losses


def test_what_is_written_in_place_meanwhile_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, path = train_step(), str(tmp_path / "at")
    step(DATA[0])
    before = everything(step)
    with writes_wait(monkeypatch):
        saved = step.async_save(path)
        for piece in itertools.chain.from_iterable(step.session.state.pieces.values()):
            piece.detach().zero_()
    saved.result(60)
    step.load(path)
    assert_same(everything(step), before)


def test_a_second_save_waits_for_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, events = train_step(), []

    def write(writer: FileSystemWriter, *args: Any) -> Any:
        events.append("begin")
        time.sleep(0.2)
        events.append("end")
        return WRITE(writer, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write)
    first = step.async_save(str(tmp_path / "1"))
    second = step.async_save(str(tmp_path / "2"))
    assert (first.done(), second.done()) == (True, False)
    step.save(str(tmp_path / "3"))
    assert second.done()
    assert events == ["begin", "end"] * 3
    assert beside(tmp_path / "1") == ["1", "2", "3"]


def test_an_error_comes_out_of_the_future_and_of_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    step, path = train_step(), tmp_path / "at"
    step.save(str(path))
    before = everything(step)
    for next_call in (step.save, step.async_save, step.load):
        with monkeypatch.context() as patch:
            patch.setattr(FileSystemWriter, "write_data", no_space)
            saved = step.async_save(str(path))
            with pytest.raises(CheckpointError, match="No space left on device"):
                saved.result(60)
        assert "an asynchronous save failed" in caplog.text
        caplog.clear()
        step(DATA[0])
        with pytest.raises(CheckpointError, match="No space left on device"):
            next_call(str(path))
        assert beside(path) == ["at"]
    step.load(str(path))
    assert_same(everything(step), before)
    step(DATA[0])
    step.save(str(path))


def test_what_is_no_checkpoint_is_refused_at_once(tmp_path: Path) -> None:
    step = train_step()
    (tmp_path / "at").write_text("keep me")
    with pytest.raises(CheckpointError, match="will not be replaced"):
        step.async_save(str(tmp_path / "at"))
    step.async_save(str(tmp_path / "other")).result(60)
    assert beside(tmp_path / "at") == ["at", "other"]


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_what_no_file_can_have_is_refused(tmp_path: Path, call: str) -> None:
    step = train_step()
    step(DATA[0])
    step.optimizer.state[next(step.model.parameters())]["note"] = object()
    with pytest.raises(CheckpointError, match=r"cannot be written to a checkpoint\n.*\n  got: 'note' is a object"):
        getattr(step, call)(str(tmp_path / "at"))
    assert not [*tmp_path.iterdir()]


def test_a_load_waits_for_the_save_that_is_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, path = train_step(), str(tmp_path / "at")
    step(DATA[0])
    before, other = everything(step), train_step(seed=1)
    with writes_wait(monkeypatch) as may_write:
        step.async_save(path)
        step(DATA[1])
        with pytest.raises(CheckpointError, match="no checkpoint at this path") as error:
            other.load(path)
        assert error.value.hint == "a save to this path is not finished, or was killed"
        Timer(0.2, may_write.set).start()
        step.load(path)
    assert_same(everything(step), before)


def test_a_step_that_is_compiled_again_knows_of_the_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = train_step()
    with writes_wait(monkeypatch) as may_write:
        saved = step.async_save(str(tmp_path / "at"))
        step.model[0].bias.requires_grad_(False)
        step(DATA[0])
        Timer(0.2, may_write.set).start()
        step.save(str(tmp_path / "later"))
        assert saved.done()


SCRIPT = """
import sys, time
from tests.runtime.test_saves import DATA, WRITE, FileSystemWriter, train_step
def write(*args):
    time.sleep(0.5)
    return WRITE(*args)
FileSystemWriter.write_data = write
step = train_step()
step(DATA[0])
step.async_save(sys.argv[1])
print("ends")
"""


def test_a_program_that_ends_finishes_it(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "at")]
    assert subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout == "ends\n"
    step = train_step(seed=1)
    step.load(str(tmp_path / "at"))
    assert step.num_steps == 1


# Two processes.


def job_async_save(pipe: Connection, folder: str) -> dict[str, Any]:
    path = f"{folder}/at"
    step = train_step()
    step(DATA[0])
    before = everything(step)
    FileSystemWriter.write_data = lambda *args: (time.sleep(0.5), WRITE(*args))[1]
    saved = step.async_save(path)
    losses = [float(step(batch)) for batch in DATA[1:3]]
    assert not saved.done()
    step.load(path)
    assert_same(everything(step), before)
    assert [float(step(batch)) for batch in DATA[1:3]] == losses
    FileSystemWriter.write_data = no_space if dist.get_rank() == 1 else WRITE
    step.async_save(path)
    step(DATA[3])
    with pytest.raises(CheckpointError, match="No space left on device"):
        step.save(path)
    FileSystemWriter.write_data = WRITE
    step.load(path)
    assert_same(everything(step), before)
    step.async_save(path).result(60)
    entries = step.optimizer.state[next(step.model.parameters())]
    if dist.get_rank() == 1:
        entries["note"] = object()
    with pytest.raises(CheckpointError, match="optimizer's state cannot be written"):
        step.save(path)  # also on the other rank, which has nothing strange
    return {"losses": losses}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_two_processes(start: Callable[..., Job], tmp_path: Path) -> None:
    first, second = start(f"{__name__}:job_async_save", 2, str(tmp_path)).finish(240)
    assert first == second
    step = train_step(seed=1)
    step.load(str(tmp_path / "at"))
    assert beside(tmp_path / "at") == ["at"]
    assert [float(step(batch)) for batch in DATA[1:3]] == first["losses"]


def job_leaves(pipe: Connection, folder: str) -> dict[str, Any]:
    """The group is destroyed while the files are written."""
    step, path = train_step(), Path(folder) / "ck"
    step(DATA[0])
    with pytest.MonkeyPatch.context() as monkeypatch, writes_wait(monkeypatch) as may_write:
        done = step.async_save(str(path))
        dist.destroy_process_group()
        may_write.set()
        error = done.exception(timeout=30)
    return {"text": str(error), "is_there": path.exists()}


@pytest.mark.multiprocess
def test_a_group_that_is_destroyed_meanwhile_is_named_by_the_error(start: Callable[..., Job], tmp_path: Path) -> None:
    for outcome in start(f"{__name__}:job_leaves", 2, str(tmp_path)).finish(60):
        assert "destroy_process_group() ran during the save" in outcome["text"], outcome
        assert not outcome["is_there"]


SCRIPT_OF_A_JOB = """
import sys, torch, meshweave as mw
from tests.runtime.test_saves import DATA, train_step
step = train_step()
step(DATA[0])
step.async_save(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_script_of_two_processes_that_ends_finishes_it(tmp_path: Path) -> None:
    port, path = free_port(), tmp_path / "ck"
    jobs = []
    for rank in range(2):
        of_job = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        jobs.append(subprocess.Popen([sys.executable, "-c", SCRIPT_OF_A_JOB, path], env={**os.environ, **of_job}))
    assert [job.wait(timeout=90) for job in jobs] == [0, 0]
    step = train_step()
    step.load(str(path))
    assert step.num_steps == 1
