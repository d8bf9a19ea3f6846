"""Runs of the zero-bubble paper (Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, tables 3, 4, 5 and 9):
GPT-3-like models on 8 A100-80GB, one stage each, or several where interleaved."""

from __future__ import annotations

from dataclasses import dataclass

from meshweave.engine.schedules import ActivationMemory

RANKS = 8
NAMES = {
    "1F1B": "1f1b", "1F1B-I": "interleaved", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "ZB-1p": "zb-1p", "ZB-2p": "zb-2p",
}  # fmt: skip


@dataclass(frozen=True)
class Setting:
    """A model and number of microbatches: times of a rank's work on a microbatch in milliseconds, with T_B the input
    part; attention heads, tokens and width; rows of a microbatch."""

    model: str
    microbatches: int
    F: float
    B: float
    W: float
    comm: float
    heads: int
    tokens: int
    width: int
    rows: int

    def seconds(self, stages_per_rank: int = 1) -> dict[str, float]:
        """Of a stage."""
        parts = {"F": self.F, "B": self.B, "W": self.W}
        return {name: ms / 1e3 / stages_per_rank for name, ms in parts.items()} | {"comm": self.comm / 1e3}

    @property
    def memory(self) -> ActivationMemory:
        return ActivationMemory.of_transformer(self.heads, self.tokens, self.width)


@dataclass(frozen=True)
class Run:
    """A schedule of the paper's: the bubble rate that it states, and the samples per second and GPU that it
    measured."""

    setting: Setting
    schedule: str
    stages_per_rank: int
    rate: float
    samples: float | None


_SETTINGS = [
    Setting("1.5B", 24, 18.522, 18.086, 9.337, 0.601, 24, 1024, 2304, 6),
    Setting("1.5B", 32, 18.513, 18.086, 9.331, 0.626, 24, 1024, 2304, 6),
    Setting("1.5B", 64, 18.546, 18.097, 9.321, 0.762, 24, 1024, 2304, 6),
    Setting("6.2B", 24, 29.718, 29.444, 19.927, 0.527, 32, 1024, 4096, 3),
    Setting("6.2B", 32, 29.802, 29.428, 19.53, 0.577, 32, 1024, 4096, 3),
    Setting("6.2B", 64, 29.935, 29.621, 19.388, 0.535, 32, 1024, 4096, 3),
]
_RUNS = [
    # setting, schedule, stages per rank, bubble rate, samples per second and GPU
    (0, "ZB-2p", 1, 0.0433, 14.5),
    (0, "ZB-1p", 1, 0.1585, 12.9),
    (0, "1F1B", 1, 0.2431, 11.8),
    (0, "1F1B-I", 3, 0.1055, 13.1),
    (0, "ZB-H1", 1, 0.1585, None),
    (0, "ZB-H2", 1, 0.1083, None),
    (1, "ZB-2p", 1, 0.0039, 14.8),
    (1, "ZB-1p", 1, 0.1242, 13.4),
    (1, "1F1B", 1, 0.1985, 12.5),
    (1, "1F1B-I", 3, 0.0818, 13.4),
    (1, "ZB-H1", 1, 0.1242, None),
    (1, "ZB-H2", 1, 0.0837, None),
    (2, "ZB-2p", 1, 0.0026, 14.9),
    (2, "ZB-1p", 1, 0.0674, 14.2),
    (2, "1F1B", 1, 0.124, 13.6),
    (2, "1F1B-I", 3, 0.0443, 13.9),
    (2, "ZB-H1", 1, 0.0674, None),
    (2, "ZB-H2", 1, 0.0444, None),
    (3, "ZB-2p", 1, 0.0029, 4.32),
    (3, "ZB-1p", 1, 0.1323, 3.88),
    (3, "1F1B", 1, 0.2347, 3.5),
    (3, "1F1B-I", 4, 0.0808, 4.01),
    (3, "ZB-H1", 1, 0.1323, None),
    (3, "ZB-H2", 1, 0.0698, None),
    (4, "ZB-2p", 1, 0.0022, 4.35),
    (4, "ZB-1p", 1, 0.1045, 4.0),
    (4, "1F1B", 1, 0.1898, 3.7),
    (4, "1F1B-I", 4, 0.0628, 4.08),
    (4, "ZB-H1", 1, 0.1045, None),
    (4, "ZB-H2", 1, 0.0559, None),
    (5, "ZB-2p", 1, 0.001, 4.39),
    (5, "ZB-1p", 1, 0.0554, 4.2),
    (5, "1F1B", 1, 0.1091, 4.03),
    (5, "1F1B-I", 4, 0.032, 4.19),
    (5, "ZB-H1", 1, 0.0554, None),
    (5, "ZB-H2", 1, 0.0294, None),
]  # fmt: skip
RUNS = [Run(_SETTINGS[setting], NAMES[name], *rest) for setting, name, *rest in _RUNS]
SETTINGS = tuple(_SETTINGS)
