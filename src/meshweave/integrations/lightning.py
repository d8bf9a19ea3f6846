"""A strategy of Lightning for modules that train by a compiled step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from meshweave.integrations.whole import whole


class MeshweaveStrategy(DDPStrategy):
    """`Trainer(strategy=MeshweaveStrategy())`: one process per device, each with its own rows, as DDPStrategy has them.

    Nothing wraps the module, whose compiled step communicates; checkpoints hold whole tensors, so that they load on any
    number of processes, and without meshweave. In one process there is nothing to set up: the devices of the mesh are
    virtual ones.
    """

    def setup_distributed(self) -> None:
        """Join the job, where there are several processes."""
        if self.world_size > 1:
            super().setup_distributed()

    def configure_ddp(self) -> None:
        """Leave the module as it is."""

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters and buffers, whole. All processes call it."""
        return dict(whole(super().lightning_module_state_dict()))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer, whole. All processes call it."""
        return dict(whole(super().optimizer_state(optimizer)))
