"""The drop-in for torch.compile: overlap in its graphs, with the same result on every rank."""

from meshweave.torch_compile.agreement import Agreement
from meshweave.torch_compile.backend import Backend, backend, inductor_pass

__all__ = ["Agreement", "Backend", "backend", "inductor_pass"]
