"""Pipelines of 4 processes, each behind a link of 1 Gbit/s, beside torch.distributed.pipelining on the same stages.

python benchmarks/pipelines.py    # as root, for network namespaces; some 5 minutes; writes results/pipelines.md
"""

from __future__ import annotations

import json
from pathlib import Path

from links import loopback, star

import meshweave as mw

TABLE, WORKER = Path(__file__).parent / "results" / "pipelines.md", str(Path(__file__).parent / "pipelines_worker.py")
RANKS, MICROBATCHES, ROUNDS = 4, 8, 7
LAYER_S, WIDTH, ROWS = 0.01, 8192, 64  # F, I and W of a layer; a message has ROWS x WIDTH floats: 2 MiB
BYTES_PER_S = 1e9 / 8
PER_RANK = {"interleaved": 2, "zbv": 2}


def predicted(name: str, seconds_of_message: float) -> float:
    """Seconds of a step by the clock of schedules, from what stages sleep and the bandwidth of a link."""
    schedule = mw.make_schedule(name, RANKS, MICROBATCHES)
    own = 2 * LAYER_S / PER_RANK.get(name, 1)
    return mw.pipeline_times(schedule, F=own, B=own, W=own, comm=seconds_of_message).step_s


def main() -> None:
    lines = [
        "# Pipelines that run",
        "",
        f"{RANKS} processes on 2 cores, {MICROBATCHES} microbatches; two layers a process, whose F, I and W sleep "
        f"{LAYER_S * 1e3:.0f} ms each; messages of {ROWS * WIDTH * 4 / 2**20:.0f} MiB. All ways in one job, in turns, "
        f"median of {ROUNDS} steps in seconds; as they come, without flags. `clock`: `mw.pipeline_times` from what "
        "stages sleep, and the bandwidth of a link; messages do not queue in it. Written by benchmarks/pipelines.py.",
        "",
    ]
    for manager, message_s in ((loopback(RANKS), 0.0), (star(RANKS), ROWS * WIDTH * 4 / BYTES_PER_S)):
        with manager as link:
            out = link.run(WORKER, str(LAYER_S), str(WIDTH), str(ROWS), str(ROUNDS))
        found = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
        lines += [f"## {link.name}", "", "| schedule | meshweave | torch | ratio | clock |", "|---|---|---|---|---|"]
        for name, seconds in found.items():
            if name.startswith("torch"):
                continue
            peers = [found[each] for each in (f"torch {name}", f"torch {name}, compiled") if each in found]
            of_peer = f"{min(peers):.3f} | {seconds / min(peers):.2f}" if peers else " | "
            clock = "" if name == "sequential" else f"{predicted(name, message_s):.3f}"
            lines.append(f"| {name} | {seconds:.3f} | {of_peer} | {clock} |")
        one = found["1f1b"]
        lines += ["", f"1f1b: {found['sequential'] / one:.2f}x of stages one after the other.", ""]
        TABLE.write_text("\n".join(lines))
        print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
