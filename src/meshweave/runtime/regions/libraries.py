"""The library that runs a matmul on a processor: ATen's BLAS, or oneDNN where it is faster on this machine.

MKL, the BLAS of torch on x86, has no kernels with 512-bit vectors for processors of other makers than its own: there
oneDNN multiplies float32 matrices in half the time (AMD EPYC, 1 and 2 threads, torch 2.13, 2026-11: 230 instead of 105
GFLOP/s of a core). Both compute in float32 and add in different orders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from meshweave.disk_cache import CacheEntry, cache_directory, machine_of
from meshweave.errors import MeshweaveError
from meshweave.interop import onednn
from meshweave.interop.fake import unset_fake_temporarily
from meshweave.interop.process_groups import store_of_job
from meshweave.ir.values import Values

aten, ours = torch.ops.aten, torch.ops.meshweave
MM, ONEDNN_MM, ADDMM = aten.mm.default, ours.onednn_mm.default, aten.addmm.default
Form = tuple[tuple[int, ...], tuple[int, ...], torch.dtype]  # shape, stride and dtype of a tensor
ONEDNN, ATEN = "oneDNN", "ATen"  # names of libraries

# oneDNN's calls take 12 us instead of 1, and it copies a transposed left operand, which takes long beside few columns.
# On that machine nothing beyond these sizes was slower (18 shapes, each of the three products of a linear layer).
LEAST_FLOPS, LEAST_DIM, LEAST_COLUMNS = 8e6, 16, 128
FORMAT = 1  # version of the cached choice
_SHAPES = ((256, 512, 512), (64, 1024, 256))
_LEAST_GAIN, _ROUNDS = 1.15, 5


@dataclass(frozen=True, slots=True)
class Libraries:
    """Which library runs each matmul. All ranks of a job use the same, or replicas of a value would diverge."""

    has_onednn: bool = False

    @staticmethod
    def agreed(device: torch.device, any_rank: Callable[[bool], bool] = lambda flag: flag) -> Libraries:
        """The libraries of this job: what its first call decided, on whichever rank, without waiting for the others.

        oneDNN if it is faster on this machine, or, where ranks meet in this call, on the machines of all of them:
        `any_rank(flag)` is whether any rank passes True. Raises MeshweaveError if the job has decided for oneDNN and
        this process has none.
        """
        name = ATEN if any_rank(faster_library(device) != ONEDNN) else ONEDNN
        store = store_of_job() if device.type == "cpu" else None
        if store is not None:  # a script that turns oneDNN off decides anew
            name = store.compare_set(f"meshweave/libraries/{onednn.settings()}", "", name).decode()
        if name == ONEDNN and not onednn.is_exact():
            raise MeshweaveError(
                "ranks have different builds of torch: their matmuls would round differently",
                got="no oneDNN in this process",
                expected="oneDNN, by which other ranks of this job multiply",
                hint="install the same torch everywhere, or set torch.backends.mkldnn.enabled = False on all ranks",
            )
        return Libraries(name == ONEDNN)

    def kernel(self, node: fx.Node, values: Mapping[fx.Node, Values]) -> Any:
        """The op that computes a node: its own target, or the same op of another library."""
        if not self.has_onednn or node.target is not MM:
            return node.target
        (a,), (b,) = (values[operand] for operand in node.args)  # type: ignore[index]
        return ONEDNN_MM if _suits((a.shape, a.stride, a.dtype), (b.shape, b.stride, b.dtype)) else MM

    def product(self, a: Tensor, b: Tensor) -> Any:
        """The op that multiplies two matrices (real or fake) on a processor. Sizes that are known only at run time stay
        with ATen."""
        if not self.has_onednn or any(type(size) is not int for x in (a, b) for size in (*x.shape, *x.stride())):
            return MM
        forms = ((tuple(x.shape), x.stride(), x.dtype) for x in (a, b))
        return ONEDNN_MM if _suits(*forms) else MM


def choose_in(graph: fx.Graph) -> bool:
    """Run the matmuls of a compiler's graph (ATen ops, fake tensors in `meta["val"]`) by the job's libraries, in place;
    returns whether the graph has changed. The sum of an `addmm` becomes an op of its own, which compilers fuse."""
    every, products = Libraries(True), []
    for node in graph.nodes:
        if node.target is MM or (node.target is ADDMM and not node.kwargs and len(node.args) == 3):
            a, b = (operand.meta["val"] for operand in node.args[-2:])
            if a.device.type == "cpu" and every.product(a, b) is ONEDNN_MM:
                products.append(node)
    if not products or not Libraries.agreed(torch.device("cpu")).has_onednn:
        return False
    for node in products:
        if node.target is ADDMM:
            _split_sum(node)
        else:
            node.target = ONEDNN_MM
    return True


def _split_sum(node: fx.Node) -> None:
    bias, *factors = node.args
    with node.graph.inserting_before(node):
        product = node.graph.call_function(ONEDNN_MM, tuple(factors))
    product.meta = dict(node.meta)
    node.target, node.args = aten.add.Tensor, (product, bias)


def _suits(a: Form, b: Form) -> bool:
    """Whether oneDNN multiplies operands of these forms faster."""
    ((m, k), a_stride, a_dtype), ((_, n), b_stride, b_dtype) = a, b
    is_copied = a_stride != (k, 1)
    is_dense = b_stride in ((n, 1), (1, k))
    least = min(m, n, k) >= LEAST_DIM and 2.0 * m * n * k >= LEAST_FLOPS
    is_float32 = a_dtype == b_dtype == torch.float32
    return is_float32 and is_dense and least and (n >= LEAST_COLUMNS or not is_copied)


def faster_library(device: torch.device) -> str:
    """The name of the library with the faster matmuls on this machine: measured once (50 ms), and cached. Processes
    that ask together get one answer: profiles are cached by it, and the libraries may be about as fast."""
    if device.type != "cpu" or not onednn.is_exact():
        return ATEN
    key = {"format": FORMAT, "torch": torch.__version__, **machine_of(device)}
    entry = CacheEntry(cache_directory() / "libraries", json.dumps(key), ".txt")
    name = entry.read()[0].decode()
    if name in (ONEDNN, ATEN):
        return name
    with entry.lock():
        name = entry.read()[0].decode()
        if name not in (ONEDNN, ATEN):
            with unset_fake_temporarily():  # compilers of graphs run under a fake mode
                name = ONEDNN if _gain() >= _LEAST_GAIN else ATEN
            entry.write(name.encode())
    return name


def _gain() -> float:
    """How many times as fast oneDNN is, over the three products of linear layers."""
    operands = [pair for shape in _SHAPES for pair in _pairs(*shape)]
    return _fastest(torch.mm, operands) / _fastest(onednn.mm, operands)


def _pairs(m: int, n: int, k: int) -> Iterable[tuple[Tensor, Tensor]]:
    x, weight, grad = (torch.ones(*size, dtype=torch.float32, device="cpu") for size in ((m, k), (n, k), (m, n)))
    return (x, weight.t()), (grad, weight), (grad.t(), x)


def _fastest(multiply: Callable[[Tensor, Tensor], Tensor], operands: Sequence[tuple[Tensor, Tensor]]) -> float:
    """Seconds for all products, the fastest of some rounds of each: the first is not warm."""
    total = 0.0
    with torch.no_grad():
        for a, b in operands:
            seconds = []
            for _ in range(_ROUNDS):
                began = time.perf_counter()
                multiply(a, b)
                seconds.append(time.perf_counter() - began)
            total += min(seconds)
    return total
