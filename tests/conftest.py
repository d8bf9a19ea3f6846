"""Tests run beside each other: one thread each keeps them from fighting over the cores."""

import torch

torch.set_num_threads(1)
