"""Ranks of a job agree or stop: whatever differs between them, or fails on one, is an error on every rank."""

from __future__ import annotations

import copy
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import CONTEXT, Job, free_port
from tests.training import assert_trained_alike, mse, train_eagerly
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

import meshweave as mw
from meshweave.errors import CaptureError, LayoutError, MeshweaveError, PlanError, StepError
from meshweave.runtime.cluster import shutdown
from meshweave.runtime.collectives import bytes_of
from meshweave.runtime.fingerprint import fingerprint
from meshweave.runtime.rows import ALWAYS_FIRST, THEN_EVERY

pytestmark = pytest.mark.multiprocess
SECONDS = 60.0  # on a machine with other work; what hangs, hangs for minutes
ROWS = [{"x": torch.full((4,), float(i)), "y": torch.full((2,), i / 10)} for i in range(16)]


class Small(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def absolute(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out - batch["y"]).abs().mean()


def scaled(factor: float) -> Callable[[Tensor, dict[str, Tensor]], Tensor]:
    return lambda out, batch: factor * mse(out, batch)


def compiled(mesh: str = "dp=2", *, init: int = 0, lr: float = 0.01, width: int = 8, **options: Any) -> mw.TrainStep:
    """A small model, drawn from seed `init`, compiled for 8 rows."""
    torch.manual_seed(init)
    model = Small(width)
    optimizer = options.pop("optimizer", torch.optim.SGD)(model.parameters(), lr=lr)
    example = options.pop("example", {"x": torch.zeros(8, 4), "y": torch.zeros(8, 2)})
    options = {"loss": mse, "mesh": mesh, "profile": "alpha-beta", **options}
    return mw.compile(model, example=example, optimizer=optimizer, **options)


def raised(does: Callable[[], Any], kind: type[Exception] = MeshweaveError) -> str:
    """The message of the error, which comes within seconds."""
    began = time.monotonic()
    with pytest.raises(kind) as error:
        does()
    assert time.monotonic() - began < SECONDS
    return str(error.value)


# What differs, as arguments of `compiled` by rank, and what the error names.
DIFFERENCES: dict[str, tuple[Callable[[int], dict[str, Any]], str]] = {
    "mesh": (lambda rank: {"mesh": ("dp=2", "tp=2")[rank]}, "tp"),
    "plan": (lambda rank: {"plan": ("dp:dp", "fsdp:dp")[rank]}, "state"),
    "model": (lambda rank: {"width": 8 + rank}, "[9, 4]"),
    "loss": (lambda rank: {"loss": (mse, absolute)[rank]}, "absolute"),
    "constant": (lambda rank: {"loss": scaled(1.0 + rank)}, "captured step"),
    "optimizer": (lambda rank: {"lr": 0.01 + rank}, "lr = 1.01"),
    "optimizer class": (lambda rank: {"optimizer": (torch.optim.SGD, torch.optim.AdamW)[rank]}, "AdamW"),
    "options": (lambda rank: {"accumulate": 1 + rank}, "accumulate = 2"),
    "budget": (lambda rank: {"run": mw.RunOptions(passes_seconds=(60.0, float("inf"))[rank])}, "inf"),
    "programs": (lambda rank: {"run": mw.RunOptions(max_programs=8 + rank)}, "max_programs = 9"),
    "shapes": (lambda rank: {"shapes": [{"x": torch.zeros(6, 4), "y": torch.zeros(6, 2)}] * rank}, "shapes[0]"),
    "seed": (lambda rank: {"seed": rank}, "seed = 1"),
    "example batch": (lambda rank: {"example": {"x": torch.zeros(8, 4), "y": torch.zeros(8 - rank, 2)}}, "[7, 2]"),
}


def job_differences(pipe: Connection) -> dict[str, Any]:
    """Every kind of difference is one error on both ranks, and the job goes on after each."""
    rank = dist.get_rank()
    found = {name: raised(lambda of=of: compiled(**of(rank))) for name, (of, _) in DIFFERENCES.items()}
    return found | {"works": bool(compiled()(rows_of(range(8))) > 0)}


def rows_of(rows: Iterable[int]) -> dict[str, Tensor]:
    return {key: torch.stack([ROWS[i][key] for i in rows]) for key in ("x", "y")}


def test_what_differs_between_ranks_is_named_on_every_rank(start: Callable[..., Job]) -> None:
    outcomes = start("tests.runtime.test_together:job_differences", 2).finish(240)
    for outcome in outcomes:
        assert outcome.get("works"), outcome
        for name, (_, shown) in DIFFERENCES.items():
            assert "rank 1" in outcome[name], outcome[name]
            assert shown in outcome[name], outcome[name]
    assert outcomes[0] == outcomes[1]


# Weights and rows.


def job_weights_and_rows(pipe: Connection) -> dict[str, Any]:
    checks = {"weights": check_weights, "local": check_local, "whole": check_whole, "rows": check_rows}
    checks |= {"wrapped": check_wrapped, "numbers": check_numbers_of_rows}
    return {name: check() for name, check in checks.items()} | {"rare": check_rarely()}


def check_weights() -> list[float]:
    """Weights drawn from seed + rank become those of rank 0, or an error where that is asked for."""
    rank = dist.get_rank()
    error = raised(lambda: compiled(init=rank, run=mw.RunOptions(on_different_weights="error")))
    assert "different weights" in error
    assert "rank 1" in error
    assert "'layers.0.weight'" in error
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = compiled(init=rank)
    assert len(caught) == (rank == 0)
    expected = compiled(init=0)  # without a warning, which would be an error
    for name, value in expected.parameters().items():
        assert torch.equal(step.parameters()[name], value)
    return [float(step(rows_of(range(8)))), float(expected(rows_of(range(8))))]


def check_local() -> list[float]:
    """batch="local" with DistributedSampler: every row of each rank counts, as when one process has them all."""
    rank = dist.get_rank()
    sampler: DistributedSampler[Any] = DistributedSampler(ROWS, 2, rank, shuffle=False)
    loader = DataLoader(ROWS, batch_size=4, sampler=sampler)
    step = compiled(batch="local", example=next(iter(loader)))
    losses = [float(step(batch)) for batch in loader]
    torch.manual_seed(0)
    whole = [rows_of([*range(at, at + 8, 2), *range(at + 1, at + 8, 2)]) for at in (0, 8)]
    eager, expected = train_eagerly(Small(8), whole, make=lambda params: torch.optim.SGD(params, lr=0.01))
    assert_trained_alike(step, losses, eager, expected)
    bad = {key: value.clone().fill_(float("nan")) if rank else value for key, value in whole[0].items()}
    own = {key: value.split(4)[rank] for key, value in bad.items()}
    assert "nan" in raised(lambda: step(own), StepError)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(rows_of(range(4)))
    assert len(caught) == (rank == 0)  # "every rank passed the same rows"
    return losses


def check_wrapped() -> list[str]:
    """Models that communicate by themselves, which the error names; the plain model trains."""
    sharded, plain = Small(8), Small(8)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    found, example = [], rows_of(range(8))
    for model in (DistributedDataParallel(plain), nn.Sequential(nn.DataParallel(plain)), sharded):
        found.append(raised(lambda m=model: mw.compile(m, loss=mse, example=example, mesh="dp=2"), CaptureError))
        assert "communicates by itself" in found[-1]
        assert "plain model" in found[-1]
    return found


def summed(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return (out - batch["y"]).square().sum()


def check_whole() -> list[float]:
    """A batch of as many rows as a rank's part of the example is whole, whether it comes first, in an evaluation, or
    after the step was compiled again; with batch="local" it is a rank's own."""
    rank, losses = dist.get_rank(), []
    half = rows_of(range(4))
    for begin in ("step", "evaluate", "forward_only", "frozen"):
        step = compiled(loss=summed)
        if begin == "frozen":
            assert step(rows_of(range(8))) > 0
            next(step.model.parameters()).requires_grad_(False)
        elif begin != "step":
            getattr(step, begin)(half)
        with torch.no_grad():
            expected = summed(copy.deepcopy(step.model)(half["x"]), half)
        losses.append(float(step(half)))
        assert losses[-1] == pytest.approx(float(expected))
        assert step(rows_of(range(8))) > 0
    step = compiled(batch="local", example=rows_of(range(4)))
    assert step(rows_of(range(8 * rank, 8 * rank + 8))) > 0  # as many as the example has on all ranks
    return losses


def check_rows() -> list[str]:
    """What ranks hand in and must not; the step goes on after each."""
    rank = dist.get_rank()
    own = rows_of(range(8 * rank, 8 * rank + 8))
    found = []
    for mesh in ("dp=2", "tp=2"):
        step = compiled(mesh)
        found.append(raised(lambda step=step: step(own), StepError))
        assert step(rows_of(range(8))) > 0
    step = compiled()
    found.append(raised(lambda: step(rows_of(range(4 * rank, 4 * rank + 4))), StepError))
    step = compiled(batch="local", example=rows_of(range(4)))
    found.append(raised(lambda: step(rows_of(range(4 + rank, 8))), LayoutError))
    wide = {key: value.repeat(1, 1 + rank) for key, value in rows_of(range(4)).items()}
    found.append(raised(lambda: step(wide), LayoutError))
    double = {key: value.double() for key, value in rows_of(range(4 * rank, 4 * rank + 4)).items()}
    found.append(raised(lambda: step(double), LayoutError))
    assert step.optimizer is not None
    step.optimizer.param_groups[0]["lr"] = 0.01 * (rank + 1)
    found.append(raised(lambda: step(rows_of(range(4 * rank, 4 * rank + 4))), StepError))
    return found


class Messages(nn.Module):
    """Sends rows along edges, each a pair of numbers of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.linear(x).index_select(0, edges[:, 0])


def check_numbers_of_rows() -> list[str]:
    """Entries that number rows, where each rank numbers its own: as many as rows, or as many as they are."""
    rank = dist.get_rank()
    found = []
    for num_edges in (4, 3):
        example = rows_of(range(4)) | {"edges": torch.zeros(num_edges, 2, dtype=torch.int64)}
        model = Messages()
        loss = lambda out, batch: out.square().mean()  # noqa: E731
        options = {"loss": loss, "example": example, "mesh": "dp=2", "profile": "alpha-beta", "batch": "local"}
        found.append(raised(lambda m=model, options=options: mw.compile(m, **options), PlanError))
    step = compiled(batch="local", example=rows_of(range(4)) | {"scale": torch.ones(3)}, loss=scaled_by_entry)
    batch = rows_of(range(4 * rank, 4 * rank + 4)) | {"scale": torch.full((3,), float(rank))}
    found.append(raised(lambda: step(batch), StepError))
    return found


def scaled_by_entry(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return mse(out, batch) * batch["scale"].mean()


def check_rarely() -> list[int]:
    """In which calls different rows are noticed: the first ones, and some of those after."""
    rank, noticed = dist.get_rank(), []
    step = compiled("tp=2")
    for call in range(2 * THEN_EVERY + 1):
        try:
            step(rows_of(range(8 * rank, 8 * rank + 8)))
        except StepError:
            noticed.append(call)
    return noticed


def test_weights_and_rows_agree_or_stop(start: Callable[..., Job]) -> None:
    outcomes = start("tests.runtime.test_together:job_weights_and_rows", 2).finish(240)
    assert "rows" in outcomes[0], outcomes
    assert outcomes[0] == outcomes[1]
    first, second = outcomes[0]["weights"]
    assert first == second
    half, tp, own_half, smaller, longer, neither, settings = outcomes[0]["rows"]
    assert "of whose 8 rows each would use 4" in half
    assert "batch='local'" in half
    assert "batch='local'" in own_half
    assert "of whose 4 rows each would use 2" in own_half
    assert "other values" in tp
    assert "batch='local'" not in tp
    assert "float32[3, 4] on rank 1, float32[4, 4] on rank 0" in smaller
    assert "drop_last=True" in smaller
    assert "float32[4, 8] on rank 1, float32[4, 4] on rank 0" in longer
    assert "pad rows" in longer
    assert "float64[4, 4]" in neither
    assert "(or [4, 4]: this rank's own rows)" in neither
    assert "settings of the optimizer" in settings
    as_many, fewer, without_rows = outcomes[0]["numbers"]
    assert "rows of the batch are chosen by numbers" in as_many
    assert "by 'edges', with batch='local' on 2 ranks" in as_many
    assert "by 'edges', with batch='local' on 2 ranks" in fewer
    assert "entry 'scale', rank 1" in without_rows
    assert "of shape [3]" in without_rows
    assert outcomes[0]["rare"] == [*range(ALWAYS_FIRST), THEN_EVERY, 2 * THEN_EVERY]


# Failures on one rank, and jobs that nobody has joined.


class Disk(Exception):
    pass


def job_failure(pipe: Connection, stage: str) -> dict[str, Any]:
    """Rank 1 alone fails in a stage of a compile."""
    os.environ["MESHWEAVE_CACHE"] = tempfile.mkdtemp()  # a program of another test would be loaded, not expanded

    def fail(now: str) -> None:
        if now == stage and dist.get_rank() == 1:
            raise Disk(f"full at {stage}")

    return {"text": raised(lambda: compiled(run=mw.RunOptions(progress=fail)), Disk if dist.get_rank() else StepError)}


@pytest.mark.parametrize("stage", ["capture", "start"])
def test_a_failure_of_one_rank_in_compile_stops_all(start: Callable[..., Job], stage: str) -> None:
    first, second = start("tests.runtime.test_together:job_failure", 2, stage).finish(240)
    assert second == {"text": f"full at {stage}"}
    assert f"rank 1 failed\n  where: seen by rank 0\n  got: Disk: full at {stage}" in first["text"]


def main_of_script(pipe: Connection, rank: int, num_ranks: int, port: int) -> None:
    """What torchrun starts: no line of it initialises torch.distributed."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
    os.environ.update({k: str(v) for k, v in variables.items()}, MASTER_ADDR="127.0.0.1")
    try:
        errors = [raised(lambda mesh=mesh: compiled(mesh), mw.MeshError) for mesh in ("dp=4", "dp=1")]
        assert [mw.batch_shard(mesh) for mesh in ("dp=2", "tp=2")] == [(2, rank), (1, 0)]
        step = compiled(init=0, batch="local", example=rows_of(range(4)))
        outcome = {"errors": errors, "loss": float(step(rows_of(range(4 * rank, 4 * rank + 4))))}
        outcome["weights"] = float(sum(p.sum() for p in step.parameters().values()))
    except BaseException as error:
        outcome = {"error": type(error).__name__, "text": str(error)}
    pipe.send(outcome)
    shutdown()


def test_a_job_is_joined_and_fits_its_mesh() -> None:
    port, job = free_port(), Job([], [])
    for rank in range(2):
        ours, theirs = CONTEXT.Pipe()
        job.processes.append(CONTEXT.Process(target=main_of_script, args=(theirs, rank, 2, port)))
        job.pipes.append(ours)
        job.processes[-1].start()
        theirs.close()
    first, second = job.finish(240)
    assert "errors" in first, first
    assert "got: 4 devices: 0, 1, 2, 3\n  expected: each of the ranks 0 to 1 once" in first["errors"][0]
    assert "got: 1 devices: 0\n" in first["errors"][1]
    assert first == second


# What tensors are told apart by.


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
def test_fingerprints_tell_values_apart(dtype: torch.dtype) -> None:
    made = torch.Generator().manual_seed(0)
    for shape in ((), (1,), (3, 5), (70_001,), (4, 40_000)):
        value = torch.randint(0, 2, shape, generator=made).to(dtype)
        numbers = {int(fingerprint(value)), int(fingerprint(value.clone()))}
        assert len(numbers) == 1
        for at in {0, value.numel() // 2, value.numel() - 1}:
            other = value.clone()
            other.view(-1)[at] = 1 - int(other.view(-1)[at])
            numbers.add(int(fingerprint(other)))
        assert len(numbers) == 1 + len({0, value.numel() // 2, value.numel() - 1})
    rows = torch.arange(6_000_000).reshape(600, 10_000)
    assert int(fingerprint(rows)) != int(fingerprint(rows.flip(0)))
    assert int(fingerprint(rows, 1 << 16)) != int(fingerprint(rows.flip(0), 1 << 16))
    assert int(fingerprint(rows[1:], 1 << 16)) == int(fingerprint(rows[1:].clone(), 1 << 16))


def test_single_elements_of_any_stride_have_bytes() -> None:
    single = torch.tensor(3.0).expand(1)  # such as the gradient of a bias of one output
    assert single.stride() == (0,)
    assert bytes_of(single).tolist() == bytes_of(torch.tensor([3.0])).tolist()
    assert int(fingerprint(single)) == int(fingerprint(torch.tensor([3.0])))
