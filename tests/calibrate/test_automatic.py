"""Costs without being asked for: which they are, what is kept of them, and where that is not to be used."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.calibrate.test_calibrate import TINY
from tests.processes import Job
from torch import nn

import meshweave as mw
from meshweave.calibrate import automatic, calibrate, costs_for
from meshweave.cost.hardware import AlphaBeta, load_profile, profile_of_device
from meshweave.cost.hardware.load import _DATA
from meshweave.disk_cache import CacheEntry
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import COLLECTIVES
from meshweave.runtime.cluster import ClusterWorld, shutdown
from meshweave.runtime.world import LocalWorld

SHORT = replace(TINY, matmul_sizes=(16,), attention=((1, 2, 16, 16),), memory=(1 << 10,))
TEXT = (_DATA / "cpu-gloo.toml").read_text(encoding="utf-8")


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> None:
        raise AssertionError("nothing is to be measured")

    monkeypatch.setattr(automatic, "calibrate", refused)


# Which costs


@pytest.mark.usefixtures("no_measuring")
def test_virtual_devices_are_not_measured() -> None:
    world = LocalWorld(mw.Mesh("dp=2"))
    for asked in (None, "auto", "alpha-beta"):
        assert costs_for(asked, world).costs == AlphaBeta()
    assert "no links" in costs_for(None, world).origin
    step = mw.compile(nn.Linear(2, 2), loss=lambda out, _: out.sum(), example=(torch.ones(4, 2),), mesh="dp=2")
    assert "no links" in step.program.costs_from


def test_costs_that_are_named_are_taken(tmp_path: Path) -> None:
    world, own = LocalWorld(mw.Mesh("dp=2")), AlphaBeta(1e-3)
    assert costs_for(own, world).costs is own
    assert costs_for("h100", world) == automatic.ChosenCosts(load_profile("h100"), "profile h100, as asked")
    (tmp_path / "machine.toml").write_text(TEXT)
    assert costs_for(str(tmp_path / "machine.toml"), world).costs == load_profile("cpu-gloo")
    with pytest.raises(MeshweaveError, match="unknown machine profile 'h1000'"):
        costs_for("h1000", world)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),  # other links, other memory
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_devices_are_known_by_name(device: str, expected: str | None) -> None:
    assert profile_of_device(device) == expected


def test_an_entry_of_another_format_is_not_used(tmp_path: Path) -> None:
    entry = CacheEntry(tmp_path, "key")
    entry.write(TEXT.replace("launch_s", "launching_s").encode())
    assert "not a profile of this version ('launching_s' is unknown)" in automatic._cached_profile(entry, None, 2)[1]


# Jobs


def job_measures(pipe: Connection, directory: str) -> dict[str, Any]:
    """Compile without a profile: measured, kept, damaged, on another link, under load, and not to be measured."""
    torch.set_default_dtype(torch.float64)  # which scripts set, and what is measured is float32 all the same
    os.environ["MESHWEAVE_CACHE"] = directory
    automatic.BRIEF, automatic._MOST_DRIFT = SHORT, 1e3  # type: ignore[misc]
    automatic._LEAST_DRIFTS.update(gather=1e-3, matmul=1e-3)
    is_first = dist.get_rank() == 0
    stages: list[str] = []

    def compiled(profile: str | None = "auto") -> mw.TrainStep:
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        return mw.compile(
            model,
            loss=lambda out, _: out.sum(),
            example=(torch.ones(4, 4),),
            mesh="dp=2",
            profile=profile,
            run=mw.RunOptions(progress=stages.append),
        )

    first = compiled(None).program
    assert first.costs_from == "profile cpu-gloo: parameters and batch have less than 1 MiB (profile='auto' measures)"
    (role,) = first.roles  # the gradients of weight and bias and the loss together
    assert sum(node.target in COLLECTIVES for node in role.graph.nodes) < 3
    assert not [stage for stage in stages if stage.startswith("calibrate")]
    origins = [compiled().program.costs_from]
    heard = [stage for stage in stages if stage.startswith("calibrate")]
    stages.clear()
    origins.append(compiled().program.costs_from)
    again = [stage for stage in stages if stage.startswith("calibrate")]
    if is_first:
        (path,) = Path(directory, "profiles").glob("*.toml")
        path.write_text(path.read_text()[:-40])
    dist.barrier()
    origins.append(compiled().program.costs_from)
    if is_first:
        (path,) = Path(directory, "profiles").glob("*.toml")
        _, key, text = path.read_text().split("\n", 2)
        slow = re.sub(r"\[(\d+), ([0-9.e-]+)\]", lambda m: f"[{m[1]}, {float(m[2]) + 1e6}]", text)
        entry = CacheEntry(path.parent, json.loads(key[2:]))
        assert entry.path == path
        assert entry.write(slow.encode()) == ""
    dist.barrier()
    origins.append(compiled().program.costs_from)
    drifts = automatic._drifts
    automatic._drifts = lambda *known: {"gather": 1.0, "matmul": 1e-4}
    origins.append(compiled().program.costs_from)
    automatic._drifts = drifts
    # as on GPUs whose compute is known
    automatic.profile_of_device = lambda name: "h200"  # type: ignore[assignment]
    automatic.LINKS_GPU = replace(SHORT, ops=None)  # type: ignore[misc]
    stages.clear()
    links = [compiled(None).program.costs_from, compiled().program.costs_from, compiled().program.costs_from]
    heard_links = [stage for stage in stages if stage.startswith("calibrate")]
    for path in Path(directory, "profiles").glob("*.toml"):
        path.unlink(missing_ok=True)
    dist.barrier()
    world = ClusterWorld(mw.Mesh("dp=2"))

    def impossible(*arguments: Any) -> None:
        raise MeshweaveError("no clock" if is_first else "no memory")

    automatic.calibrate = impossible  # type: ignore[assignment]
    chosen = costs_for(None, world)
    shutdown(world)
    return {
        "origins": [*origins, chosen.origin],
        "heard": heard,
        "again": again,
        "costs": str(chosen.costs),
        "links": links,
        "heard_links": heard_links,
    }


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_job_measures_once_and_again_where_what_is_kept_is_not_to_be_used(
    start: Callable[..., Job],
    tmp_path: Path,
) -> None:
    first, second = start("tests.calibrate.test_automatic:job_measures", 2, str(tmp_path)).finish(240)
    assert "error" not in first, first
    assert first["heard"] == [
        "calibrate",
        "calibrate: ops",
        "calibrate: links",
        "calibrate: compute beside communication",
    ]
    assert first["again"] == []
    measured, kept, damaged, changed, loaded, impossible = first["origins"]
    assert re.match(r"measured on this machine in \d+ s, cached in ", measured)
    assert re.match(r"measured on this machine: \d+-.*, cached in ", kept)
    assert re.match(r"measured on this machine in \d+ s \(.* is damaged\), cached in ", damaged)
    assert re.match(r"measured on this machine in \d+ s \(a gather takes .* times as long as .* says\)", changed)
    assert re.match(r"measured on this machine in \d+ s \(a matmul takes 0.0001 times as long as .* says\)", loaded)
    assert impossible == "profile h200: its links could not be measured (MeshweaveError: no clock)"
    assert first["costs"] == str(load_profile("h200"))
    assert first["heard_links"] == ["calibrate", "calibrate: links"]
    small, timed, cached = first["links"]
    assert small == "profile h200: parameters and batch have less than 1 MiB (profile='auto' measures)"
    known = r"profile h200 by the name of the devices; its links as measured: all_gather in a node, .* \(\d+-.*\)"
    assert re.match(known + r" in \d+ s, cached in ", timed)
    assert re.match(known + ", cached in ", cached)
    assert [o.partition(" s")[2] for o in second["origins"]] == [o.partition(" s")[2] for o in first["origins"]]


def job_profile_of_a_file(pipe: Connection, path: str) -> dict[str, Any]:
    """A profile of a file whose links are 10,000 times as slow, and then the same file measured again."""
    world, notes = ClusterWorld(mw.Mesh("dp=2")), list[str]()
    automatic._NOTES = SimpleNamespace(warning=lambda text, *parts: notes.append(text % parts))  # type: ignore[assignment]
    origins = [costs_for(path, world).origin]
    automatic._MOST_DRIFT = 1e3  # type: ignore[misc]  # on a machine with other work
    automatic._LEAST_DRIFTS.update(gather=1e-3)
    text = calibrate(SHORT, "machine", "meshweave calibrate", world.device, lambda stage: None)
    if dist.get_rank() == 0:
        Path(path).write_text(text)
    dist.barrier()
    origins.append(costs_for(path, world).origin)
    return {"origins": origins, "notes": notes}


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_link_far_from_the_profile_of_a_file_is_a_warning_with_what_to_do(
    start: Callable[..., Job], tmp_path: Path
) -> None:
    path = tmp_path / "machine.toml"
    slow = re.sub(r"\[(\d+), ([0-9.e-]+)\]", lambda m: f"[{m[1]}, {float(m[2]) * 1e4}]", TEXT)
    path.write_text(slow)
    first, second = start(f"{__name__}:job_profile_of_a_file", 2, str(path)).finish(240)
    (note,) = first["notes"]
    assert re.match(r"a gather takes \S+ times as long as \S+/machine.toml says: measure again", note)
    assert note.endswith(f"torchrun ... -m meshweave calibrate -o {path}")
    assert second["notes"] == []
    assert "a gather takes" in first["origins"][0]
    assert first["origins"][1] == "profile machine, as asked"
