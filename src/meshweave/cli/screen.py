"""What all commands share: their output, and how they end."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape

from meshweave.errors import MeshweaveError, StepError, VerifyError

Stage = Callable[[str], None]


@dataclass(slots=True)
class Screen:
    """Where a command writes: stdout, or stderr under --json; nowhere on any rank but the first. Details are written
    if `is_verbose`."""

    command: str
    json: bool
    is_verbose: bool = False
    out: Console = field(init=False)

    def __post_init__(self) -> None:
        self.out = Console(stderr=self.json, quiet=rank() != 0, highlight=False)
        if not self.out.is_terminal:
            self.out.width = 200

    def say(self, text: str) -> None:
        self.out.print(text, soft_wrap=True)

    def detail(self, text: str) -> None:
        if self.is_verbose:
            self.say(text)

    @contextmanager
    def stages(self, subject: str = "") -> Iterator[Stage]:
        """Show the stage that runs, and of what, in a line of stderr if that is a terminal; all stages and their total
        time among the details."""
        began = time.perf_counter()
        prefix = f"{subject}: " if subject else ""
        console = Console(stderr=True, quiet=rank() != 0, highlight=False)
        with console.status(f"{prefix}load") if console.is_terminal else nullcontext() as status:

            def begin(stage: str) -> None:
                if status is not None:
                    status.update(f"{prefix}{stage}")
                self.detail(f"[dim]{prefix}{stage} ...[/]")

            yield begin
        self.detail(f"[dim]{prefix}compiled in {time.perf_counter() - began:.1f} s[/]")

    def result(self, ok: bool, **values: Any) -> None:
        """The last line of stdout under --json."""
        if self.json and rank() == 0:
            sys.stdout.write(json.dumps({"command": self.command, "ok": ok, **values}) + "\n")
            sys.stdout.flush()


def attributes_of(record: object, *names: str) -> dict[str, Any]:
    """These attributes, for a JSON object."""
    return {name: getattr(record, name) for name in names}


def write_text(path: Path, text: str) -> None:
    """Write a file, or raise with the reason why not."""
    try:
        path.write_text(text)
    except OSError as error:
        raise MeshweaveError("the file cannot be written", where=str(path), got=str(error)) from error


def check_outputs(*paths: Path | None, folder: str = "") -> None:
    """Raises, before a command begins its work, if it could not write its results: files, and a checkpoint's folder,
    whose parents are created."""
    for path in filter(None, paths):
        _try_to_write(path.absolute().parent, path)
    if folder:
        parents = Path(folder).absolute().parents
        _try_to_write(next(parent for parent in parents if parent.exists()), Path(folder))


def _try_to_write(parent: Path, path: Path) -> None:
    try:
        tempfile.TemporaryDirectory(dir=parent, prefix=".meshweave-").cleanup()
    except OSError as error:
        got = f"{parent}: {error.strerror}"
        raise MeshweaveError(
            "the file cannot be written", where=str(path), got=got, expected="a path in a directory that can be written"
        ) from error


def rank() -> int:
    """This process's rank under torchrun, else 0."""
    return int(os.environ.get("RANK", "0"))


def guarded(screen: Screen, debug: bool, body: Callable[[Screen], int]) -> None:
    """Run a command and exit with its exit code."""
    try:
        with _cluster():
            code = body(screen)
    except KeyboardInterrupt:
        screen.say("[yellow]interrupted[/]")
        screen.result(False, error={"kind": "KeyboardInterrupt", "what": "interrupted"})
        code = 130
    except MeshweaveError as error:
        if debug:
            Console(stderr=True).print_exception()
        code = 1 if isinstance(error, (StepError, VerifyError)) else 2
        _show_error(screen, error)
    raise typer.Exit(code)


def _show_error(screen: Screen, error: MeshweaveError) -> None:
    title, _, rest = str(error).partition("\n")
    prefix = f"rank {rank()}: " if rank() else ""
    console = Console(stderr=True, highlight=False)
    console.print(
        f"{prefix}[bold red]error:[/] {escape(title)}" + (f"\n{escape(rest)}" if rest else ""), soft_wrap=True
    )
    parts = {name: getattr(error, name) for name in ("what", "where", "got", "expected", "hint")}
    screen.result(False, error={"kind": type(error).__name__, **parts})


@contextmanager
def _cluster() -> Iterator[None]:
    """Under torchrun: this process's place in the job, while the context lasts."""
    if not ("RANK" in os.environ and "WORLD_SIZE" in os.environ):
        yield
        return
    from meshweave.runtime import cluster

    cluster.init_from_env()
    yield
    cluster.shutdown()  # not after an error: others may be waiting for this rank, and torchrun ends them
