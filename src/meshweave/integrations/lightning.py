"""A Lightning strategy for modules that train by a compiled step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from meshweave.integrations.whole import whole


class MeshweaveStrategy(DDPStrategy):
    """`Trainer(strategy=MeshweaveStrategy())`: a process per device, each with its own rows, as in DDPStrategy. The
    module is not wrapped, because its compiled step communicates; checkpoints contain whole tensors, so that they load
    on any number of processes, and without meshweave. A single process needs no set-up: the devices of the mesh are
    virtual.
    """

    def setup_distributed(self) -> None:
        """Join the job, if there are several processes."""
        if self.world_size > 1:
            super().setup_distributed()

    def configure_ddp(self) -> None:
        """Do not wrap the module."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters and buffers, whole. All processes call it."""
        return dict(whole(super().lightning_module_state_dict()))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer, whole. All processes call it."""
        return dict(whole(super().optimizer_state(optimizer)))
