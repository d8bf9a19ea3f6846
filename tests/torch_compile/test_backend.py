"""The drop-in on one process: a world of two of which the other rank does nothing, and the code that Inductor
generates."""

from __future__ import annotations

import importlib
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.utils import run_and_get_code

import meshweave as mw
from meshweave.errors import MeshweaveError
from meshweave.ir.collectives import WAIT, collective_of, functional
from meshweave.optimize.overlap import OverlapReport
from meshweave.passes import Overlap
from meshweave.torch_compile import backend, inductor_pass
from meshweave.torch_compile.inductor import GraphPasses, HoldOrder, patches
from meshweave.torch_compile.scheduling import BackendSettings

GATHER = functional.all_gather_into_tensor.default
SUM = functional.all_reduce.default


@pytest.fixture
def group() -> Iterator[str]:
    """The name of a group of two ranks."""
    dist.init_process_group("fake", rank=0, world_size=2)
    yield dist.group.WORLD.group_name
    torch._dynamo.reset()
    dist.destroy_process_group()


def seconds(node: fx.Node) -> float:
    """Every kernel and every collective takes 1 ms."""
    return 1e-3


def layers(group: str) -> Callable[..., Tensor]:
    """Matmuls whose weights are gathered right before they are used, and a sum over the ranks at the end of each.

    Nothing in them makes Inductor generate a kernel, which takes seconds to compile.
    """

    def model(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            whole = WAIT(GATHER(weight, 2, group))
            x = WAIT(SUM(x @ whole, "sum", group))
        return x

    return model


def operands(num_layers: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(16, 32, generator=generator)] + [
        torch.randn(16, 32, generator=generator) for _ in range(num_layers)
    ]


# Each line of generated code that starts, waits for or computes something, as the op of the graph that it stands for.
_CODE = re.compile(
    r"^\s*(?:\w+ = )?(?:torch\.ops\._c10d_functional\.(\w+)\.default\(|(extern_kernels\.\w+)\(|(cpp_fused\w*)\()"
)


def generated(code: str) -> list[str]:
    body = code[code.index("def call(") :]
    found = [next(filter(None, match.groups())) for match in map(_CODE.match, body.splitlines()) if match]
    return [re.sub(r"^extern_kernels\.(\w+)", r"\1", name) for name in found]


EVENTS = ("all_gather_into_tensor", "all_reduce", "all_reduce_", "reduce_scatter_tensor", "wait_tensor")


def segments(events: Sequence[str]) -> list[tuple[str, int]]:
    """Each communication event, and how many matmuls stand between it and the next."""
    made = [("", 0)]
    for event in events:
        if event in EVENTS:
            made.append((event.rstrip("_"), 0))
        elif event in ("mm", "addmm", "bmm"):
            made[-1] = (made[-1][0], made[-1][1] + 1)
    return made


def graph_events(graph: fx.Graph) -> list[str]:
    called = [n for n in graph.nodes if n.op == "call_function" and isinstance(n.target, torch._ops.OpOverload)]
    return [n.target._schema.name.partition("::")[2] for n in called]


def compiled_by(make: Callable[..., Any], group: str, **kwargs: Any) -> tuple[Tensor, list[str], list[str]]:
    """The result, the events of the graph as our pass left it, and those of the code."""
    seen: list[list[str]] = []

    class Watch(GraphPasses):
        def __call__(self, graph: fx.Graph, is_inference: bool = False) -> None:
            super().__call__(graph, is_inference)
            seen.append(graph_events(graph))

    settings = BackendSettings(cost=seconds, **kwargs)
    changed = patches(settings, {})
    changed["post_grad_custom_post_pass"] = Watch(settings)
    with config.patch(changed):
        result, (code,) = run_and_get_code(torch.compile(make(group), fullgraph=True), *operands())
    return result, seen[0], generated(code)


@pytest.mark.slow_rows("True-7")
@pytest.mark.parametrize(("is_merged", "num_waits"), [(False, 8), (True, 7)])
def test_the_generated_code_has_the_order_of_the_graph(group: str, is_merged: bool, num_waits: int) -> None:
    result, graph, code = compiled_by(layers, group, passes=(Overlap(bucket=is_merged),))
    assert segments(code) == segments(graph)
    assert sum(event == "wait_tensor" for event in code) == num_waits
    with config.patch(fx_graph_cache=False):
        plain, (plain_code,) = run_and_get_code(torch.compile(layers(group), fullgraph=True), *operands())
    # Without the drop-in each start is followed by its wait, so that nothing hides it.
    assert segments(generated(plain_code)) != segments(graph)
    torch.testing.assert_close(result, plain, rtol=0, atol=0)


def hiding(group: str) -> Callable[..., tuple[Tensor, ...]]:
    """A gather hidden by pointwise work, which Inductor would rather fuse with what uses the gathered value."""

    def model(x: Tensor, weight: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        start = GATHER(weight, 2, group)
        hides = torch.cos(x) + 1
        return hides, x * WAIT(start)[: x.shape[0]]

    return model


@pytest.mark.parametrize("is_held", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_fusion_does_not_pull_a_wait_ahead_of_what_hides_its_communication(group: str, is_held: bool) -> None:
    hold = HoldOrder() if is_held else None
    with config.patch({"_pre_fusion_custom_pass": hold, "reorder_for_peak_memory": False, "fx_graph_cache": False}):
        _, (code,) = run_and_get_code(torch.compile(hiding(group), fullgraph=True), *operands())
    kinds = [name.removesuffix("_0").removesuffix("_1") for name in generated(code)]
    if is_held:
        assert kinds == ["all_gather_into_tensor", "cpp_fused_add_cos", "wait_tensor", "cpp_fused_mul_slice"]
    else:  # what the dependencies are for: if this changes, they may not be needed any more
        assert kinds == ["all_gather_into_tensor", "wait_tensor", "cpp_fused_add_cos_mul_slice"]


def test_kernels_that_hide_nothing_still_fuse(group: str) -> None:
    def model(x: Tensor, *weights: Tensor) -> Tensor:
        whole = WAIT(GATHER(weights[0], 2, group))
        return torch.cos(torch.sin(x @ whole) + 1) * 2

    _, _, code = compiled_by(lambda group: model, group)
    assert code == ["all_gather_into_tensor", "wait_tensor", "mm", "cpp_fused_add_cos_mul_sin_0"]


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this fake process group writes no result of a reduce-scatter")
@pytest.mark.parametrize("inner", ["inductor", "aot_eager"])
def test_forward_and_backward_give_the_same_bits(group: str, inner: str) -> None:
    def run(compiler: Any) -> list[Tensor]:
        torch._dynamo.reset()
        x, *weights = (value.requires_grad_() for value in operands())
        made = torch.compile(in_autograd, backend=compiler, fullgraph=True)(x, *weights)
        made.backward(torch.linspace(-1, 1, made.numel()).view_as(made))
        return [made.detach(), *(w.grad for w in weights if w.grad is not None)]

    gather = torch.ops._c10d_functional_autograd.all_gather_into_tensor.default

    def in_autograd(x: Tensor, *weights: Tensor) -> Tensor:
        for weight in weights:
            x = x @ WAIT(gather(weight, 2, group))
        return x

    reports: list[OverlapReport] = []
    plain = run(inner)
    ordered = run(backend(cost=seconds, inner=inner, report=reports.append))
    assert [len(report.collectives) for report in reports] == [4, 4]
    assert len(ordered) == len(plain) == 5
    for mine, its in zip(ordered, plain, strict=True):
        torch.testing.assert_close(mine, its, rtol=0, atol=0)


def test_a_graph_without_communication_is_left_alone() -> None:
    reports: list[OverlapReport] = []
    compiled = torch.compile(lambda x: torch.sin(x) @ x, backend=backend(inner="aot_eager", report=reports.append))
    x = torch.randn(4, 4)
    torch.testing.assert_close(compiled(x), torch.sin(x) @ x)
    assert reports == []


def test_any_compiler_of_graphs_may_follow(group: str) -> None:
    seen: list[list[str]] = []

    def inner(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        seen.append([str(n.target) for n in gm.graph.nodes if n.op == "call_function" and collective_of(n) is not None])
        return gm.forward

    own = backend(cost=seconds, inner=inner, passes=[Overlap(bucket=False)])
    compiled = torch.compile(layers(group), backend=own, fullgraph=True)
    with torch.no_grad():
        compiled(*operands())
    assert sorted(seen[0]) == [str(GATHER)] * 4 + [str(SUM)] * 4


def test_without_a_cost_the_device_says_which_and_the_report_too(group: str) -> None:
    reports: list[OverlapReport] = []
    compiled = torch.compile(layers(group), backend=backend(inner="aot_eager", report=reports.append), fullgraph=True)
    with torch.no_grad():
        compiled(*operands())
    assert "no cost was passed: priced as cpu-gloo; `meshweave calibrate` measures this machine" in reports[0].notes


# Inductor's options


class Earlier(CustomGraphPass):
    """A pass that a user had installed before."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: fx.Graph) -> None:
        self.seen.append(graph_events(graph))

    def uuid(self) -> str:
        return "earlier"


@pytest.mark.slow
def test_inductors_own_options_are_off_inside_with_a_note_and_restored(group: str) -> None:
    earlier, reports = Earlier(), list[OverlapReport]()
    own = {
        "reorder_for_compute_comm_overlap": True,
        "bucket_all_gathers_fx": "all",
        "aten_distributed_optimizations.enable_overlap_scheduling": True,
        "post_grad_custom_post_pass": earlier,
    }
    with config.patch(own):
        before = config.get_config_copy()
        context = inductor_pass(cost=seconds, report=reports.append)
        with pytest.warns(UserWarning, match=r"instead of Inductor: aten_.*overlap_scheduling, reorder.*, bucket_all"):
            context.__enter__()
        assert config.reorder_for_compute_comm_overlap is False
        assert config.bucket_all_gathers_fx == "none"
        assert config.reorder_for_peak_memory is False
        torch.compile(layers(group), fullgraph=True)(*operands())
        context.__exit__(None, None, None)
        after = config.get_config_copy()
        assert [name for name in before if repr(after[name]) != repr(before[name]) and name not in own] == []
        assert [getattr(config, name) for name in own] == list(own.values())
    assert len(earlier.seen) == 1
    assert earlier.seen[0].count("wait_tensor") == 8
    (note,) = [note for note in reports[0].notes if note.startswith("off in Inductor")]
    assert note.endswith("reorder_for_compute_comm_overlap, bucket_all_gathers_fx, reorder_for_peak_memory")


def test_options_are_restored_after_an_error(group: str) -> None:
    before = (config.post_grad_custom_post_pass, config._pre_fusion_custom_pass, config.reorder_for_peak_memory)

    def failing() -> None:
        with inductor_pass():
            assert isinstance(config.post_grad_custom_post_pass, GraphPasses)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert (config.post_grad_custom_post_pass, config._pre_fusion_custom_pass, config.reorder_for_peak_memory) == before


def test_of_nested_ones_the_innermost_orders_once(group: str) -> None:
    outer, inner, innermost = (list[OverlapReport]() for _ in range(3))
    with inductor_pass(cost=seconds, report=outer.append), torch.no_grad():
        with inductor_pass(cost=seconds, report=inner.append):
            torch.compile(layers(group), fullgraph=True)(*operands())
            own = backend(cost=seconds, report=innermost.append)
            torch.compile(layers(group), backend=own, fullgraph=True)(*operands(2))
        assert (len(outer), len(inner), len(innermost)) == (0, 1, 1)
        torch._dynamo.reset()
        torch.compile(layers(group), fullgraph=True)(*operands(3))
    assert (len(outer), len(inner), len(innermost)) == (1, 1, 1)


def test_backward_graphs_are_ordered_within_the_context(group: str) -> None:
    """On a GPU they would be compiled in another thread, with other options, if they were compiled when they first
    run."""
    gather = torch.ops._c10d_functional_autograd.all_gather_into_tensor.default
    reports: list[OverlapReport] = []
    x, weight = (value.requires_grad_() for value in operands(1))
    with inductor_pass(cost=seconds, report=reports.append):
        made = torch.compile(lambda x, w: x @ WAIT(gather(w, 2, group)), fullgraph=True)(x, weight)
        assert len(reports) == 2
    made.backward(torch.ones_like(made))
    assert weight.grad is not None


@pytest.mark.slow
def test_options_and_mode_of_torch_compile_reach_inductor(group: str) -> None:
    seen: list[Any] = []

    def report(_: OverlapReport) -> None:
        seen.append((config.cpp.threads, config.max_autotune))

    model = layers(group)
    with torch.no_grad():
        torch.compile(model, backend=backend(cost=seconds, report=report), options={"cpp.threads": 3})(*operands())
        torch._dynamo.reset()
        torch.compile(model, backend=backend(cost=seconds, report=report), mode="max-autotune-no-cudagraphs")(
            *operands()
        )
    assert seen[0] == (3, False)
    assert seen[1][1] is True


def test_modes_of_inductor_are_refused_for_others() -> None:
    compiled = torch.compile(lambda x: x + 1, backend=backend(inner="aot_eager"), mode="max-autotune")
    with pytest.raises(Exception, match="mode and options are Inductor's"):
        compiled(torch.ones(2))
    torch._dynamo.reset()


# The cache of compiled graphs


def test_the_key_of_the_cache_covers_what_an_order_depends_on(group: str) -> None:
    def key(**kwargs: Any) -> Any:
        return GraphPasses(BackendSettings(**kwargs)).uuid()

    h100 = mw.load_profile("h100")
    keys = [
        key(),
        key(cost=h100),
        key(cost=mw.load_profile("a100")),
        key(cost=h100, memory_cap_bytes=1),
        key(cost=h100, passes=(Overlap(communication_factor=2.0),)),
        key(cost=h100, groups=(("0", (0, 1)),)),
    ]
    assert None not in keys
    assert len(set(keys)) == len(keys)
    assert key(cost=h100) == keys[1]
    # What may change unseen, and what must be called, is never taken from a cache.
    assert key(cost=seconds) is None
    assert key(cost=h100, report=print) is None
    assert GraphPasses(BackendSettings(), (Earlier(),)).uuid() == ((*keys[0], "earlier"))
    assert GraphPasses(BackendSettings(), (lambda graph: None,)).uuid() is None


@pytest.mark.skipif(torch.__version__ < (2, 13), reason="this torch has no hash for the pass before fusion")
def test_a_graph_from_the_cache_is_the_ordered_one(group: str) -> None:
    counters = torch._dynamo.utils.counters["inductor"]

    def run(compiler: Any) -> list[str]:
        torch._dynamo.reset()
        with torch.no_grad():
            _, codes = run_and_get_code(torch.compile(layers(group), backend=compiler, fullgraph=True), *operands())
        return [event for code in codes for event in generated(code)]

    with config.patch(fx_graph_cache=True, fx_graph_remote_cache=False):
        plain = run("inductor")
        own = backend(passes=[Overlap(bucket=False)])
        ordered = run(own)
        hits = counters["fxgraph_cache_hit"]
        assert run(own) == ordered
        assert counters["fxgraph_cache_hit"] == hits + 1
        assert run("inductor") == plain
    assert segments(plain) != segments(ordered)


# Mistakes


def test_what_is_no_compiler_and_no_cost_is_refused() -> None:
    with pytest.raises(MeshweaveError, match=r"unknown inner compiler\n.*'eager'\n.*inductor, aot_eager"):
        backend(inner="eager")
    with pytest.raises(MeshweaveError, match="unknown machine profile 'h101'"):
        backend(cost="h101")
    with pytest.raises(MeshweaveError, match=r"not a cost\n.*3.0"):
        inductor_pass(cost=3.0)  # type: ignore[arg-type]


class Summed(torch.autograd.Function):
    """A parameter whose gradient is summed over the ranks of a group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return WAIT(SUM(gradient, "sum", ctx.group)), None


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # what Dynamo does of Functions
def test_a_model_that_begins_with_a_convolution(group: str) -> None:
    """Its input has no gradient, so the first of three results of `convolution_backward` is absent."""
    reports: list[OverlapReport] = []

    def loss(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        made = torch.conv2d(x, Summed.apply(weight, group), Summed.apply(bias, group))
        return made.relu().sum()

    def gradients(run: Callable[..., Tensor]) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        shapes = [(2, 3, 8, 8), (4, 3, 3, 3), (4,)]
        x, *parameters = [torch.randn(shape, generator=generator) for shape in shapes]
        run(x, *(p.requires_grad_() for p in parameters)).backward()
        return [p.grad for p in parameters if p.grad is not None]

    made = backend(cost=seconds, inner="aot_eager", report=reports.append)
    found = gradients(torch.compile(loss, backend=made))
    for one, other in zip(found, gradients(loss), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert one.storage_offset() == 0
    assert [merge.is_taken for report in reports for merge in report.merges] == [True]


def test_the_backend_is_found_by_its_name() -> None:
    """The package's entry point, by which torch.compile finds backends of installed packages."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["torch_dynamo_backends"]["meshweave"].partition(":")
    by_name = getattr(importlib.import_module(module), name)
    model, x = torch.nn.Linear(4, 3), torch.randn(2, 4)
    torch.testing.assert_close(torch.compile(model, backend=by_name)(x), model(x))
