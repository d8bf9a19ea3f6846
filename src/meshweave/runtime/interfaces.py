"""What the rooms of a process's part of a mesh ask of each other: a world, its executors, who observes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from meshweave.ir.graph import Spec
from meshweave.ir.layout import Layout
from meshweave.ir.mesh import Mesh
from meshweave.ir.rank import RankGraph
from meshweave.runtime.executor import After, Compiled, Env, Meter, Task


class Observer(Protocol):
    """Gets the times of what local devices do: `runtime.tracing.Recorder`, and counters in tests."""

    def mark(self) -> Any:
        """A moment."""
        ...

    def ran(self, index: int, task: Task, began: Any) -> None: ...

    def copied(self, index: int, start: fx.Node, began: Any) -> None: ...

    def action_begins(self) -> None: ...

    def begun(self, works: Iterable[Any]) -> None: ...


class Communicator(Protocol):
    """Starts the communications of a single device and waits for them."""

    recorder: Observer | None
    microbatch: int  # of what is started next

    def start(self, graph: RankGraph, node: fx.Node, operand: Any, args: Sequence[Any], is_owned: bool = False) -> Any:
        """Begin the communication of a node of a rank graph; `args` are those of the node without the operand. Nobody
        else reads an owned operand, so its memory may be written."""
        ...

    def wait(self, started: Any, node: fx.Node | None = None) -> Any:
        """The finished value of a start, which `node` of a rank graph has begun."""
        ...

    def finish_sends(self, waits: bool) -> None:
        """Release what has been sent to other stages and received; or wait until all is."""
        ...


class Executor(Protocol):
    """Runs the actions of a microbatch on all local devices, each with an environment."""

    meter: Meter | None

    def record(self, recorder: Any) -> None:
        """Report every task to an observer from now on, or to none."""
        ...

    def environment(self) -> list[Env]:
        """A fresh environment per local device, with its symbols filled in."""
        ...

    def begin(self, envs: list[Env], microbatch: int = 0) -> None:
        """Go on with a microbatch, of which the environments have what was computed so far."""
        ...

    def post(self, action: str, envs: list[Env], microbatch: int) -> None:
        """Begin what an action of a microbatch receives from other stages, before or at its begin."""
        ...

    def finish_sends(self, waits: bool) -> None:
        """Release what other stages have received; or wait until they have received all."""
        ...

    def run(self, action: str, after: After | None = None) -> None:
        """Run an action of the microbatch to its end.

        `after(i, task)` is called when new parameters or optimizer state are available on local device i. Raises
        StepError when a task fails."""
        ...

    def run_piece(self, action: str, stops: tuple[str, ...], index: int) -> None:
        """Run a piece of an action, which is cut before the waits with these names."""
        ...

    def end(self) -> None:
        """Release the values of the microbatch."""
        ...


class World(Protocol):
    """A process's part of a mesh: `devices` are the ids of its devices, all of which compute on `device`."""

    mesh: Mesh
    device: torch.device

    @property
    def devices(self) -> tuple[int, ...]: ...

    @property
    def is_distributed(self) -> bool:
        """Whether the mesh has several processes (`runtime.cluster.ClusterWorld`)."""
        ...

    def executor(
        self,
        roles: Sequence[RankGraph],
        ranks: Sequence[Compiled],
        meter: Meter | None,
        places: Sequence[int] | None = None,
    ) -> Executor:
        """The executor of `ranks[i]` on local device i, or on local device `places[i]`, one of those that run a stage.
        Every process calls it, with the same `roles`, before the first step."""
        ...

    def assemble(self, spec: Spec, layout: Layout, pieces: Sequence[Tensor]) -> Tensor:
        """The full tensor from the pieces on the local devices in the layout's mesh. All processes call it."""
        ...

    def has_whole(self, layout: Layout) -> bool:
        """Whether every process has the whole value of this layout, so that assembling it communicates nothing."""
        ...

    def guard(self) -> AbstractContextManager[None]:
        """A context in which a failure of a process is an error in every process."""
        ...

    def call(self, name: str, detail: Any = (), *, meets: bool | None = None) -> AbstractContextManager[None]:
        """`guard`, for a user's call that every process makes."""
        ...

    def note(self, choice: str) -> None:
        """What this process does in the current call, by its own decision: shown if processes differ."""
        ...

    def check(self) -> None:
        """Raise StepError once another process has failed."""
        ...

    def meet(self) -> None:
        """Wait until every process is here."""
        ...
