"""Steps of meshweave as it comes against DDP, FSDP2, tensor parallelism and torch.compile, in wall time, over Gloo.

    python benchmarks/step_time.py [--quick] [--json] [--write] [--only tp] [--layers 6] [--steps 8]
        [--eager]

Processes of this machine, one thread each, in network namespaces of their own with links of 1 or 10 Gbit/s between
them (veth and `tc tbf`; needs root), over the loopback, and one process alone. Every way to train has a job of its own
with a copy of the model of the same weights, so that nothing that a way sets in its process helps or harms another, and
all jobs take their steps on the same batches in turns, so that what disturbs the machine disturbs all alike. A turn is
two steps, of which the second counts: training takes step after step. A step ends when the slowest process has ended
it. Ours is `mw.compile` without a profile, a pass or any other flag, and once more compiled (`backend="inductor"`);
peers run eager and compiled, and the best of them counts. The ratio is that of ours without a flag. Peak memory is that
of the largest process, start included.

--json: one object with `fsdp_1gbit_ratio`, `ddp_1gbit_ratio`, `fsdp_accumulate_1gbit_ratio`,
`ddp_accumulate_1gbit_ratio` (4 microbatches), `tp_b1_1gbit_ratio`, `tp_b4_1gbit_ratio`, `loopback_worst_ratio`,
`solo_ratio` (medians, ours / best peer), the rows below them and the load of other processes.
--quick: two processes, Llama, 1 Gbit/s and loopback. --write: results/step_time.md. Losses of all ways must agree to
1e-5, or the command fails.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from links import Job, Link, joined, loopback, running
from step_time_worker import END, OURS, START, STEP, Config, variants, worker

STEP_TIME = str(Path(__file__).resolve())
TABLE = Path(__file__).parent / "results" / "step_time.md"
SAME_LOSS = 1e-5  # relative: sums in another order in float32


@dataclass(frozen=True)
class Row:
    """A configuration on a link. `key`: the ratio of the JSON object that it is."""

    config: Config
    num_ranks: int = 2
    gbit: int = 1  # 0: loopback
    key: str = ""

    @property
    def link(self) -> str:
        return "alone" if self.num_ranks == 1 else f"{self.gbit} Gbit/s" if self.gbit else "loopback"


QUICK = (
    Row(Config("fsdp", 1), key="fsdp_1gbit_ratio"),
    Row(Config("ddp", 1), key="ddp_1gbit_ratio"),
    Row(Config("fsdp", 1, accumulate=4), key="fsdp_accumulate_1gbit_ratio"),
    Row(Config("ddp", 1, accumulate=4), key="ddp_accumulate_1gbit_ratio"),
    Row(Config("tp", 1), key="tp_b1_1gbit_ratio"),
    Row(Config("tp", 4), key="tp_b4_1gbit_ratio"),
    Row(Config("fsdp", 1), gbit=0, key="loopback"),
    Row(Config("ddp", 1), gbit=0, key="loopback"),
    Row(Config("tp", 1), gbit=0, key="loopback"),
    Row(Config("solo", 1), 1, 0, "solo_ratio"),
)
FULL = (
    *QUICK,
    *(Row(Config(scheme, 1), gbit=10) for scheme in ("fsdp", "ddp", "tp")),
    *(Row(Config(scheme, 1, family)) for family in ("gpt2", "mixtral") for scheme in ("fsdp", "ddp")),
    *(Row(Config(scheme, 1), 4) for scheme in ("fsdp", "ddp", "tp", "fsdp+tp")),
)


def measure(rows: Sequence[Row], cache: str) -> list[dict[str, Any]]:
    """What every row took, in the order of links."""
    found = []
    for num_ranks, gbit in dict.fromkeys((row.num_ranks, row.gbit) for row in rows):
        with _link(num_ranks, gbit) as link:
            for row in (row for row in rows if (row.num_ranks, row.gbit) == (num_ranks, gbit)):
                found += compare(link, [row], cache)
    return found


def _link(num_ranks: int, gbit: int) -> AbstractContextManager[Link]:
    return joined(num_ranks, gbit) if gbit and num_ranks > 1 else loopback(num_ranks)


def compare(link: Link, rows: Sequence[Row], cache: str, at_once: int = 1) -> list[dict[str, Any]]:
    """What the rows took on a link; so many jobs start at the same time, and then those of a row take turns."""
    with ExitStack() as stack, ThreadPoolExecutor(at_once) as starting:
        jobs, starts = [], []
        for row in rows:
            told = (STEP_TIME, "--worker", json.dumps(asdict(row.config)), "--cache", cache, "--variant")
            jobs.append({n: stack.enter_context(link.talk(*told, n)) for n in variants(row.config)})
            starts.append({name: starting.submit(job.ask, START) for name, job in jobs[-1].items()})
        begun = [_begun(own) for own in starts]
        own_jobs = [{name: its[name] for name in names} for its, names in zip(jobs, begun, strict=True)]
        found = []
        for each in zip(rows, own_jobs, begun, strict=True):
            found.append(_row(link, *each))
            print(_line(found[-1]), file=sys.stderr, flush=True)
        return found


def _begun(starts: dict[str, Future[dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The first answers of the ways of a row. A peer that fails to start is left out, with its error on stderr."""
    begun = {}
    for name, start in starts.items():
        try:
            begun[name] = start.result()
        except RuntimeError as error:
            if name.startswith(OURS):
                raise
            print(error, file=sys.stderr, flush=True)
    return begun


def _row(link: Link, row: Row, jobs: dict[str, Job], starts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    name_of = "alone" if row.num_ranks == 1 else link.name
    shown = {"key": row.key, "link": name_of, "num_ranks": row.num_ranks, "config": str(row.config), "load": running()}
    names = list(jobs)
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for i in range(row.config.warm_up - 1 + row.config.steps):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            steps[name].append(jobs[name].ask(STEP))
    ends = {name: job.ask(END) for name, job in jobs.items()}
    seconds = {name: [step["seconds"] for step in taken[row.config.warm_up - 1 :]] for name, taken in steps.items()}
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    best = min((name for name in names if not name.startswith(OURS)), key=medians.__getitem__)
    return {
        **shown, "best_peer": best, "ratio": medians[OURS] / medians[best], "medians": medians, "seconds": seconds,
        "losses": {name: [step["loss"] for step in (starts[name], *steps[name])] for name in names},
        "starts": {name: start["seconds"] for name, start in starts.items()},
        "peaks": {name: end.pop("peak_bytes") for name, end in ends.items()},
        "collectives": {name: end.pop("collectives") for name, end in ends.items()},
        "sent_bytes": {name: end.pop("sent_bytes", 0) for name, end in ends.items()}, **ends[OURS],
    }  # fmt: skip


def loss_difference(found: dict[str, Any]) -> float:
    """The largest relative difference of any way's losses from the best peer's."""
    expected = found["losses"][found["best_peer"]]
    return max(abs(a / b - 1) for own in found["losses"].values() for a, b in zip(own, expected, strict=True))


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The object of --json."""
    ratios: dict[str, float] = {}
    for row in rows:
        if row["key"] == "loopback":
            ratios["loopback_worst_ratio"] = max(row["ratio"], ratios.get("loopback_worst_ratio", 0.0))
        elif row["key"]:
            ratios[row["key"]] = row["ratio"]
    names = ("key", "link", "num_ranks", "config", "load", "best_peer", "ratio", "medians", "starts",
             "predicted", "costs", "passes", "peaks", "collectives")  # fmt: skip
    return {
        **ratios,
        "worst_ratio": max(row["ratio"] for row in rows),
        "loss_difference": max(loss_difference(row) for row in rows),
        "rows": [{name: row[name] for name in names} for row in rows],
    }


def _line(row: dict[str, Any]) -> str:
    taken = ", ".join(f"{name} {_spread(row['seconds'][name])}" for name in row["seconds"])
    return (
        f"{row['link']}, {row['config']}: {row['ratio']:.2f}x of {row['best_peer']}; ms: {taken}; passes: "
        f"{row['passes']}; losses differ by {loss_difference(row):.1e}; load of others {row['load']:.1f}"
    )


def _spread(seconds: Sequence[float]) -> str:
    low, middle, high = statistics.quantiles(seconds, n=4)
    return f"{middle * 1e3:.0f} ({low * 1e3:.0f} - {high * 1e3:.0f})"


def _sent(row: dict[str, Any], name: str) -> str:
    size = row["sent_bytes"][name]
    return f"{row['collectives'][name]}, {size / 1e6:.0f} MB" if size else str(row["collectives"][name])


def page(rows: Sequence[dict[str, Any]]) -> str:
    parts = [
        "# Steps as they come, against peers",
        "",
        f"`python benchmarks/step_time.py`: processes on {os.cpu_count()} cores, one thread each; medians (middle "
        "half) in ms of steps that all ways take in turns. Ours without a profile, pass or flag. The load is that of "
        "other processes before the row, in processors: figures of a row with load are those of a busy machine.",
        "",
        "| link | processes | model | way | step ms | of the best peer | predicted ms | start to first loss s "
        "| collectives | peak GB | load |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        best = row["medians"][row["best_peer"]]
        for name, seconds in row["seconds"].items():
            predicted = row.get("predicted") if name == OURS else None
            cells = (
                row["link"], str(row["num_ranks"]), row["config"], name, _spread(seconds),
                f"{row['medians'][name] / best:.2f}", f"{predicted * 1e3:.0f}" if predicted else "",
                f"{row['starts'][name]:.1f}", _sent(row, name), f"{row['peaks'][name] / 1e9:.2f}",
                f"{row['load']:.1f}",
            )  # fmt: skip
            parts.append(f"| {' | '.join(cells)} |")
    parts += ["", "What meshweave chose:", ""]
    parts += [f"- {row['link']}, {row['config']}: {row['costs']}; passes: {row['passes']}" for row in rows]
    parts += ["", f"Losses of all ways differ by {max(map(loss_difference, rows)):.1e} at most, relatively."]
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument(
        "--only", default="", help="rows whose link and model have this in them, such as '1 Gbit/s, ll'"
    )
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--eager", action="store_true", help="nothing compiled, which takes minutes")
    parser.add_argument("--worker")
    parser.add_argument("--variant", default="")
    parser.add_argument("--cache", default="")
    options = parser.parse_args()
    if options.worker:
        os.environ["MESHWEAVE_CACHE"] = options.cache  # empty at first: what a calibration takes is in the figures
        worker(Config(**json.loads(options.worker)), options.variant)
        return 0
    rows = [
        replace(row, config=replace(row.config, layers=options.layers, steps=options.steps, compiles=not options.eager))
        for row in (QUICK if options.quick else FULL)
        if row.num_ranks == 1 or not row.gbit or not os.geteuid()
    ]
    rows = [row for row in rows if options.only in f"{row.link}, {row.config}"]
    if not rows:
        parser.error(f"no row has '{options.only}' in it (shaped links need root)")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(rows, folder)
    print(json.dumps(summary(found)) if options.json else page(found))
    if options.write:
        TABLE.write_text(page(found))
    is_same = max(map(loss_difference, found)) <= SAME_LOSS
    return 0 if is_same else 1


if __name__ == "__main__":
    raise SystemExit(main())
