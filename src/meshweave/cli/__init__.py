"""The command line. Exit code 0 for success, 1 when a step or check fails, 2 for bad input, 130 after Ctrl-C."""

from __future__ import annotations

import typer

from meshweave.cli.calibrate import CalibrateOptions, calibrate
from meshweave.cli.check import CheckOptions, check
from meshweave.cli.command import add_command
from meshweave.cli.move import MoveOptions, move
from meshweave.cli.plan import ExplainOptions, PlanOptions, explain, plan
from meshweave.cli.run import RunCommandOptions, run
from meshweave.cli.simulate import SimulateCommandOptions, simulate

__all__ = ["app", "main"]

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A communication compiler for distributed PyTorch training. MODEL is a name such as llama3-8b, "
    "file.py:factory, a folder with a config.json, hf:ORG/NAME, or hf:MODEL_TYPE?num_hidden_layers=2&hidden_size=64.",
)
add_command(app, "run", RunCommandOptions, run)
add_command(app, "check", CheckOptions, check)
add_command(app, "plan", PlanOptions, plan)
add_command(app, "explain", ExplainOptions, explain)
add_command(app, "simulate", SimulateCommandOptions, simulate)
add_command(app, "move", MoveOptions, move)
add_command(app, "calibrate", CalibrateOptions, calibrate)


def main() -> None:
    """The entry point of the command `meshweave`."""
    app()
