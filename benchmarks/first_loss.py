"""From the start of a process to its first loss, stage by stage: meshweave against DDP, FSDP2 and tensor parallelism.

    python benchmarks/first_loss.py [--only gpt,tp] [--virtual] [--write] [--json]

Two processes of this machine over the loopback, one thread each, and two virtual devices of one process. A job of
meshweave starts twice with an empty cache of programs (the machine is measured before, and its figures are cached),
of which the faster counts, then once with the program on disk. Seconds are of the wall, with those of the processor of
rank 0 beside them: the latter do not depend on what else runs. Peak memory is that of the process.

--profile FILE: cProfile of compile in rank 0. --programs DIRECTORY: the rank graphs as text, to compare two versions.
"""

from __future__ import annotations

import time

WALL, CPU = time.perf_counter(), time.process_time()

import argparse  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import resource  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable, Iterator  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from links import Link, loopback  # noqa: E402
from torch import Tensor, nn  # noqa: E402

SELF, TABLE = Path(__file__).resolve(), Path(__file__).parent / "results" / "first_loss.md"
Loss = Callable[[Any, Any], Tensor]


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, s, w = x.shape
        q, k, v = (t.view(b, s, self.heads, -1).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(w, dim=-1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(b, s, w))
        return x + self.down(nn.functional.gelu(self.up(self.ln2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, heads: int = 4, vocabulary: int = 512, sequence: int = 64) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(sequence, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp() -> tuple[nn.Module, Loss, dict[str, Tensor]]:
    layers = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
    batch = {"input": torch.randn(32, 256), "labels": torch.randint(0, 8, (32,))}
    return nn.Sequential(*layers, nn.Linear(256, 8)), _cross_entropy, batch


def gpt(layers: int = 4) -> tuple[nn.Module, Loss, dict[str, Tensor]]:
    ids = torch.randint(0, 512, (8, 64))
    return GPT(layers, 128), _cross_entropy, {"ids": ids, "labels": ids}


def llama(layers: int = 12) -> tuple[nn.Module, Loss, dict[str, Tensor]]:
    from step_time_worker import Config, make_model

    ids = torch.randint(0, 4096, (2, 256))
    return make_model(Config("", 1, layers=layers, hidden=384)), _own_loss, {"input_ids": ids, "labels": ids}


def _cross_entropy(out: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(out.flatten(0, -2), batch["labels"].flatten())


def _own_loss(out: Any, _: Any) -> Tensor:
    return out.loss


MODELS = {"mlp": mlp, "gpt": gpt, "gpt12": lambda: gpt(12), "llama": llama}
SCHEMES = ("dp", "fsdp", "tp")


class Clock:
    """Seconds of each stage, of the wall and of the processor, as [name, wall, cpu]."""

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []
        self._stage, self._wall, self._cpu = "imports", WALL, CPU

    def begin(self, stage: str) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        self.rows.append([self._stage, wall - self._wall, cpu - self._cpu])
        self._stage, self._wall, self._cpu = stage, wall, cpu


def worker(model_name: str, scheme: str, variant: str, profile: str, programs: str) -> None:
    clock = Clock()
    if variant != "peer":
        import meshweave as mw
    clock.begin("model")
    torch.manual_seed(0)
    model, loss, batch = MODELS[model_name]()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    if variant == "peer":
        clock.begin("wrap")
        step = _peer(model, loss, optimizer, scheme)
    else:
        clock.begin("connect")
        with _profiled(profile):
            step = mw.compile(
                model, loss=loss, example=batch, optimizer=optimizer, mesh=f"{scheme}=2",
                run=mw.RunOptions(progress=clock.begin), **({"forward": _called} if model_name == "llama" else {}),
            )  # fmt: skip
        if programs and not int(os.environ.get("RANK", 0)):
            path = Path(programs) / f"{model_name}-{scheme}-{variant}.txt"
            path.write_text("\n\n".join(str(role.graph) for role in step.program.roles))
    for stage in ("first step", "second step"):
        clock.begin(stage)
        value = float(step(batch))
    clock.begin("")
    if not int(os.environ.get("RANK", 0)):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(json.dumps({"stages": clock.rows, "peak_mib": peak, "loss": value}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _called(model: nn.Module, batch: dict[str, Tensor]) -> Any:
    return model(**batch, use_cache=False)


class _profiled:
    def __init__(self, path: str) -> None:
        self.path = path if not int(os.environ.get("RANK", 0)) else ""

    def __enter__(self) -> None:
        if self.path:
            import cProfile

            self.profile = cProfile.Profile()
            self.profile.enable()

    def __exit__(self, *_: object) -> None:
        if self.path:
            self.profile.disable()
            self.profile.dump_stats(self.path)


def _peer(model: nn.Module, loss: Loss, optimizer: torch.optim.Optimizer, scheme: str) -> Callable[[Any], Tensor]:
    """A step of the usual way: DDP, FSDP2 by block, tensor parallelism by column and row."""
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo")
    rank, mesh, wrapped = dist.get_rank(), init_device_mesh("cpu", (2,)), model
    if scheme == "dp":
        wrapped = nn.parallel.DistributedDataParallel(model)
    elif scheme == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for part in (*_layers(model), model):
            fully_shard(part, mesh=mesh)
    else:
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        column = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "up", "0", "4")
        row = ("o_proj", "down_proj", "down", "2", "6")
        names = {n: n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)}
        styles = {n: ColwiseParallel() if last in column else RowwiseParallel() for n, last in names.items()}
        chosen = {n: style for n, style in styles.items() if names[n] in (*column, *row)}
        parallelize_module(model, mesh, chosen)  # type: ignore[arg-type]
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    def step(batch: dict[str, Tensor]) -> Tensor:
        own = batch if scheme == "tp" else {name: value.chunk(2)[rank] for name, value in batch.items()}
        out = wrapped(**own, use_cache=False) if _has_loss(model) else wrapped(next(iter(own.values())))
        value = loss(out, own)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        return value.detach()

    return step


def _has_loss(model: nn.Module) -> bool:
    return hasattr(model, "config")


def _layers(model: Any) -> Any:
    if _has_loss(model):
        return model.model.layers
    return model.blocks if hasattr(model, "blocks") else [m for m in model if isinstance(m, nn.Linear)]


# The command


def measure(names: list[tuple[str, str]], virtual: bool, extra: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as cache, loopback(2) as link:
        os.environ["MESHWEAVE_CACHE"] = cache
        started = False
        for model, scheme in names:
            if not started and not virtual:
                start(link, model, scheme, "warm up", ())  # measures the machine
                started = True
            for variant in ("virtual",) if virtual else ("new", "new", "known", "peer"):
                if variant == "new":
                    shutil.rmtree(Path(cache) / "programs", ignore_errors=True)
                yield start(None if virtual else link, model, scheme, variant, extra)


def start(link: Link | None, model: str, scheme: str, variant: str, extra: tuple[str, ...]) -> dict[str, Any]:
    command = (str(SELF), "--worker", model, scheme, variant, *extra)
    began = time.perf_counter()
    if link is None:
        environment = {**os.environ, "PYTHONPATH": str(SELF.parents[1] / "src"), "OMP_NUM_THREADS": "1"}
        out = subprocess.run((sys.executable, *command), env=environment, check=True, capture_output=True, text=True)
        text = out.stdout
    else:
        text = link.run(*command)
    answer = json.loads(text.strip().splitlines()[-1])
    stages = dict[str, list[float]]()
    for name, wall, cpu in answer.pop("stages"):
        name = "calibrate" if name.startswith("calibrate") else name
        known = stages.setdefault(name, [0.0, 0.0])
        stages[name] = [known[0] + wall, known[1] + cpu]
    return {"model": model, "scheme": scheme, "variant": variant, "job_s": time.perf_counter() - began,
            "stages": stages, **answer}  # fmt: skip


OUTSIDE = ("imports", "model", "calibrate", "wrap", "first step", "second step")


def compile_cpu(row: dict[str, Any]) -> float:
    return sum(cpu for name, (_, cpu) in row["stages"].items() if name not in OUTSIDE)


def first_loss(row: dict[str, Any]) -> float:
    return sum(wall for name, (wall, _) in row["stages"].items() if name != "second step")


def line(row: dict[str, Any]) -> str:
    stages = ", ".join(f"{name} {cpu:.2f}" for name, (_, cpu) in row["stages"].items() if cpu >= 0.05)
    return (
        f"| {row['model']} | {row['scheme']} | {row['variant']} | {first_loss(row):.1f} | {compile_cpu(row):.1f} "
        f"| {row['peak_mib']:.0f} | {stages} |"
    )


HEAD = """| model | mesh | start | first loss, s | compile, cpu s | peak MiB | cpu seconds by stage |
|---|---|---|---|---|---|---|"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worker", nargs=3)
    parser.add_argument("--only", default="")
    for name in ("--virtual", "--json", "--write"):
        parser.add_argument(name, action="store_true")
    for name in ("--profile", "--programs"):
        parser.add_argument(name, default="")
    options = parser.parse_args()
    if options.worker:
        worker(*options.worker, options.profile, options.programs)
        return
    only = set(options.only.split(",")) - {""}
    models = [name for name in MODELS if name in only] or list(MODELS)
    schemes = [name for name in SCHEMES if name in only] or list(SCHEMES)
    extra = ("--profile", options.profile) if options.profile else ()
    extra += ("--programs", options.programs) if options.programs else ()
    rows, lines = [], [HEAD]
    print(HEAD, flush=True)
    for row in measure([(model, scheme) for model in models for scheme in schemes], options.virtual, extra):
        rows.append(row)
        lines.append(line(row))
        print(json.dumps(row) if options.json else lines[-1], flush=True)
    if options.write:
        TABLE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
