"""The overlap pass on graphs that others have dumped: Llama-8B and DeepSeek-V3 of autoparallel's overlap simulator.

    python benchmarks/overlap_dumped.py CHECKOUT/tools/overlap_simulator           # every graph, a table
    python benchmarks/overlap_dumped.py CHECKOUT/tools/overlap_simulator llama3_8b_bw_64_2d --write

CHECKOUT is a checkout of github.com/meta-pytorch/autoparallel, whose files `repro_NAME.py` are graphs and `*.table`
seconds of collectives by bytes; nothing of it is copied here. Collectives without a row in the table of their graph,
and all kernels, cost what `overlap_judge.Costs` says. `--write` replaces the rows of these graphs in the last section
of results/overlap.md. Forward graphs of DeepSeek-V3 read numbers on the host and cannot be traced.
"""

from __future__ import annotations

import argparse
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import overlap_judge
import overlap_list
import torch
import torch.distributed as dist
from overlap_judge import (
    FLOPS,
    HBM,
    INTER_NODE,
    NVLINK,
    Costs,
    Verdict,
    collective_of,
    group_of,
    tensor_bytes,
    value_of,
)
from overlap_list import pool
from overlap_passes import FEW, OWN_INCREASE, Result, original_of, prepare_inductor, run_inductor, run_ours
from overlap_table import DUMPED
from torch import Tensor, fx
from torch._higher_order_ops.flex_attention import flex_attention_backward
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

TABLE = Path(__file__).parent / "results" / "overlap.md"
ABOUT = """\
`python benchmarks/overlap_dumped.py`: graphs of github.com/meta-pytorch/autoparallel (tools/overlap_simulator), with
its tables of seconds of collectives. Inductor is at the fastest of three settings, the list scheduler (overlap_list.py)
at the fastest of three windows with three sets of buckets; of orders over the default cap (5% or 512 MiB above the
graph as dumped), only where none is under it. Demands: ours at most 1.002 of Inductor, 1.003 of the list scheduler. CPU
seconds are those of a single run, beside other load."""
MIB = 2**20
ROWS = {  # of the tables
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_reduce": "all_reduce",
}
Groups = dict[str, tuple[int, ...]]


class Inputs:
    """What a dumped graph asks for its inputs: fake tensors."""

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode, self.args = mode, list[Any]()

    def storage(self, key: str | None, num_bytes: int, *, device: Any = None, dtype_hint: Any = None) -> Any:
        return device or "cpu"

    def tensor(self, device: Any, shape: Sequence[int], stride: Any = None, *, dtype: Any = None, **rest: Any) -> None:
        strides = stride or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        with self.mode:
            tensor = torch.empty_strided(shape, strides, dtype=dtype or torch.float32, device=device)
        self.args.append(tensor)

    def symint(self, value: int) -> None:
        self.args.append(value)


def load_graph(folder: Path, name: str) -> tuple[fx.GraphModule, Groups, ModuleType]:
    """The graph, the ranks of its groups, and the module that it comes from. Kernels in Triton are left out."""
    source = (folder / f"repro_{name}.py").read_text().replace("device(type='cuda', index=0)", "device(type='cpu')")
    lines, is_kernel = list[str](), False
    for line in source.splitlines():
        is_kernel = line.startswith("@triton.jit") or (is_kernel and line[:1] in ("", " ", ")", "d"))
        if not is_kernel and "kernel_side_table" not in line and not line.startswith(("import triton", "os.environ")):
            lines.append(line)
    module = ModuleType(name)
    exec(compile("\n".join(lines), name, "exec"), module.__dict__)
    groups = {group: tuple(range(row["size"])) for group, row in module.get_pg_config().items()}
    register_groups(groups)
    # torch copies a result into other strides on the device itself, which is not there
    sys.modules["torch._higher_order_ops.flex_attention"]._permute_strides = restride  # type: ignore[attr-defined]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    inputs = Inputs(mode)
    module.load_args(inputs)
    with torch.no_grad(), mode:
        graph_module = make_fx(module.Repro(), tracing_mode="fake")(*inputs.args)
    names = list(inspect.signature(module.Repro.forward).parameters)[1:]
    for k, (node, own) in enumerate(zip(graph_module.graph.find_nodes(op="placeholder"), names, strict=True)):
        node.name = own if own.startswith(("primals", "tangents")) else f"saved_{k}"  # what may be freed
    return graph_module, groups, module


def register_groups(groups: Groups) -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    world = max(map(len, groups.values()))
    dist.init_process_group(backend="fake", rank=0, world_size=world, store=FakeStore())
    whole = dist.distributed_c10d._get_default_group()
    process_groups = {name: whole if len(ranks) == world else dist.new_group(ranks) for name, ranks in groups.items()}
    torch._C._distributed_c10d._unregister_all_process_groups()
    for name, group in process_groups.items():
        torch._C._distributed_c10d._register_process_group(name, group)


def restride(out: Tensor, strides: Sequence[int]) -> Tensor:
    dims = sorted(range(out.dim()), key=lambda d: strides[d])
    new = dict(zip(dims, (math.prod(out.shape[d] for d in dims[:k]) for k in range(len(dims))), strict=True))
    return out.new_empty_strided(out.shape, [new[d] for d in range(out.dim())])


def table_of(folder: Path, module: ModuleType, groups: Groups) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """By group and collective the points (operand bytes, seconds) of the table."""
    head, _, *rows = (folder / module.get_colls_estimations_file()).read_text().splitlines()
    sizes = [float(word[:-2]) * MIB for word in head.split() if word.endswith("MB")]
    mapping = module.get_colls_group_mapping() if hasattr(module, "get_colls_group_mapping") else None
    points = {}
    for row in filter(str.strip, rows):
        theirs, size, collective, *times = row.split()
        for group, ranks in groups.items():
            is_same = mapping[group] == theirs if mapping else group == theirs
            if is_same and (mapping or collective == "all_reduce" or len(ranks) == int(size)):
                points[group, collective] = list(zip(sizes, (float(t) * 1e-3 for t in times), strict=True))
    return points


def costs_of(folder: Path, module: ModuleType, groups: Groups) -> Callable[..., float]:
    points = table_of(folder, module, groups)
    mapping = module.get_colls_group_mapping() if hasattr(module, "get_colls_group_mapping") else {}
    links = {group: NVLINK if mapping.get(group, group) == "1" else INTER_NODE for group in groups}
    plain = Costs(links, {group: len(ranks) for group, ranks in groups.items()})

    def seconds(node: fx.Node, num_bytes: int | None = None) -> float:
        kind = collective_of(node)
        if kind is not None:
            known = points.get((group_of(node), ROWS.get(kind, "")))
            size = tensor_bytes([value_of(arg) for arg in tree_leaves(node.args[0])])
            return between(known, size if num_bytes is None else num_bytes) if known else plain(node, num_bytes)
        flops = extra_flops(node)
        moved = tensor_bytes([node.meta.get("val"), [value_of(n) for n in node.all_input_nodes]]) if flops else 0
        return max(flops / FLOPS, moved / HBM) if flops else plain(node)

    return seconds


def extra_flops(node: fx.Node) -> float:
    """Of ops that the judge does not know: grouped matmuls and flex attention, half of whose square is masked."""
    if node.target is torch.ops.aten._grouped_mm.default:
        left, right = (value_of(arg) for arg in node.args[:2])
        return 2.0 * left.numel() * right.shape[-1]
    if node.target is not flex_attention_backward:
        return 0.0
    q, k, v = (value_of(arg).shape for arg in node.args[:3])
    return 2.5 * math.prod(q[:-1]) * k[-2] * (q[-1] + v[-1])


def between(points: Sequence[tuple[float, float]], size: float) -> float:
    """Linear between points and after the last, constant before the first."""
    if size <= points[0][0]:
        return points[0][1]
    k = next((k for k in range(1, len(points)) if size <= points[k][0]), len(points) - 1)
    (a, x), (b, y) = points[k - 1], points[k]
    return x + (y - x) * (size - a) / (b - a)


@dataclass(frozen=True)
class Row:
    """A graph by the judge."""

    name: str
    num_nodes: int
    bound: float
    original: Verdict
    inductor: tuple[str, Verdict]
    plain: tuple[str, Verdict]
    ours: Result

    def cells(self) -> tuple[str, ...]:
        ours = self.ours.verdict
        return (
            self.name,
            f"{self.num_nodes:,}",
            show(self.original),
            *(f"{show(verdict)}, {setting}" for setting, verdict in (self.inductor, self.plain)),
            show(ours),
            *(f"{ours.seconds / verdict.seconds:.3f}" for _, verdict in (self.inductor, self.plain)),
            f"{self.bound * 1e3:.1f}",
            f"{ours.seconds / self.bound:.3f}",
            f"{self.ours.taken.cpu:.1f}",
        )


TITLES = (
    *("graph", "nodes", "as dumped ms (GiB)", "Inductor ms (GiB)", "list scheduler ms (GiB)", "meshweave ms (GiB)"),
    *("of Inductor", "of the list scheduler", "bound ms", "of bound", "CPU s of the pass"),
)


def show(verdict: Verdict) -> str:
    return f"{verdict.seconds * 1e3:.1f} ({verdict.peak_bytes / 2**30:.2f})"


def run(folder: Path, name: str) -> Row:
    module, groups, source = load_graph(folder, name)
    costs: Any = costs_of(folder, source, groups)
    original = original_of(module, costs)
    ours, bound = run_ours(module, costs, groups, None, 1)
    peak = original.verdict.peak_bytes
    cap = max(int(peak * (1 + OWN_INCREASE[0])), peak + OWN_INCREASE[1])
    plain = fastest(list(pool(module, costs)), cap)
    inductor = fastest([(result.name, result.verdict) for result in run_settings(module, costs)], cap)
    return Row(name, len(module.graph.nodes), bound, original.verdict, inductor, plain, ours)


def fastest(rows: Sequence[tuple[str, Verdict]], cap: int) -> tuple[str, Verdict]:
    """Of those under the cap; of all if none is."""
    fitting = [row for row in rows if row[1].peak_bytes <= cap]
    return min(fitting or rows, key=lambda row: row[1].seconds)


def run_settings(module: fx.GraphModule, costs: Any) -> Iterator[Result]:
    """Inductor's settings, but for those in which its pass fails on the graph."""
    for setting in FEW:
        try:
            result = run_inductor(module, costs, setting, 1)
        except Exception as error:  # whatever it is: the others count
            print(f"  Inductor, {setting}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        else:
            print(f"  Inductor, {setting}: {result.verdict.seconds * 1e3:.1f} ms", flush=True)
            yield result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*", help="of graphs: repro_NAME.py; default: all that can be traced")
    parser.add_argument("--write", action="store_true", help="write results/overlap.md")
    options = parser.parse_args()
    prepare_inductor()
    plain_free = overlap_judge.is_free
    for user in (overlap_judge, overlap_list):
        user.is_free = lambda node: node.target is not flex_attention_backward and plain_free(node)  # type: ignore[attr-defined]
    dumped = (path.stem.removeprefix("repro_") for path in sorted(options.folder.glob("repro_*.py")))
    for name in options.names or [name for name in dumped if not name.startswith("dsv3_fw")]:
        row = run(options.folder, name).cells()
        print(" | ".join(row), flush=True)
        if options.write:
            write(row)


def write(row: Sequence[str]) -> None:
    """Replace a row of the table, or add it."""
    text, _, rest = TABLE.read_text().partition(DUMPED)
    rows = {line.split(" | ")[0][2:]: line for line in rest.splitlines() if line.startswith("| ")}
    rows.pop(TITLES[0], None)
    rows[row[0]] = f"| {' | '.join(row)} |"
    table = (f"| {' | '.join(TITLES)} |", "|---" * len(TITLES) + "|", *(rows[name] for name in sorted(rows)))
    TABLE.write_text("\n".join((text + DUMPED, "", ABOUT, "", *table)) + "\n")


if __name__ == "__main__":
    main()
