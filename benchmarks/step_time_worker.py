"""One process of a job of step_time.py: a way to train a model, step by step as it is asked."""

from __future__ import annotations

import gc
import json
import resource
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import meshweave as mw
from meshweave.ir.collectives import COLLECTIVES
from meshweave.runtime.cluster import init_from_env, shutdown
from meshweave.runtime.regions.compiler import BackendName

OURS = "meshweave"
COMPILED, DROP_IN = "compiled", "drop-in"
OURS_COMPILED = f"{OURS}, {COMPILED}"
BACKENDS = {"": "", COMPILED: "inductor", DROP_IN: "meshweave"}  # of torch.compile, by the end of a way's name
Step = Callable[[Tensor], float]
LR = 1e-2


@dataclass(frozen=True)
class Config:
    """`batch`: sequences of a data-parallel device (under TP: of the group) in each of `accumulate` microbatches."""

    scheme: str
    batch: int
    family: str = "llama"
    layers: int = 6
    hidden: int = 512
    vocabulary: int = 4096
    sequence: int = 256
    steps: int = 8
    warm_up: int = 2
    accumulate: int = 1
    compiles: bool = True  # all ways also compiled
    device: str = "cpu"  # or "cuda": AdamW and bfloat16 there

    def __str__(self) -> str:
        times = f"{self.accumulate} x " if self.accumulate > 1 else ""
        return (
            f"{self.family} {self.layers} x {self.hidden}, {self.scheme}, batch {times}{self.batch} x {self.sequence}"
        )


def model_on_device(config: Config) -> nn.Module:
    return make_model(config).to(config.device, torch.bfloat16 if config.device == "cuda" else torch.float32)


def make_model(config: Config) -> nn.Module:
    """The same weights each time."""
    import transformers

    torch.manual_seed(0)
    heads = config.hidden // 64
    if config.family == "gpt2":
        gpt2 = transformers.GPT2Config(
            n_embd=config.hidden, n_layer=config.layers, n_head=heads, vocab_size=config.vocabulary,
            n_positions=config.sequence, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(gpt2).float()
    if config.family == "mixtral":
        mixtral = transformers.MixtralConfig(
            hidden_size=config.hidden, intermediate_size=config.hidden, num_hidden_layers=config.layers,
            num_attention_heads=heads, num_key_value_heads=heads, vocab_size=config.vocabulary,
            num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=config.sequence,
        )  # fmt: skip
        return transformers.MixtralForCausalLM(mixtral).float()
    llama = transformers.LlamaConfig(
        hidden_size=config.hidden, intermediate_size=3 * config.hidden, num_hidden_layers=config.layers,
        num_attention_heads=heads, num_key_value_heads=heads, vocab_size=config.vocabulary,
        max_position_embeddings=config.sequence, tie_word_embeddings=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(llama).float()


def blocks_of(model: Any) -> Any:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


# Ways to train. A step takes the global batch and returns the loss of its rows here.


def meshes(scheme: str, num_ranks: int) -> str:
    """The mesh of meshweave's row."""
    return {
        "solo": "",
        "ddp": f"dp={num_ranks}",
        "fsdp": f"fsdp={num_ranks}",
        "tp": f"tp={num_ranks}",
        "fsdp+tp": f"fsdp={num_ranks // 2},tp=2",
    }[scheme]


def variants(config: Config) -> tuple[str, ...]:
    """Names of ways to train, ours first."""
    peer, _ = PEERS[config.scheme]
    own = (OURS, OURS_COMPILED) if config.compiles and config.device == "cpu" else (OURS,)  # compiled there anyway
    return (*own, peer, f"{peer}, {COMPILED}") if config.compiles else (*own, peer)


def make_step(config: Config, variant: str, num_ranks: int) -> Step:
    if variant in (OURS, OURS_COMPILED):
        return ours(config, num_ranks, "auto" if variant == OURS else "inductor")
    return PEERS[config.scheme][1](config, BACKENDS[variant.partition(", ")[2]])


def ours(config: Config, num_ranks: int, backend: BackendName) -> Step:
    """As it comes: no profile, no passes named."""
    model = model_on_device(config)
    batch = next(batches(config, num_ranks))
    step = mw.compile(
        model,
        loss=lambda out, _: out.loss,
        example={"input_ids": batch, "labels": batch},
        optimizer=_optimizer(model),
        mesh=meshes(config.scheme, num_ranks),
        forward=lambda m, b: m(**b, use_cache=False),
        accumulate=config.accumulate,
        run=mw.RunOptions(backend=backend),
    )

    def run(batch: Tensor) -> float:
        return float(step({"input_ids": batch, "labels": batch}))

    run.compiled = step  # type: ignore[attr-defined]
    return run


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    parameters = [*model.parameters()]
    if not parameters[0].is_cuda:
        return torch.optim.SGD(parameters, lr=LR)
    # A group is updated by ops on lists, in which torch has no DTensors beside tensors (TP leaves some tensors).
    kinds = [[p for p in parameters if isinstance(p, DTensor) is kind] for kind in (True, False)]
    return torch.optim.AdamW([{"params": own} for own in kinds if own], lr=1e-4)


def _trained(model: nn.Module, rows: slice, accumulate: int = 1) -> Step:
    """Gradients of microbatches are summed over ranks with the last, by the ways that the peers have for that."""
    optimizer = _optimizer(model)

    def step(batch: Tensor) -> float:
        total = 0.0
        for left, micro in zip(reversed(range(accumulate)), batch.chunk(accumulate), strict=True):
            own = micro[rows]
            if accumulate > 1 and isinstance(model, FSDPModule):
                model.set_requires_gradient_sync(not left)
                model.set_reshard_after_backward(not left)
            is_early_ddp = left and isinstance(model, nn.parallel.DistributedDataParallel)
            with model.no_sync() if is_early_ddp else nullcontext():
                loss = model(input_ids=own, labels=own, use_cache=False).loss / accumulate
                loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def _rows(config: Config, index: int) -> slice:
    return slice(index * config.batch, (index + 1) * config.batch)


def solo(config: Config, backend: str) -> Step:
    model = model_on_device(config)
    if backend:
        model.compile(backend=backend)
    return _trained(model, slice(None))


def ddp(config: Config, backend: str) -> Step:
    model = model_on_device(config)
    if backend:
        model.compile(backend=backend)
    rows = _rows(config, dist.get_rank())
    return _trained(nn.parallel.DistributedDataParallel(model), rows, config.accumulate)


def fsdp2(config: Config, backend: str) -> Step:
    mesh = init_device_mesh(config.device, (dist.get_world_size(),), mesh_dim_names=("dp",))
    model = _sharded(model_on_device(config), mesh, backend, config.accumulate == 1)
    return _trained(model, _rows(config, dist.get_rank()), config.accumulate)


def _sharded(model: nn.Module, mesh: DeviceMesh, backend: str, reshards: bool = True) -> nn.Module:
    """As torchtitan does: each block compiled, then sharded, then the rest."""
    for block in blocks_of(model):
        if backend:
            block.compile(backend=backend)
        fully_shard(block, mesh=mesh, reshard_after_forward=reshards)
    return fully_shard(model, mesh=mesh, reshard_after_forward=reshards)


def tp(config: Config, backend: str) -> Step:
    mesh = init_device_mesh(config.device, (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = _parallel(model_on_device(config), mesh)
    for block in blocks_of(model) if backend else ():
        block.compile(backend=backend)
    return _trained(model, slice(None))


def _parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Column- and row-wise linear layers of every block, and the output layer by columns."""
    from torch.distributed.tensor import Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    plan: dict[str, Any] = {
        f"model.layers.*.{name}": ColwiseParallel()
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ("self_attn.o_proj", "mlp.down_proj")}
    plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    return parallelize_module(model, mesh, plan)


def fsdp2_tp(config: Config, backend: str) -> Step:
    mesh = init_device_mesh(config.device, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    model = _sharded(_parallel(model_on_device(config), mesh["tp"]), mesh["dp"], backend)
    return _trained(model, _rows(config, mesh.get_local_rank("dp")))


PEERS: dict[str, tuple[str, Callable[[Config, str], Step]]] = {
    "solo": ("eager", solo),
    "ddp": ("DDP", ddp),
    "fsdp": ("FSDP2", fsdp2),
    "tp": ("TP", tp),
    "fsdp+tp": ("FSDP2+TP", fsdp2_tp),
}  # fmt: skip


# The job


def batches(config: Config, num_ranks: int) -> Iterator[Tensor]:
    """Global batches, the same on every rank."""
    replicas = {"solo": 1, "tp": 1, "fsdp+tp": num_ranks // 2}.get(config.scheme, num_ranks)
    rows = replicas * config.batch * config.accumulate
    made = torch.Generator().manual_seed(1)
    while True:
        yield torch.randint(0, config.vocabulary, (rows, config.sequence), generator=made)


# Questions and times go over Gloo on GPUs too: a process that waits takes no time of a GPU that others share.
BACKEND_OF = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}
# What rank 0 is asked on a line of stdin, and what it answers with on a line of stdout.
START, STEP, END = QUESTIONS = "start", "step", "end"


def worker(config: Config, variant: str) -> None:
    """Train by the variant of that name. Seconds are those of the slowest process, losses those of the global batch."""
    rank, num_ranks = init_from_env(BACKEND_OF[config.device])
    source, step = (batch.to(config.device) for batch in batches(config, num_ranks)), None
    while _asked(rank) != END:
        gc.collect()
        if step is not None:  # caches are cold after the turns of other jobs, and training takes step after step
            if variant == OURS:
                step.compiled.session.compile_regions(waits=True)  # type: ignore[attr-defined]
            step(next(source))
        batch = next(source)
        dist.barrier()
        began = time.perf_counter()
        step = step or make_step(config, variant, num_ranks)
        loss = step(batch)
        _answer(rank, {"seconds": _slowest(time.perf_counter() - began), "loss": _mean(loss)})
    on_gpu = config.device == "cuda"
    own = torch.cuda.max_memory_allocated() if on_gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = torch.tensor(own, dtype=torch.int64)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    counts = {} if step is None else sent(step, next(source))
    _answer(rank, {"peak_bytes": int(peak), **counts, **(described(step.compiled) if variant == OURS else {})})  # type: ignore[union-attr]
    shutdown()


_BYTES = {"BFloat16": 2, "Half": 2, "Float": 4, "Int": 4, "Double": 8, "Long": 8}


def sent(step: Step, batch: Tensor) -> dict[str, int]:
    """Collectives of a step, over NCCL with the bytes of the larger of operand and result: as torch's profiler sees
    them (over Gloo it does not see all of ours, which are those of the program)."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(batch)
    with TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace")
        events = json.loads(Path(f"{folder}/trace").read_text())["traceEvents"]
    calls = [e["args"] for e in events if e["name"] == "record_param_comms" and e["args"]["Collective name"] != "wait"]
    if calls:
        sizes = [max(c["In msg nelems"], c["Out msg nelems"]) * _BYTES.get(c["dtype"], 1) for c in calls]
        return {"collectives": sum(map(bool, sizes)), "sent_bytes": sum(sizes)}
    if hasattr(step, "compiled"):
        (role,) = (role for role in step.compiled.program.roles if dist.get_rank() in role.devices)
        return {"collectives": sum(node.target in COLLECTIVES for node in role.graph.nodes)}
    return {"collectives": sum(event.count for event in profile.key_averages() if event.key.startswith("c10d::"))}


def _asked(rank: int) -> str:
    """The next question, on every rank. A job that nobody asks any more ends."""
    index = torch.tensor(QUESTIONS.index(sys.stdin.readline().strip() or END) if rank == 0 else 0)
    dist.broadcast(index, 0)
    return QUESTIONS[int(index)]


def _answer(rank: int, answer: dict[str, Any]) -> None:
    if rank == 0:
        print(json.dumps(answer), flush=True)


def _slowest(seconds: float) -> float:
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return float(slowest)


def _mean(loss: float) -> float:
    """The loss of the global batch: ranks have as many tokens each."""
    total = torch.tensor(loss, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def described(step: mw.TrainStep) -> dict[str, Any]:
    """What our row rests on, and what the simulator says of it."""
    from meshweave.cost.hardware import MachineProfile
    from meshweave.whatif import simulate

    program = step.program
    modelled = isinstance(program.costs, MachineProfile)
    predicted = simulate(program, program.costs).seconds if modelled else None
    return {
        "costs": program.costs_from,
        "passes": program.optimized.name,
        "predicted": predicted,
    }
