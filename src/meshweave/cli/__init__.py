"""The command line: run | check | plan | explain | simulate | move | calibrate. Exit code 0 when all it claims holds, 1
when a step or check fails, 2 for bad input, 130 after Ctrl-C."""

from __future__ import annotations

import typer

from meshweave.cli.calibrate import calibrate as calibrate_command
from meshweave.cli.move import move_command
from meshweave.cli.prove import check, plan_command
from meshweave.cli.simulate import explain_command, simulate_command
from meshweave.cli.train import run
from meshweave.compile import build_program

__all__ = ["app", "build_program", "main"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A communication compiler for distributed PyTorch training. MODEL is file.py:factory or "
    "hf:MODEL_TYPE?num_hidden_layers=2&hidden_size=64.",
)
app.command()(run)
app.command()(check)
app.command("plan")(plan_command)
app.command("explain")(explain_command)
app.command("simulate")(simulate_command)
app.command("move")(move_command)
app.command("calibrate")(calibrate_command)


def main() -> None:
    """The entry point of the command `meshweave`."""
    app()
