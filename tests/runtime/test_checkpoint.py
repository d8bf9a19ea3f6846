"""Checkpoints: round trips over meshes, replacement, damage and files that mean harm."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.processes import Job
from torch.distributed._checkpointable import _Checkpointable
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from meshweave.errors import CheckpointError
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.pieces import Box
from meshweave.runtime.checkpoint import ShardedTensorView, load, save

LINE = Mesh("x=4")
SQUARE = Mesh("a=2,b=2")
INFO: dict[str, int | str] = {"step": 12, "seed": 2**40, "model": "llama-deadbeef"}

# name -> shape, dtype, layout on LINE, layout on SQUARE: even, uneven, in units, empty pieces, partial order, 0-dim.
TENSORS: dict[str, tuple[tuple[int, ...], torch.dtype, str, str]] = {
    "even": ((8, 4), torch.float32, "[{x}, {}]", "[{a}, {b}]"),
    "uneven": ((7, 5), torch.float64, "[{}, {x}]", "[{b}, {a}]"),
    "units": ((12, 3), torch.bfloat16, "[{x}x4, {}]", "[{b,a}x2, {}]"),
    "few": ((2, 3), torch.int64, "[{x}, {}]", "[{a,b}, {}]"),
    "copies": ((3, 3), torch.float32, "[{}, {}]", "[{}, {b}]"),
    "scalar": ((), torch.float32, "[]", "[]"),
    "none": ((0, 4), torch.float32, "[{}, {x}]", "[{a}, {b}]"),
    "flags": ((9,), torch.bool, "[{x}]", "[{b}]"),
}


def whole(shape: tuple[int, ...], dtype: torch.dtype, start: int = 1) -> torch.Tensor:
    """A different value in every element (as far as the dtype goes), so that a swapped piece shows."""
    return torch.arange(start, start + Box(shape, shape).num_elements).reshape(shape).to(dtype)


def view(full: torch.Tensor, layout: Layout, filled: bool = True) -> ShardedTensorView:
    """All devices of a mesh in this one process."""
    boxes = layout.pieces(tuple(full.shape)).values()
    make = (lambda t: t.clone()) if filled else torch.zeros_like
    return ShardedTensorView(tuple(full.shape), full.dtype, tuple((box, make(full[box.slices()])) for box in boxes))


def views(mesh: Mesh, filled: bool = True, start: int = 1) -> dict[str, ShardedTensorView]:
    at = 2 if mesh is LINE else 3
    return {
        name: view(whole(row[0], row[1], start), Layout.parse(row[at], mesh), filled) for name, row in TENSORS.items()
    }


def check(loaded: Mapping[str, ShardedTensorView], start: int = 1) -> None:
    assert loaded.keys() == TENSORS.keys()
    for name, got in loaded.items():
        full = whole(*TENSORS[name][:2], start)
        assert len(got.pieces) == 4
        for box, tensor in got.pieces:
            assert torch.equal(tensor, full[box.slices()]), (name, box)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "step-12"


def beside(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir())


def test_views_are_checkpointable() -> None:
    assert isinstance(views(LINE)["even"], _Checkpointable)


@pytest.mark.parametrize(("source", "target"), [(LINE, SQUARE), (SQUARE, LINE), (LINE, LINE)], ids=str)
def test_round_trip_onto_another_mesh(path: Path, source: Mesh, target: Mesh) -> None:
    save(path, views(source), INFO)
    assert beside(path) == ["step-12"]
    assert sorted(p.name for p in path.iterdir()) == [".metadata", "__0_0.distcp", "meshweave.json"]
    wanted = views(target, filled=False)
    assert load(path, wanted) == INFO
    check(wanted)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shape=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    cuts=st.tuples(*[st.sampled_from(["{}", "{a}", "{b}", "{a,b}", "{b,a}x2", "{c}", "{c,a}x3"])] * 4),
)
def test_any_layout_onto_any_other(tmp_path: Path, shape: tuple[int, int], cuts: tuple[str, ...]) -> None:
    mesh = Mesh("a=2,b=2,c=3")

    def layout(first: str, second: str) -> Layout:
        clash = set(re.findall("[abc]", first)) & set(re.findall("[abc]", second))
        return Layout.parse(f"[{first}, {'{}' if clash else second}]", mesh)

    full = whole(shape, torch.float32)
    save(tmp_path / "c", {"w": view(full, layout(*cuts[:2]))}, {})
    wanted = view(full, layout(*cuts[2:]), filled=False)
    load(tmp_path / "c", {"w": wanted})
    assert len(wanted.pieces) == 12
    assert all(torch.equal(tensor, full[box.slices()]) for box, tensor in wanted.pieces)


def test_every_element_is_written_once(path: Path) -> None:
    save(path, views(SQUARE), INFO)
    metadata = FileSystemReader(path).read_metadata()
    for name, (shape, *_) in TENSORS.items():
        sizes = [tuple(chunk.sizes) for chunk in metadata.state_dict_metadata[name].chunks]
        assert sum(Box(size, size).num_elements for size in sizes) == Box(shape, shape).num_elements
    assert len(metadata.storage_data) == 4 + 4 + 4 + 2 + 2 + 1 + 1 + 2


def test_plain_dcp_reads_it_too(path: Path) -> None:
    save(path, {"w": view(whole((7, 5), torch.float32), Layout.parse("[{x}, {}]", LINE))}, INFO)
    state = {"w": torch.zeros(7, 5)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=path)
    assert torch.equal(state["w"], whole((7, 5), torch.float32))


def test_a_wanted_box_is_told_from_another_that_begins_where_it_does(path: Path) -> None:
    full = whole((4, 4), torch.float32)
    save(path, {"w": view(full, Layout.parse("[{x}, {}]", LINE))}, {})
    boxes = (Box((0, 0), (2, 2)), Box((0, 0), (4, 4)), Box((0, 0), (1, 4)))
    wanted = ShardedTensorView((4, 4), torch.float32, tuple((box, torch.zeros(box.size)) for box in boxes))
    load(path, {"w": wanted})
    assert all(torch.equal(tensor, full[box.slices()]) for box, tensor in wanted.pieces)


def test_a_process_may_want_nothing_of_a_tensor(path: Path) -> None:
    save(path, views(LINE), INFO)
    assert load(path, {name: replace(v, pieces=()) for name, v in views(LINE).items()}) == INFO


def test_an_existing_checkpoint_is_replaced(path: Path) -> None:
    save(path, views(LINE, start=1), {"step": 1})
    save(path, views(SQUARE, start=500), {"step": 2})
    wanted = views(LINE, filled=False)
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
        save(path, views(LINE), {"step": 1})

    def fail(*_: Any, **__: Any) -> None:
        raise kind(message)

    with monkeypatch.context() as patch:
        if where == "rename":
            rename = Path.rename
            patch.setattr(Path, "rename", lambda p, to: fail() if ".tmp-" in p.name else rename(p, to))
        else:
            patch.setattr(FileSystemWriter, {"write": "write_data", "finish": "finish"}[where], fail)
        with pytest.raises(CheckpointError if kind is OSError else kind, match=message):
            save(path, views(LINE, start=9), {"step": 2})
    assert beside(path) == (["step-12"] if existing else [])
    if existing:
        wanted = views(SQUARE, filled=False)
        assert load(path, wanted) == {"step": 1}
        check(wanted)


def test_a_save_killed_between_its_renames_leaves_the_old_one_loadable(path: Path) -> None:
    save(path, views(LINE), {"step": 1})
    path.rename(path.with_name("step-12.old-0123abcd"))
    path.with_name("step-12.tmp-0123abcd").mkdir()
    wanted = views(SQUARE, filled=False)
    assert load(path, wanted) == {"step": 1}
    check(wanted)
    save(path, views(LINE, start=5), {"step": 2})
    assert load(path, wanted) == {"step": 2}
    assert beside(path) == ["step-12"]


def test_an_unfinished_save_is_never_loaded(path: Path) -> None:
    save(path, views(LINE), {"step": 1})
    path.rename(path.with_name("step-12.tmp-0123abcd"))
    with pytest.raises(CheckpointError, match="there is no checkpoint at this path"):
        load(path, views(LINE))


def test_a_directory_of_other_things_is_not_replaced(path: Path) -> None:
    save(path, views(LINE), {"step": 1})
    (path / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match=r"will not be replaced\n.*\n  got: notes.txt"):
        save(path, views(LINE), {"step": 2})
    assert (path / "notes.txt").read_text() == "keep me"
    assert load(path, views(LINE, filled=False)) == {"step": 1}


def test_gaps_and_overlaps_are_refused(path: Path) -> None:
    full = whole((8, 4), torch.float32)
    good = view(full, Layout.parse("[{x}, {}]", LINE))
    with pytest.raises(CheckpointError, match=r"not complete\n.*\n  got: pieces of 'w' with 24 of 32 elements"):
        save(path, {"w": replace(good, pieces=good.pieces[1:])}, {})
    overlap = (Box((1, 0), (2, 4)), torch.ones(2, 4))
    with pytest.raises(CheckpointError, match="Failed to validate global plan"):
        save(path, {"w": replace(good, pieces=(*good.pieces, overlap))}, {})
    assert beside(path) == []


class Harm:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (f"touch {self.mark}",)

    def __init__(self, mark: Path) -> None:
        self.mark = mark


@pytest.mark.parametrize("place", ["whole", "planner_data", "properties", "storage"])
def test_metadata_that_would_run_code_is_refused_and_not_run(path: Path, tmp_path: Path, place: str) -> None:
    save(path, views(LINE), INFO)
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
        load(path, views(LINE))
    assert not mark.exists()
    pickle.loads((path / ".metadata").read_bytes())
    assert mark.exists(), "the harm of this test is harmless"


def test_names_reached_through_an_allowed_module_are_refused(path: Path) -> None:
    save(path, views(LINE), INFO)
    for name in (b"ctorch\nload\n", b"ctorch.serialization\nos.system\n", b"cbuiltins\neval\n"):
        (path / ".metadata").write_bytes(name + b".")
        with pytest.raises(CheckpointError, match="more than tables of pieces"):
            load(path, views(LINE))


def test_a_piece_in_a_file_elsewhere_is_refused(path: Path) -> None:
    save(path, views(LINE), INFO)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    next(iter(metadata.storage_data.values())).relative_path = "../../secret"
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"a piece in the file '\.\./\.\./secret'"):
        load(path, views(LINE))


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
    "no table": (lambda p: (p / "meshweave.json").unlink(), r"not a meshweave checkpoint\n.*\n  got: no meshw"),
    "cut table": (lambda p: cut(p / "meshweave.json"), r"is damaged\n.*\n  got: meshweave.json: "),
    "foreign table": (edit("format", "x"), "not a meshweave checkpoint"),
    "version": (edit("version", 99), r"unknown format version.*\n.*\n  got: version 99\n  expected: version 2"),
    "fields": (edit("info", 3), "has no valid info"),
    "no metadata": (lambda p: (p / ".metadata").unlink(), r"is damaged\n.*\n  got: \.metadata: FileNotFound"),
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
    save(path, views(LINE), INFO)
    damage(path)
    with pytest.raises(CheckpointError, match=message):
        load(path, views(SQUARE))


def test_a_checkpoint_of_format_1_loads(path: Path) -> None:
    save(path, views(LINE), INFO)
    edit("version", 1)(path)
    edit("files", {"__0_0.distcp": (path / "__0_0.distcp").stat().st_size})(path)
    wanted = views(SQUARE, filled=False)
    assert load(path, wanted) == INFO
    check(wanted)


def test_nothing_and_not_a_directory_are_errors(path: Path) -> None:
    save(path, views(LINE), INFO)
    with pytest.raises(CheckpointError, match=r"no checkpoint at this path\n.*step-21\n  expected: step-12"):
        load(path.with_name("step-21"), views(LINE))
    with pytest.raises(CheckpointError, match=r"not a meshweave checkpoint\n.*\n  got: a file"):
        load(path / ".metadata", views(LINE))


def test_the_checkpoint_of_another_model(path: Path) -> None:
    save(path, views(LINE), INFO)
    wanted = views(LINE, filled=False)
    wanted["scaler"] = wanted.pop("scalar")
    wanted["even"] = view(torch.zeros(8, 5), Layout.parse("[{x}, {}]", LINE))
    wanted["copies"] = view(torch.zeros(3, 3, dtype=torch.bfloat16), Layout.parse("[{}, {}]", LINE))
    with pytest.raises(CheckpointError) as caught:
        load(path, wanted)
    assert str(caught.value) == (
        "the checkpoint is of another model\n"
        f"  where: {path}\n"
        "  got: 1 missing: scaler; 1 unexpected: scalar; 2 different: even is float32[8,4], not float32[8,5], "
        "copies is float32[3,3], not bfloat16[3,3]\n"
        "  expected: the same names, shapes and dtypes as the model's\n"
        "  hint: 'scaler' may be the checkpoint's 'scalar'"
    )
    assert not any(tensor.any() for _, tensor in wanted["uneven"].pieces)


def test_long_lists_of_names_are_cut_short(path: Path) -> None:
    save(path, views(LINE), INFO)
    with pytest.raises(CheckpointError, match=r"8 unexpected: even, uneven, units, \.\.\.\n"):
        load(path, {})


# Two processes.


def local(views_of_all: Mapping[str, ShardedTensorView], rank: int, num: int) -> dict[str, ShardedTensorView]:
    """What process `rank` of `num` holds when it stands for every num-th device."""
    return {name: replace(v, pieces=v.pieces[rank::num]) for name, v in views_of_all.items()}


def job_save_and_load(pipe: Connection, folder: str) -> None:
    rank, num, path = dist.get_rank(), dist.get_world_size(), Path(folder) / "ckpt"
    save(path, local(views(LINE), rank, num), {"step": 1, "rank": rank})
    wanted = local(views(SQUARE, filled=False), rank, num)
    assert load(path, wanted) == {"step": 1, "rank": 0}
    for name, got in wanted.items():
        for box, tensor in got.pieces:
            assert torch.equal(tensor, whole(*TENSORS[name][:2])[box.slices()]), (name, box)
    if rank == 1:
        FileSystemWriter.write_data = _disk_full
    _expect_failure("No space left", lambda: save(path, local(views(LINE, start=7), rank, num), {"step": 2}))
    if rank == 1:
        wanted = {**wanted, "extra": wanted["scalar"]}
    _expect_failure("of another model", lambda: load(path, wanted))
    assert load(path, local(views(SQUARE), rank, num)) == {"step": 1, "rank": 0}


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
    metadata = FileSystemReader(tmp_path / "ckpt").read_metadata()
    assert len(metadata.storage_data) == 4 + 3 + 3 + 2 + 1 + 1 + 1 + 3
