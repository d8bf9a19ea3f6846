"""Simulates a program on any machine: the public entry to the simulator, and how two simulations compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from meshweave.capture.step import Precision
from meshweave.cost.hardware import MachineProfile, load_profile
from meshweave.cost.simulate.buckets import Buckets
from meshweave.cost.simulate.frameworks import MESHWEAVE, Framework, framework_named
from meshweave.cost.simulate.kernels import Fusion
from meshweave.cost.simulate.repeats import simulate_few
from meshweave.cost.simulate.result import Simulation
from meshweave.cost.simulate.step import SimulateOptions, simulate_roles
from meshweave.errors import MeshweaveError
from meshweave.ir.graph import tokens_of
from meshweave.pipeline import PipelineArgument, PipelineChoice
from meshweave.place.plans import Plan
from meshweave.program import Program


def simulate(
    program: Program,
    profile: MachineProfile | str,
    *,
    fusion: Fusion | None = None,
    pipeline: PipelineArgument = None,
    matmul_dtype: torch.dtype | str | None = None,
    title: str = "",
    buckets: Buckets | None = None,
    framework: str | Framework = MESHWEAVE,
    every_microbatch: bool = True,
) -> Simulation:
    """One training step of a compiled program (`step.program`) on a machine: time, exposed communication with its
    reasons, memory with the tensors at the peak. Deterministic. The cost of the simulation grows with the number of
    roles, not of devices.

    profile: a MachineProfile, the name of a profile ("h100"), or its file.
    fusion: "ops" (every op a kernel, as meshweave's own runtime), "eager" (PyTorch's kernels) or "compiled" (chains
        fused, as torch.compile), "blocks" (compiled in repeated blocks, eager elsewhere) or "blocks+loss" (and the
        loss); by default what the profile says of its machine.
    pipeline: another schedule of the stages than the program's, as in `mw.compile`; "sequential": none.
    matmul_dtype: the dtype of matmuls in repeated blocks, as in float8 training, or its name.
    buckets: "blocks" or a number of bytes: which collectives are merged, to predict a system that flattens parameters
        (FSDP: "blocks", its flat buffers are in the memory) or gradients (DDP: 25 * 2**20). "none": as the program has
        them, merged by `overlap` or not. By default as the framework does.
    framework: whose kernels, buckets and messages are simulated: "meshweave", "torchtitan", "megatron", "nemo",
        "fsdp1", "deepspeed" or "nanotron", each with its usual settings (`cost/simulate/frameworks.py`). A
        MachineProfile keeps its own kernels (`Framework.machine` changes them). What enters
        the program (passes, where gradients are added up) is the program's own; `meshweave simulate --as` sets both.
    every_microbatch: False: of many microbatches only the first and last few are played, where a step grows by the same
        with each; its totals are those of the whole step, its spans those of a step of few, and a note says so.

    Raises MeshweaveError for an unknown profile, a mesh that the machine cannot hold, a dtype without a cost.
    """
    its = framework_named(framework) if isinstance(framework, str) else framework
    machine = its.machine(load_profile(profile)) if isinstance(profile, str) else profile
    microbatches = program.options.accumulate
    schedule = program.pipeline
    if pipeline is not None:
        asked = PipelineChoice.of(pipeline)
        schedule = None if asked is None else asked.for_step(program.roles, microbatches, machine)
    tokens = tokens_of(program.captured) * microbatches
    options = SimulateOptions(
        fusion=fusion or its.fusion,
        microbatches=microbatches,
        pipeline=schedule,
        matmuls=replace(its.matmuls, dtype=_dtype_of(matmul_dtype)),
        tokens=tokens,
        title=title,
        buckets=its.buckets if buckets is None else buckets,
        blocking_messages=its.blocking_messages,
        keeps_every_second_matmul=program.recompute == "selective",
    )
    few = None if every_microbatch else simulate_few(program.roles, machine, options)
    simulation = few or simulate_roles(program.roles, machine, options)
    notes = (*simulation.notes, *program.notes)
    return replace(simulation, notes=notes if its.name == MESHWEAVE else (*notes, f"{its} ({its.source})"))


def _dtype_of(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """A dtype, or that of a name: "float8_e4m3fn", "torch.bfloat16"."""
    known = getattr(torch, dtype.removeprefix("torch."), None) if isinstance(dtype, str) else dtype
    if dtype is not None and not (isinstance(known, torch.dtype) and known.is_floating_point):
        raise MeshweaveError(
            "matmul_dtype is not a floating-point dtype", got=repr(dtype), expected="torch.float8_e4m3fn, or its name"
        )
    return known


def precision_in(framework: Framework, precision: Precision, plan: Plan | None) -> Precision:
    """The precision of a step that adds up gradients of microbatches where the framework does, unless itself or the
    plan says where."""
    is_open = precision.accumulate_in == "auto" and not (plan is not None and plan.says_sums)
    return replace(precision, accumulate_in=framework.accumulate_in) if is_open else precision


def best_of(simulations: Sequence[Simulation]) -> int:
    """Index of the best simulation: the most tokens per second among those that fit in memory, else among all."""
    fitting = [i for i, simulation in enumerate(simulations) if not simulation.verdict] or list(range(len(simulations)))
    return max(fitting, key=lambda i: (simulations[i].tokens_per_s_per_gpu * simulations[i].num_devices, -i))
