"""Trains a Llama on 4 virtual devices next to one device, and shows that they do the same: `make demo`.

The model is the Hugging Face class with a small configuration, the text the Python standard library's own sources,
read byte by byte. Parameters, gradients and optimizer state are sharded over dp (FSDP), matrices over tp.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from rich.console import Console
from torch import fx

import meshweave as mw
from meshweave.cli.sources import Source, load_source
from meshweave.report.tables import bytes_text, moves_table, totals_table

MODEL = "hf:llama?num_hidden_layers=4&hidden_size=144&num_attention_heads=4&intermediate_size=384"
BATCH, SEQ, STEPS, LR, CLIP = 8, 64, 50, 1e-3, 1.0
MESH, PLAN = "dp=2,tp=2", mw.Plan.fsdp("dp") + mw.Plan.hf_tp("tp")
# float32 rounding grows as training goes on. Measured: 3e-6 after these steps, on CPU with torch 2.13.
LARGEST_DIFFERENCE = 1e-4


@dataclass
class LiveBytes:
    """Most bytes alive at once on the first device while a step runs, its state aside. Storages count, not views."""

    live: dict[int, list[int]] = field(default_factory=dict)
    of: dict[fx.Node, list[int]] = field(default_factory=dict)
    now: int = 0
    peak: int = 0

    def on_value(self, index: int, node: fx.Node, value: Any) -> None:
        if index != 0:
            return
        tensors = value if isinstance(value, (tuple, list)) else [value]
        self.of[node] = []
        for storage in (t.untyped_storage() for t in tensors if isinstance(t, torch.Tensor)):
            held = self.live.setdefault(storage.data_ptr(), [0, storage.nbytes()])
            self.now += held[1] if held[0] == 0 else 0
            held[0] += 1
            self.of[node].append(storage.data_ptr())
        self.peak = max(self.peak, self.now)

    def freed(self, index: int, node: fx.Node) -> None:
        for pointer in self.of.pop(node, []) if index == 0 else ():
            held = self.live[pointer]
            held[0] -= 1
            if held[0] == 0:
                self.now -= self.live.pop(pointer)[1]


class Run:
    """One of the two trainings: its losses, its time and its memory."""

    def __init__(self, mesh: str, plan: mw.Plan | None, progress: Callable[[str], None]) -> None:
        self.source: Source = load_source(MODEL, batch=BATCH, seq=SEQ, seed=0)
        optimizer = torch.optim.AdamW(self.source.model.parameters(), lr=LR)
        self.step = mw.compile(
            self.source.model,
            loss=self.source.loss,
            example=self.source.batch,
            optimizer=optimizer,
            mesh=mesh,
            plan=plan,
            clip_grad_norm=CLIP,
            run=mw.RunOptions(progress=progress),
        )
        self.losses: list[float] = []
        self.seconds = 0.0
        self.meter = LiveBytes()

    def train(self, index: int) -> float:
        """One step. The first two are not timed: one warms up, the other is measured for its memory."""
        self.step.session.turns.meter = self.meter if index == 1 else None
        began = time.perf_counter()
        self.losses.append(float(self.step(self.source.make_batch(index))))
        self.seconds += time.perf_counter() - began if index > 1 else 0.0
        return self.losses[-1]

    @property
    def tokens_per_s(self) -> float:
        return (len(self.losses) - 2) * self.source.tokens_per_batch / self.seconds

    @property
    def state_bytes(self) -> int:
        """Parameters, buffers and optimizer state on the device that holds the most."""
        return max(self.step.session.state.num_bytes)


def bar(value: float, low: float, high: float, width: int = 40) -> str:
    return "█" * max(1, round((value - low) / (high - low) * width))


def main() -> int:
    began = time.perf_counter()
    torch.set_num_threads(1)  # the tensors are small: a second thread waits more than it works
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.rule("[bold]meshweave: one Llama, on 4 virtual devices and on one")
    mesh_run = Run(MESH, PLAN, lambda stage: console.print(f"[dim]{stage} ({MESH}) ...[/]"))
    single = Run("", None, lambda stage: console.print(f"[dim]{stage} (one device) ...[/]"))
    num_params = sum(p.numel() for p in single.source.model.parameters())
    console.print(
        f"{type(single.source.model).__name__}, {num_params / 1e6:.1f} M parameters, {BATCH} x {SEQ} bytes a step"
    )
    console.print(f"mesh {MESH}: FSDP over dp, Hugging Face's own tensor parallel plan over tp\n")

    console.rule("every movement of data in one step, as one device sees it", align="left")
    rows = mesh_run.step.explain()
    console.print(moves_table(rows))
    console.print(totals_table(rows))

    console.rule("training", align="left")
    console.print(f"{'step':>4}  {'4 devices':>10}  {'one device':>10}  {'difference':>10}")
    for i in range(STEPS):
        pair = mesh_run.train(i), single.train(i)
        if i % 5 == 0 or i == STEPS - 1:
            gap = abs(pair[0] - pair[1])
            console.print(f"{i + 1:>4}  {pair[0]:>10.5f}  {pair[1]:>10.5f}  {gap:>10.1e}  {bar(pair[0], 2.0, 5.7)}")
    return verdict(console, mesh_run, single, time.perf_counter() - began)


def verdict(console: Console, mesh_run: Run, single: Run, seconds: float) -> int:
    """Says what came out, and whether it is what was claimed: equal losses that fall, in less memory per device."""
    largest = max(abs(a - b) for a, b in zip(mesh_run.losses, single.losses, strict=True))
    console.rule("result", align="left")
    for name, run in (("4 devices", mesh_run), ("one device", single)):
        console.print(
            f"{name:>10}: loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}, {run.tokens_per_s:,.0f} tokens/s; a device "
            f"holds {bytes_text(run.state_bytes)} of parameters and optimizer state, and at its peak "
            f"{bytes_text(run.meter.peak)} of activations, gradients and gathered parameters"
        )
    console.print("[dim](virtual devices share one machine: 4 of them are no faster than one here)[/]")
    claims = {
        f"largest difference of the losses {largest:.1e} < {LARGEST_DIFFERENCE:.0e}": largest < LARGEST_DIFFERENCE,
        "the loss fell by a third": mesh_run.losses[-1] < 0.67 * mesh_run.losses[0],
        "each of 4 devices holds at most 0.27 of the state": mesh_run.state_bytes <= 0.27 * single.state_bytes,
    }
    ok = all(claims.values())
    said = "; ".join(text if held else f"NOT TRUE: {text}" for text, held in claims.items())
    console.print(f"{'[bold green]ok' if ok else '[bold red]FAILED'}[/]: {said} ({seconds:.0f} s)")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
