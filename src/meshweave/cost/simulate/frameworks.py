"""What other frameworks do in a step, beside its model, mesh and plan: to predict them in place of meshweave."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from meshweave.cost.hardware import MachineProfile
from meshweave.cost.simulate.buckets import Buckets
from meshweave.cost.simulate.kernels import Fusion
from meshweave.cost.simulate.matmuls import PLAIN, MatmulStyle
from meshweave.errors import MeshweaveError


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """A framework with its usual settings.

    fusion, buckets: as in `whatif.simulate`; a fusion of None is the machine profile's. attention: kernels by
    preference, of which a machine takes the first that its profile has. update: "fused" or "foreach", see
    `MachineProfile.with_update`. matmuls: what they do beside multiplying; their dtype is the run's. blocking_messages:
    a stage of a pipeline that sends waits until its message is there, and computes nothing meanwhile, where a device
    has a single stage. gathers_ahead: in a pipeline parameters that are gathered once a step are gathered from its
    begin, stage after stage, and gradients reduced beside what other stages compute (where a step follows from a short
    pipeline, see `simulate.composed`). accumulate_in: as in `Precision`. passes: text as for `compile`, those that
    stand for its own schedule.
    source: where each of them is found.
    """

    name: str
    fusion: Fusion | None = None
    attention: tuple[str, ...] = ()
    update: str = "fused"
    buckets: Buckets = "none"
    matmuls: MatmulStyle = PLAIN
    blocking_messages: bool = False
    gathers_ahead: bool = False
    accumulate_in: Literal["auto", "whole", "shards"] = "auto"
    passes: str = "default"
    source: str = ""

    def machine(self, profile: MachineProfile) -> MachineProfile:
        """The profile with the kernels of the framework."""
        known = {kernel.name for kernel in profile.attention.kernels}
        kernel = next((each for each in self.attention if each in known), None)
        profile = profile if kernel is None else profile.with_attention(kernel)
        return profile if self.name == MESHWEAVE else profile.with_update(self.update)

    def passes_with(self, asked: str) -> str:
        """The text of the passes of a step for which these are asked: "default" are the framework's own, of which one
        that is asked for with other options is left out."""
        if self.name == MESHWEAVE:
            return asked
        own, parts = ([part.strip() for part in text.split(",")] for text in (self.passes, asked))
        stated = [part for part in parts if part not in ("none", "default")]
        names = {part.partition("=")[0] for part in stated}
        kept = [part for part in own if part != "none" and part.partition("=")[0] not in names]
        return ",".join((*kept, *stated)) or "none"

    def __str__(self) -> str:
        """What it does, in a line."""
        size = f"{self.buckets:,} bytes" if isinstance(self.buckets, int) else ""
        merged = {"none": "a collective each", "blocks": "a collective per block"}
        parts = [
            f"kernels {self.fusion or 'of the profile'}",
            f"attention {' or '.join(self.attention)}",
            f"{self.update} updates",
            merged.get(str(self.buckets), f"collectives of {size}"),
            f"gradients of microbatches {'as memory allows' if self.accumulate_in == 'auto' else self.accumulate_in}",
            f"operands of float8 matmuls gathered in {'float8' if self.matmuls.gathers else '16 bits'}",
            *(["sums added up by matmuls"] if self.matmuls.adds else []),
            *([f"gradients of microbatches added up in {self.matmuls.sum_dtype}"] if self.matmuls.sum_dtype else []),
            *(["tensor parallelism in chunks beside matmuls"] if self.matmuls.in_chunks else []),
            f"passes {self.passes}",
            *(["stages wait for what they send"] if self.blocking_messages else []),
        ]
        return f"as {self.name}: {', '.join(parts)}"


MESHWEAVE = "meshweave"
_MEGATRON = Framework(
    name="megatron",
    fusion="compiled",
    attention=("cudnn", "flash2"),
    buckets=160_000_000,
    matmuls=MatmulStyle(keeps=True, adds=True),
    blocking_messages=True,
    gathers_ahead=True,
    accumulate_in="whole",
    passes="prefetch=1,recompute=pointwise?",
    source="Transformer Engine's fused norms, activations and attention (cuDNN), which save what they read, FusedAdam; "
    "Megatron-LM core/distributed/distributed_data_parallel.py: buckets of max(40 million, 1 million per rank) "
    "parameters, in float32 main_grad, reduced once a step; distributed optimizer with overlap_param_gather; "
    "core/pipeline_parallel/p2p_communication.py: waits for every send and receive (but in interleaved schedules with "
    "overlap_p2p_comm); param_and_grad_buffer.py: overlap_param_gather, overlap_grad_reduce; "
    "gradient_accumulation_fusion, linear_qkv and linear_fc1 as a matmul each (core/transformer/"
    "transformer_config.py, attention.py, mlp.py); Transformer Engine pytorch/module/layernorm_linear.py, base.py: "
    "operands and gradients are cast before they are gathered; fp8_param_gather",
)
FRAMEWORKS = {
    each.name: each
    for each in (
        Framework(name=MESHWEAVE),
        Framework(
            name="torchtitan",
            fusion="eager",
            attention=("flash2", "cudnn"),
            buckets="blocks",
            accumulate_in="shards",
            passes="prefetch=1",
            source="torchtitan models/llama3/infra/parallelize.py: fully_shard on each block, which prefetches the "
            "next and reduces in every microbatch; models/attention.py: FlashAttention, cuDNN on B200; components/"
            "optimizer.py: fused; components/quantization/float8: float8 all-gathers. --fusion blocks: compile",
        ),
        _MEGATRON,
        replace(
            _MEGATRON,
            name="nemo",
            matmuls=MatmulStyle(keeps=True, adds=True, sum_dtype=torch.bfloat16, in_chunks=True),
            source="recipes with performance_mode, and MLPerf's llama31_405b/pretrain.py: grad_reduce_in_fp32=False, "
            f"tp_comm_overlap (Transformer Engine's userbuffers); else as Megatron core: {_MEGATRON.source}",
        ),
        Framework(
            name="fsdp1",
            fusion="eager",
            attention=("flash2", "cudnn"),
            update="foreach",
            buckets="blocks",
            matmuls=MatmulStyle(gathers=False),
            accumulate_in="shards",
            passes="prefetch=1",
            source="torch.distributed.fsdp.FullyShardedDataParallel: a flat parameter per wrapped block, BACKWARD_PRE "
            "and limit_all_gathers, reduced in every microbatch; torch.optim: foreach by default",
        ),
        Framework(
            name="deepspeed",
            fusion="eager",
            attention=("flash2", "cudnn"),
            buckets=100_000_000,
            matmuls=MatmulStyle(gathers=False),
            blocking_messages=True,
            accumulate_in="shards",
            passes="prefetch=1",
            source="DeepSpeed runtime/zero/config.py: stage3_prefetch_bucket_size of 5e7 elements, in 16 bits; stage 3 "
            "reduces in every microbatch; ops/adam: FusedAdam; runtime/pipe/p2p.py: send, recv",
        ),
        Framework(
            name="nanotron",
            fusion="eager",
            attention=("flash2", "cudnn"),
            buckets=25 * 2**20,
            matmuls=MatmulStyle(gathers=False),
            blocking_messages=True,
            accumulate_in="whole",
            passes="none",
            source="nanotron optim/gradient_accumulator.py: float32 sums, reduced once a step; ZeRO-1; "
            "torch_adam_is_fused; buckets of DistributedDataParallel; FlashAttention-2; parallel/pipeline_parallel/"
            "p2p.py waits for what it sends",
        ),
    )
}


def framework_named(name: str) -> Framework:
    """Raises MeshweaveError for an unknown name."""
    if name not in FRAMEWORKS:
        raise MeshweaveError("unknown framework", got=repr(name), expected=f"one of {', '.join(FRAMEWORKS)}")
    return FRAMEWORKS[name]
