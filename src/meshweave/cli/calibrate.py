"""calibrate: measure this machine into a profile file."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from meshweave.calibrate import calibrate as measure
from meshweave.calibrate import thorough_plan
from meshweave.cli.command import Options, option
from meshweave.cli.screen import Screen, rank
from meshweave.cost.hardware import load_profile
from meshweave.errors import MeshweaveError


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(Options):
    output: Path = option(flags=("-o", "--output"), metavar="FILE", help="the profile to write, such as machine.toml")
    device: str = option("", "cpu or cuda; by default CUDA if available")


def calibrate(screen: Screen, options: CalibrateOptions) -> int:
    """Measure this machine into a profile. Under torchrun its links are measured too, and compute with all processes
    computing at once."""
    output = options.output
    if output.suffix != ".toml":
        raise MeshweaveError(
            "not a TOML file", where="--output", got=str(output), expected=f"{output.name or 'machine'}.toml"
        )
    if not output.parent.is_dir():
        raise MeshweaveError("there is no such directory", where="--output", got=str(output.parent))
    began = time.perf_counter()
    on = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    text = measure(thorough_plan(on), output.stem, _command(options), on, lambda stage: screen.say(f"{stage} ..."))
    if rank() == 0:
        output.write_text(text)
        screen.say(load_profile(output).summary)
        seconds = time.perf_counter() - began
        screen.say(f"\nwritten to {output} after {seconds:.0f} s; --profile {output} takes it")
        screen.result(True, output=str(output), seconds=seconds)
    if dist.is_initialized():
        dist.barrier()
    return 0


def _command(options: CalibrateOptions) -> str:
    many = f"torchrun --nproc-per-node={dist.get_world_size()} -m " if dist.is_initialized() else ""
    return f"{many}meshweave calibrate -o {options.output.name}"
