"""Our passes on what torchtitan's graph trainer traces of its debug models."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx

from meshweave.integrations.torchtitan import meshweave_pass, overlap_pass, register
from meshweave.ir.collectives import collective_of

REASON = "needs torchtitan 0.3 with what it imports (triton, datasets): pip install -e '.[integrations]'"
pytest.importorskip("triton", reason=REASON)
pytest.importorskip("datasets", reason=REASON)
pytest.importorskip("torchtitan.experiments.graph_trainer.registry", reason=REASON)
pytestmark = pytest.mark.filterwarnings("ignore")  # of torchtitan's own imports, and of autocast on CPU


@pytest.fixture(params=["fake", "gloo"])
def world_size(request: pytest.FixtureRequest) -> Iterator[int]:
    """8 ranks of which the others do nothing, or a real one."""
    size = 8 if request.param == "fake" else 1
    options = {} if request.param == "fake" else {"store": dist.HashStore()}
    dist.init_process_group(request.param, rank=0, world_size=size, **options)
    yield size
    dist.destroy_process_group()


def traced(model_name: str, world_size: int, monkeypatch: pytest.MonkeyPatch, ep: int = 1) -> tuple[Any, Any, Any]:
    """Torchtitan's trace of forward, loss and backward, with fsdp over all ranks; the model's spec; how to run it."""
    from importlib import import_module

    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.config.configs import ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims, parallel_dims
    from torchtitan.experiments.graph_trainer.configs import GraphTrainerCompileConfig
    from torchtitan.experiments.graph_trainer.make_fx_tracer import minimal_fx_tracer, run_traced
    from torchtitan.experiments.graph_trainer.trainer import make_fwd_bwd_step

    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    spec = import_module(f"torchtitan.experiments.graph_trainer.{model_name}").model_registry("debugmodel", "sdpa")
    with torch.device("meta"):
        model = spec.model.build()
    dims = ParallelDims(
        dp_replicate=1, dp_shard=world_size, cp=1, tp=1, pp=1, ep=ep, world_size=world_size,
        spmd_backend="partial_dtensor",
    )  # fmt: skip
    compile_config = GraphTrainerCompileConfig(
        enable=True, disable_passes=["cudagraph_pass", "selective_activation_remat_pass"]
    )
    parallelism = ParallelismConfig(spmd_backend="partial_dtensor")
    model = spec.parallelize_fn(
        model, parallel_dims=dims, training=TrainingConfig(seq_len=32, local_batch_size=2), parallelism=parallelism,
        compile_config=compile_config, ac_config=None, dump_folder="",
    ).to_empty(device="cpu")  # fmt: skip
    torch.manual_seed(0)
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
            tensor.copy_(torch.randn(tensor.shape) * 0.02)
    tokens = torch.randint(0, 2000, (2, 32))
    inputs = tokens, tokens, torch.tensor(64.0), {"positions": torch.arange(32).expand(2, 32).contiguous()}
    step = minimal_fx_tracer(make_fwd_bwd_step(model, CrossEntropyLoss.Config().build()), module=model)(*inputs)
    config = SimpleNamespace(
        compile=compile_config, model_spec=spec, parallelism=parallelism, activation_checkpoint=None, loss=None
    )
    return step, (config, dims), lambda: run_traced(step, module=model)(*inputs)


def num_collectives(gm: fx.GraphModule) -> int:
    return sum(n.op == "call_function" and collective_of(n) is not None for n in gm.graph.nodes)


def names(gm: fx.GraphModule, op: str) -> list[str]:
    return [n.name for n in gm.graph.nodes if n.op == op]


@pytest.mark.slow_rows("fake-llama3", "gloo-deepseek_v3")
@pytest.mark.parametrize("model", ["llama3", "deepseek_v3"])
def test_a_traced_debug_model_goes_through(model: str, world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight ranks: most of the exposed time is gone. One rank, which communicates with itself: the same to the bit."""
    step, _, run = traced(model, world_size, monkeypatch)
    gm, reports = step.gm, []
    before = num_collectives(gm), names(gm, "placeholder")
    expected = run() if world_size == 1 else None
    assert overlap_pass(cost="h100", report=reports.append)(gm, step.example_inputs) is gm
    assert names(gm, "placeholder") == before[1]
    if expected is not None:
        for mine, its in zip(run(), expected, strict=True):
            assert torch.equal(local(mine), local(its))
        return
    (report,) = reports
    assert before[0] > 80
    assert num_collectives(gm) <= before[0]
    assert report.exposed_seconds < report.exposed_before / 2
    assert report.seconds < report.seconds_before


def local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.mark.parametrize("world_size", ["fake"], indirect=True)
def test_our_pass_stands_where_torchtitan_has_its_bucketing(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.experiments.graph_trainer import registry
    from torchtitan.experiments.graph_trainer.passes import apply_graph_passes, construct_default_graph_passes

    step, (config, dims), _ = traced("llama3", world_size, monkeypatch)
    register("meshweave-test", cost="h100")
    passes = registry.PASS_PIPELINE_REGISTRY.pop("meshweave-test")(step, config, parallel_dims=dims)
    usual = construct_default_graph_passes(step, config, parallel_dims=dims)
    (place,) = (i for i, one in enumerate(passes) if getattr(one, "func", None) is meshweave_pass)
    assert usual[place].func.__name__ == "joint_transformer_block_bucketing_reordering_pass"
    assert len(passes) == len(usual)
    before = num_collectives(step.gm)
    gm = apply_graph_passes(step.gm, step.example_inputs, passes, compile_config=config.compile)
    assert num_collectives(gm) < before / 2


def test_a_pass_without_communication_leaves_a_graph_alone() -> None:
    gm = fx.symbolic_trace(torch.nn.Linear(2, 2))
    code = gm.code
    assert overlap_pass()(gm, ()).code == code
