"""calibrate: measure this machine into a profile file."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.table import Table

from meshweave.calibrate import FULL, QUICK, Calibration, ErrorRow
from meshweave.calibrate import calibrate as measure
from meshweave.cli.command import Options, option
from meshweave.cli.screen import Screen, rank
from meshweave.cost.hardware import load_profile
from meshweave.errors import MeshweaveError
from meshweave.report.tables import plain_table


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateOptions(Options):
    output: Path = option(flags=("-o", "--output"), metavar="FILE", help="the profile to write, such as machine.toml")
    quick: bool = option(False, "fewer sizes and repetitions")
    device: str = option("", "cpu or cuda; by default CUDA if available")


def calibrate(screen: Screen, options: CalibrateOptions) -> int:
    """Measure this machine into a profile. Under torchrun its links are measured too, and compute with all processes
    computing at once."""
    output, quick = options.output, options.quick
    if output.suffix != ".toml":
        raise MeshweaveError(
            "not a TOML file", where="--output", got=str(output), expected=f"{output.name or 'machine'}.toml"
        )
    if not output.parent.is_dir():
        raise MeshweaveError("there is no such directory", where="--output", got=str(output.parent))
    began = time.perf_counter()
    on = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    plan = QUICK if quick else FULL
    calibration = measure(plan, output.stem, _command(options), on, lambda stage: screen.say(f"{stage} ..."))
    if rank() == 0:
        output.write_text(calibration.text)
        profile = load_profile(output)
        screen.say(f"{profile.summary}\n")
        screen.out.print(_table(calibration.errors))
        seconds = time.perf_counter() - began
        screen.say(f"\nwritten to {output} after {seconds:.0f} s; --profile {output} takes it")
        screen.result(True, output=str(output), seconds=seconds, errors=_rows(calibration))
    if dist.is_initialized():
        dist.barrier()
    return 0


def _command(options: CalibrateOptions) -> str:
    many = f"torchrun --nproc-per-node={dist.get_world_size()} -m " if dist.is_initialized() else ""
    return f"{many}meshweave calibrate -o {options.output.name}{' --quick' if options.quick else ''}"


def _rows(calibration: Calibration) -> list[dict[str, object]]:
    return [
        {"class": row.label, "num_points": row.num_points, "median": row.median, "worst": row.worst}
        for row in calibration.errors
    ]


def _table(rows: Sequence[ErrorRow]) -> Table:
    table = plain_table("held-out points of", ">points", ">median error", ">worst")
    for row in rows:
        table.add_row(row.label, str(row.num_points), f"{row.median:.1%}", f"{row.worst:.1%}")
    return table
