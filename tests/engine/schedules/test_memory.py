"""Peaks of activations, beside the memory that published runs needed."""

from __future__ import annotations

import pytest

from meshweave.engine.schedules import ActivationMemory, make_schedule, peak_activations

# Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), tables 4 and 9: the first and the last stage have an
# embedding in place of a layer, each; attention scores are kept. Of these: layers, heads, width.
MODELS = {"1.5B": (22, 24, 2304), "6.2B": (30, 32, 4096)}
TOKENS, VOCABULARY = 1024, 50257
BYTES = 18  # of a parameter: 16 bits, gradient, master and two moments in 32 (Megatron-LM)


@pytest.mark.parametrize(
    ("model", "schedule", "ranks", "stages_per_rank", "rows", "gigabytes"),
    [
        ("1.5B", "1f1b", 8, 1, 6, 30),
        ("1.5B", "interleaved", 8, 3, 6, 40),
        ("1.5B", "zb-1p", 8, 1, 6, 32),
        ("1.5B", "zb-2p", 8, 1, 6, 59),
        ("6.2B", "1f1b", 8, 1, 3, 39),
        ("6.2B", "interleaved", 8, 4, 3, 48),
        ("6.2B", "zb-1p", 8, 1, 3, 42),
        ("6.2B", "zb-2p", 8, 1, 3, 70),
        ("6.2B", "1f1b", 16, 1, 6, 61),
        ("6.2B", "zb-1p", 16, 1, 6, 62),
        ("6.2B", "zb-2p", 16, 1, 3, 64),
        ("6.2B", "zbv", 16, 2, 6, 64),
    ],
)
def test_published_memory(
    model: str, schedule: str, ranks: int, stages_per_rank: int, rows: int, gigabytes: float
) -> None:
    layers, heads, width = MODELS[model]
    stages = ranks * stages_per_rank
    sizes = [(layers + 2) // stages] * stages
    sizes[0] -= 1
    sizes[-1] -= 1
    layer = rows * TOKENS * width * (34 + 5 * heads * TOKENS / width)  # bytes, as `of_transformer`
    share = ActivationMemory.of_transformer(heads, TOKENS, width).after_input
    assert isinstance(share, float)
    memory = ActivationMemory([n * layer for n in sizes], [n * layer * share for n in sizes])
    its = make_schedule(schedule, ranks, 3 * ranks, stages_per_rank)
    peaks = []
    for peak, numbers in zip(peak_activations(its, memory), its.stages_of_role, strict=True):
        parameters = sum(12 * width**2 * sizes[n] + VOCABULARY * width * (n in (0, stages - 1)) for n in numbers)
        peaks.append(peak + BYTES * parameters)
    assert max(peaks) / 1e9 == pytest.approx(gigabytes, rel=0.08)
