"""Checkpoints: round trips over meshes, replacement, damage and files that mean harm."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Mapping
from math import prod
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tests.processes import Job
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshweave.errors import CheckpointError
from meshweave.ir.graph import Spec
from meshweave.runtime.checkpoint import Checkpoint, on_all, save

INFO: dict[str, int | str] = {"step": 12, "seed": 2**40, "model": "llama-deadbeef"}

# name -> shape, dtype
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
    "even": ((8, 4), torch.float32),
    "uneven": ((7, 5), torch.float64),
    "half": ((12, 3), torch.bfloat16),
    "few": ((2, 3), torch.int64),
    "scalar": ((), torch.float32),
    "none": ((0, 4), torch.float32),
    "flags": ((9,), torch.bool),
}


def whole(shape: tuple[int, ...], dtype: torch.dtype, start: int = 1) -> torch.Tensor:
    """A different value in every element (as far as the dtype goes), so that a swapped piece shows."""
    return torch.arange(start, start + prod(shape)).reshape(shape).to(dtype)


def tensors(start: int = 1) -> dict[str, torch.Tensor]:
    return {name: whole(shape, dtype, start) for name, (shape, dtype) in TENSORS.items()}


def zeros() -> dict[str, torch.Tensor]:
    return {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in TENSORS.items()}


def check(loaded: Mapping[str, torch.Tensor], start: int = 1) -> None:
    assert loaded.keys() == TENSORS.keys()
    for name, tensor in tensors(start).items():
        assert torch.equal(loaded[name], tensor), name


def load(path: Path, wanted: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    def read() -> dict[str, Any]:
        checkpoint = Checkpoint.at(path)
        checkpoint.check_model({name: Spec(tuple(x.shape), x.dtype) for name, x in wanted.items()})
        checkpoint.read(wanted)
        return dict(checkpoint.info)

    return on_all(read)[0]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "step-12"


def beside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def test_round_trip(path: Path) -> None:
    save(path, tensors(), INFO)
    assert beside(path) == ["step-12"]
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", "meshweave.json"]
    wanted = zeros()
    assert load(path, wanted) == INFO
    check(wanted)


def test_plain_dcp_reads_it_too(path: Path) -> None:
    save(path, {"w": whole((7, 5), torch.float32)}, INFO)
    state = {"w": torch.zeros(7, 5)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["w"], whole((7, 5), torch.float32))


def test_an_existing_checkpoint_is_replaced(path: Path) -> None:
    save(path, tensors(1), {"step": 1})
    save(path, tensors(500), {"step": 2})
    wanted = zeros()
    assert load(path, wanted) == {"step": 2}
    check(wanted, start=500)
    assert beside(path) == ["step-12"]


FAILURES: dict[str, tuple[type[BaseException], str]] = {
    "disk": (OSError, "No space left on device"),
    "ctrl-c": (KeyboardInterrupt, "now"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("where", ["write", "finish", "rename"])
@pytest.mark.parametrize("existing", [False, True])
def test_a_save_that_fails_leaves_what_was_there(
    path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, where: str, existing: bool
) -> None:
    kind, message = FAILURES[failure]
    if existing:
        save(path, tensors(), {"step": 1})

    def fail(*_: Any, **__: Any) -> None:
        raise kind(message)

    with monkeypatch.context() as patch:
        if where == "rename":
            rename = Path.rename
            patch.setattr(Path, "rename", lambda p, to: fail() if ".tmp-" in p.name else rename(p, to))
        else:
            patch.setattr(FileSystemWriter, {"write": "write_data", "finish": "finish"}[where], fail)
        with pytest.raises(CheckpointError if kind is OSError else kind, match=message):
            save(path, tensors(9), {"step": 2})
    assert beside(path) == (["step-12"] if existing else [])
    if existing:
        wanted = zeros()
        assert load(path, wanted) == {"step": 1}
        check(wanted)


def test_a_save_killed_between_its_renames_leaves_the_old_one_loadable(path: Path) -> None:
    save(path, tensors(), {"step": 1})
    path.rename(path.with_name("step-12.old-0123abcd"))
    path.with_name("step-12.tmp-0123abcd").mkdir()
    wanted = zeros()
    assert load(path, wanted) == {"step": 1}
    check(wanted)
    save(path, tensors(5), {"step": 2})
    assert load(path, wanted) == {"step": 2}
    assert beside(path) == ["step-12"]


def test_an_unfinished_save_is_never_loaded(path: Path) -> None:
    save(path, tensors(), {"step": 1})
    path.rename(path.with_name("step-12.tmp-0123abcd"))
    with pytest.raises(CheckpointError, match="there is no checkpoint at this path"):
        load(path, tensors())


def test_a_directory_of_other_things_is_not_replaced(path: Path) -> None:
    save(path, tensors(), {"step": 1})
    (path / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"will not be replaced\n.*\n  got: notes.txt"):
        save(path, tensors(), {"step": 2})
    assert (path / "notes.txt").read_text() == "keep me"
    assert load(path, zeros()) == {"step": 1}


class Harm:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)

    def __init__(self, mark: Path) -> None:
        self.mark = mark


@pytest.mark.parametrize("place", ["whole", "planner_data", "properties", "storage"])
def test_metadata_that_would_run_code_is_refused_and_not_run(path: Path, tmp_path: Path, place: str) -> None:
    save(path, tensors(), INFO)
    mark = tmp_path / "ran"
    metadata = pickle.loads((path / ".metadata").read_bytes())
    harm = Harm(mark)
    if place == "planner_data":
        metadata.planner_data = harm
    elif place == "properties":
        metadata.state_dict_metadata["even"] = harm
    elif place == "storage":
        next(iter(metadata.storage_data.values())).relative_path = harm
    (path / ".metadata").write_bytes(pickle.dumps(harm if place == "whole" else metadata))
    with pytest.raises(CheckpointError, match=r"(?s)more than tables of pieces.*got: (posix|nt|os)\.system"):
        load(path, tensors())
    assert not mark.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert mark.exists(), "the harm of this test is harmless"


def test_names_reached_through_an_allowed_module_are_refused(path: Path) -> None:
    save(path, tensors(), INFO)
    for name in (b"ctorch\nload\n", b"ctorch.serialization\nos.system\n", b"cbuiltins\neval\n"):
        (path / ".metadata").write_bytes(name + b".")
        with pytest.raises(CheckpointError, match="more than tables of pieces"):
            load(path, tensors())


def test_a_piece_in_a_file_elsewhere_is_refused(path: Path) -> None:
    save(path, tensors(), INFO)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"a piece in the file '\.\./\.\./secret'"):
        load(path, tensors())


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 0xFF
    file.write_bytes(content)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-7])


def edit(field: str, value: object) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        table = json.loads((path / "meshweave.json").read_text())
        (path / "meshweave.json").write_text(json.dumps({**table, field: value}))

    return run


ONE_TWO = torch.tensor([1.0, 2.0]).numpy().tobytes()
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no table": (lambda p: (p / "meshweave.json").unlink(), r"got: meshweave.json: FileNotFoundError"),
    "cut table": (lambda p: cut(p / "meshweave.json"), r"or damaged\n.*\n  got: meshweave.json: "),
    "version": (edit("version", 99), r"unknown format version.*\n.*\n  got: version 99\n  expected: version 2"),
    "fields": (edit("info", 3), "got: meshweave.json: TypeError"),
    "no metadata": (lambda p: (p / ".metadata").unlink(), r"or damaged\n.*\n  got: \.metadata: FileNotFound"),
    "cut metadata": (lambda p: cut(p / ".metadata"), r"got: \.metadata: "),
    "odd metadata": (lambda p: (p / ".metadata").write_bytes(pickle.dumps({"a": 1})), "no tables of pieces"),
    "no data": (lambda p: (p / "__0_0.distcp").unlink(), r"got: __0_0.distcp is missing"),
    "cut data": (lambda p: cut(p / "__0_0.distcp"), r"got: __0_0.distcp has \d+ of \d+ bytes"),
    "a changed byte": (
        lambda p: flip(p / "__0_0.distcp", (p / "__0_0.distcp").read_bytes().find(ONE_TWO)),
        "wrong checksum in __0_0.distcp",
    ),
    "a broken piece": (lambda p: flip(p / "__0_0.distcp", 0), "wrong checksum in __0_0.distcp"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_an_error(path: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    save(path, tensors(), INFO)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load(path, tensors())


def test_a_checkpoint_of_format_1_loads(path: Path) -> None:
    save(path, tensors(), INFO)
    edit("version", 1)(path)
    edit("files", {"__0_0.distcp": (path / "__0_0.distcp").stat().st_size})(path)
    wanted = zeros()
    assert load(path, wanted) == INFO
    check(wanted)


def test_nothing_and_not_a_directory_are_errors(path: Path) -> None:
    save(path, tensors(), INFO)
    with pytest.raises(CheckpointError, match=r"no checkpoint at this path\n.*step-21"):
        load(path.with_name("step-21"), tensors())
    with pytest.raises(CheckpointError, match=r"not a checkpoint of meshweave(.|\n)*NotADirectory"):
        load(path / ".metadata", tensors())


def test_the_checkpoint_of_another_model(path: Path) -> None:
    save(path, tensors(), INFO)
    wanted = zeros()
    wanted["scaler"] = wanted.pop("scalar")
    wanted["even"] = torch.zeros(8, 5)
    wanted["half"] = torch.zeros(12, 3)
    with pytest.raises(CheckpointError) as caught:
        load(path, wanted)
    assert str(caught.value) == (
        "the checkpoint is of another model\n"
        f"  where: {path}\n"
        "  got: 1 missing: scaler; 1 unexpected: scalar; 2 different: even is float32[8,4], not float32[8,5], "
        "half is bfloat16[12,3], not float32[12,3]\n"
        "  expected: the same names, shapes and dtypes as the model's and the optimizer's"
    )
    assert not wanted["uneven"].any()


# Two processes.


def sharded(start: int = 1) -> dict[str, torch.Tensor]:
    """Rows on two processes, also of a tensor of one row and of an odd number; and what every process has."""
    mesh = init_device_mesh("cpu", (2,))
    cut = {name: tensors(start)[name] for name in ("even", "uneven", "flags")} | {"one": whole((1, 3), torch.float32)}
    return {n: distribute_tensor(x, mesh, [Shard(0)]) for n, x in cut.items()} | {"scalar": tensors(start)["scalar"]}


def job_save_and_load(pipe: Connection, folder: str) -> None:
    rank, path = dist.get_rank(), Path(folder) / "ckpt"
    save(path, sharded(), {"step": 1, "rank": rank})
    wanted = {name: torch.zeros_like(x) for name, x in sharded(9).items()}
    assert load(path, wanted) == {"step": 1, "rank": 0}
    for name, x in sharded().items():
        assert torch.equal(*(v.full_tensor() if isinstance(v, DTensor) else v for v in (x, wanted[name]))), name
    if rank == 1:
        FileSystemWriter.write_data = _disk_full
    _expect_failure("No space left", lambda: save(path, sharded(7), {"step": 2}))
    if rank == 1:
        wanted = {**wanted, "extra": wanted["scalar"]}
    _expect_failure("of another model", lambda: load(path, wanted))
    assert load(path, sharded()) == {"step": 1, "rank": 0}


def _disk_full(*_: Any) -> None:
    raise OSError("No space left on device")


def _expect_failure(message: str, work: Callable[[], object]) -> None:
    with pytest.raises(CheckpointError, match=message):
        work()


@pytest.mark.multiprocess
def test_two_processes(start: Callable[..., Job], tmp_path: Path) -> None:
    assert start(f"{__name__}:job_save_and_load", 2, str(tmp_path)).finish(240) == [{}, {}]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == ["ckpt"]
    assert sorted(p.name for p in (tmp_path / "ckpt").glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
