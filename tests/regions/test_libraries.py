"""The library of matmuls: which operands oneDNN gets, its choice by measurement, and training with it."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx, nn
from torch._inductor.utils import run_and_get_code
from torch.fx.experimental.proxy_tensor import make_fx

import meshweave as mw
from meshweave.disk_cache import CacheEntry, machine_of
from meshweave.errors import StepError
from meshweave.interop import onednn
from meshweave.ir.values import Value
from meshweave.runtime.executor import perform
from meshweave.runtime.regions import libraries
from meshweave.runtime.regions.compiler import RegionCompiler
from meshweave.runtime.regions.libraries import ATEN, MM, ONEDNN, ONEDNN_MM, Libraries, choose_in, faster_library

CPU = torch.device("cpu")
needs_onednn = pytest.mark.skipif(not onednn.is_exact(), reason="torch was built without oneDNN")


def matrix(rows: int, columns: int, layout: str = "rows", dtype: torch.dtype = torch.float32) -> Tensor:
    torch.manual_seed(rows + columns)
    if layout == "rows":
        return torch.randn(rows, columns, dtype=dtype)
    if layout == "columns":
        return torch.randn(columns, rows, dtype=dtype).t()
    return torch.randn(rows, columns + 3, dtype=dtype)[:, :columns]  # rows apart


FACTORS = [
    # of the left and right factor: sizes, layouts; whether oneDNN multiplies them
    ((256, 200, 300), ("rows", "columns"), True),
    ((256, 200, 300), ("rows", "rows"), True),
    ((256, 200, 300), ("columns", "rows"), True),
    ((256, 200, 300), ("apart", "columns"), True),
    ((256, 200, 300), ("rows", "apart"), False),
    ((4096, 64, 64), ("rows", "columns"), True),
    ((4096, 64, 64), ("columns", "rows"), False),  # its copy takes longer than the product
    ((8, 2048, 2048), ("rows", "columns"), False),  # vectors
    ((64, 64, 64), ("rows", "columns"), False),  # small
]


@needs_onednn
@pytest.mark.parametrize(("sizes", "layouts", "is_onednn"), FACTORS)
def test_onednn_gets_what_it_multiplies_faster(
    sizes: tuple[int, int, int], layouts: tuple[str, str], is_onednn: bool
) -> None:
    m, n, k = sizes
    a, b = matrix(m, k, layouts[0]), matrix(k, n, layouts[1])
    graph = fx.Graph()
    left, right = graph.placeholder("a"), graph.placeholder("b")
    node = graph.call_function(MM, (left, right))
    values: Any = {
        node_: (Value(tuple(x.shape), x.stride(), x.dtype, i, x.nbytes),)
        for i, (node_, x) in enumerate(((left, a), (right, b)))
    }
    expected = ONEDNN_MM if is_onednn else MM
    assert Libraries(True).kernel(node, values) is expected
    assert Libraries(True).product(a, b) is expected
    assert Libraries().kernel(node, values) is MM
    if is_onednn:
        product, exact = ONEDNN_MM(a, b), a.double() @ b.double()
        assert product.is_contiguous()
        assert float((product - exact).abs().max()) <= 1e-4 * float(exact.abs().max())
    torch.library.opcheck(ONEDNN_MM, (a, b), test_utils=("test_schema", "test_faketensor"))


@needs_onednn
def test_other_dtypes_and_ops_stay_with_aten() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert Libraries(True).product(matrix(512, 512, dtype=dtype), matrix(512, 512, dtype=dtype)) is MM


@needs_onednn
def test_the_faster_library_is_measured_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWEAVE_CACHE", str(tmp_path))
    gains = iter([2.0, 1.1])
    monkeypatch.setattr(libraries, "_gain", lambda: next(gains))
    assert [faster_library(CPU) for _ in range(3)] == [ONEDNN] * 3
    key = {"format": libraries.FORMAT, "torch": torch.__version__, **machine_of(CPU)}
    entry = CacheEntry(tmp_path / "libraries", json.dumps(key), ".txt")
    entry.path.write_text("damaged")
    assert [faster_library(CPU) for _ in range(2)] == [ATEN] * 2  # 1.1 times as fast is not worth other rounding
    assert next(gains, None) is None


@needs_onednn
def test_processes_that_ask_together_get_one_answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two libraries that are about as fast: each measurement has another outcome."""
    monkeypatch.setenv("MESHWEAVE_CACHE", str(tmp_path))
    gains = iter((2.0, 0.5, 2.0, 0.5))

    def measured() -> float:
        gain = next(gains)
        time.sleep(0.2)
        return gain

    monkeypatch.setattr(libraries, "_gain", measured)
    with ThreadPoolExecutor(2) as pool:
        names = list(pool.map(lambda _: faster_library(CPU), range(2)))
    assert names == [ONEDNN, ONEDNN]


def test_the_gain_is_measured_on_the_products_of_a_layer() -> None:
    if onednn.is_exact():
        assert 0.05 < libraries._gain() < 20


def test_aten_where_onednn_is_off_or_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "_gain", lambda: 3.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
        assert faster_library(CPU) == ATEN
    torch.set_float32_matmul_precision("medium")
    try:
        assert faster_library(CPU) == ATEN
    finally:
        torch.set_float32_matmul_precision("highest")
    assert faster_library(torch.device("cuda")) == ATEN


def test_all_ranks_use_the_same_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "faster_library", lambda device: ONEDNN)
    assert RegionCompiler("inductor")._agreed_libraries(CPU) == Libraries(True)
    assert RegionCompiler("inductor", lambda flag: True)._agreed_libraries(CPU) == Libraries(False)  # of another rank


def trained(backend: str, mesh: str, monkeypatch: pytest.MonkeyPatch, library: str) -> tuple[mw.TrainStep, list[float]]:
    monkeypatch.setattr(libraries, "faster_library", lambda device: library)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256))
    x, y = torch.randn(256, 256), torch.randn(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    batch = {"x": x, "y": y}
    step = mw.compile(
        model,
        loss=lambda out, batch: nn.functional.mse_loss(out, batch["y"]),
        example=batch,
        forward=lambda model, batch: model(batch["x"]),
        optimizer=optimizer,
        mesh=mesh,
        run=mw.RunOptions(backend=backend),
    )
    return step, [float(step(batch)) for _ in range(3)]


def ops_that_run(step: mw.TrainStep) -> set[Any]:
    """The kernels that tasks run, in regions or by themselves."""
    keys = "\n".join(step.session.compiler.compiled)
    tasks = [task for part in step.session.ranks[0].tasks for task in part]
    singles = {task.node.target for task in tasks if task.fused is not None and len(task.fused.nodes) == 1}
    return singles | ({ONEDNN_MM} if str(ONEDNN_MM) in keys else set())


@pytest.mark.slow
@needs_onednn
@pytest.mark.parametrize("mesh", ["", "dp=2"])
def test_training_with_onednn(mesh: str, monkeypatch: pytest.MonkeyPatch) -> None:
    eager, expected = trained("eager", mesh, monkeypatch, ONEDNN)
    step, losses = trained("inductor", mesh, monkeypatch, ONEDNN)
    other, by_aten = trained("inductor", mesh, monkeypatch, ATEN)
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, want in eager.parameters().items():
        torch.testing.assert_close(step.parameters()[name], want, rtol=1e-4, atol=1e-6)
    assert ops_that_run(step) & {MM, ONEDNN_MM}
    assert not ops_that_run(eager) & {MM, ONEDNN_MM}
    assert not ops_that_run(other) & {MM, ONEDNN_MM}
    assert by_aten == pytest.approx(expected, rel=1e-5)


@needs_onednn
def test_steps_before_the_compiler_is_ready_run_by_the_same_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` begins op by op."""
    eager, expected = trained("eager", "", monkeypatch, ONEDNN)
    monkeypatch.setattr(RegionCompiler, "_compiles_beside", lambda *rest: True)
    step, losses = trained("auto", "", monkeypatch, ONEDNN)
    assert MM in ops_that_run(step)
    assert MM not in ops_that_run(eager)
    assert [each.session.compiler.library for each in (step, eager)] == [ONEDNN, ATEN]
    assert losses == pytest.approx(expected, rel=1e-5)
    for name, want in eager.parameters().items():
        torch.testing.assert_close(step.parameters()[name], want, rtol=1e-4, atol=1e-6)


@needs_onednn
def test_a_failure_names_the_single_op(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RegionCompiler, "_compiles_beside", lambda *rest: True)
    step, _ = trained("auto", "", monkeypatch, ONEDNN)
    tasks = [task for part in step.session.ranks[0].tasks for task in part]
    fused = [task for task in tasks if task.fused is not None and len(task.fused.nodes) == 1]

    def broken(operands: list[Any], device: int) -> Any:
        raise RuntimeError("out of memory")

    with pytest.raises(StepError, match=r"mm\S* failed on device 0"):
        perform(replace(fused[0], function=broken), [None] * 1000, 0)


@needs_onednn
def test_matmuls_of_any_graph_get_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """As compilers pass it: a sum with the product, a small product, and one of another dtype."""

    def function(x: Tensor, w: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        return x @ w, torch.addmm(bias, x, w), torch.addmm(bias, x, w, beta=0.5), x[:2] @ w, x.bfloat16() @ w.bfloat16()

    operands = (matrix(256, 200), matrix(200, 300), torch.randn(300))
    monkeypatch.setattr(libraries, "faster_library", lambda device: ATEN)
    graph = make_fx(function, tracing_mode="fake")(*operands).graph
    assert not choose_in(graph)
    monkeypatch.setattr(libraries, "faster_library", lambda device: ONEDNN)
    expected = fx.GraphModule({}, graph)(*operands)
    assert choose_in(graph)
    targets = [node.target for node in graph.nodes]
    assert [targets.count(op) for op in (ONEDNN_MM, MM, libraries.ADDMM)] == [2, 2, 1]
    graph.lint()
    for got, want in zip(fx.GraphModule({}, graph)(*operands), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)


@needs_onednn
def test_sizes_known_only_at_run_time_stay_with_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(libraries, "faster_library", lambda device: ONEDNN)
    graph = make_fx(torch.mm, tracing_mode="symbolic")(matrix(256, 200), matrix(200, 300)).graph
    assert not choose_in(graph)


@needs_onednn
def test_the_first_rank_that_asks_decides_for_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that compile different graphs at different times do not wait for each other."""
    store = dist.HashStore()
    monkeypatch.setattr(libraries, "store_of_job", lambda: store)
    found = []
    for library in (ONEDNN, ATEN):
        monkeypatch.setattr(libraries, "faster_library", lambda device, library=library: library)
        found.append(Libraries.agreed(CPU))
    assert found == [Libraries(True)] * 2
    monkeypatch.setattr(onednn, "is_exact", lambda: False)
    with pytest.raises(mw.MeshweaveError, match="different builds of torch"):
        Libraries.agreed(CPU)
    monkeypatch.setattr(onednn, "settings", lambda: "False, highest")  # turned off by the script, on all ranks
    assert Libraries.agreed(CPU) == Libraries(False)


@needs_onednn
def test_the_drop_in_multiplies_by_the_library_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = matrix(256, 200), matrix(200, 300)
    for library in (ONEDNN, ATEN):
        monkeypatch.setattr(libraries, "faster_library", lambda device, library=library: library)
        torch._dynamo.reset()
        result, (code,) = run_and_get_code(torch.compile(torch.mm, backend=mw.backend()), x, w)
        torch.testing.assert_close(result, x @ w, rtol=1e-5, atol=1e-4)
        assert ("meshweave.onednn_mm" in code) == (library == ONEDNN)
    torch._dynamo.reset()
