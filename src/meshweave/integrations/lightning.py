"""A Lightning strategy for modules that train by a compiled step."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from torch.distributed.tensor import DTensor

from meshweave.errors import StepError
from meshweave.interop.hooks import has_stepped
from meshweave.runtime.state import full_tensors


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

    def setup(self, trainer: Any) -> None:
        """Broadcast the weights before `validate` and `test`, as DDPStrategy does, unless steps have sharded them."""
        is_sharded = any(isinstance(p, DTensor) for p in self.model.parameters())
        if is_sharded or self.world_size == 1:
            super(DDPStrategy, self).setup(trainer)
        else:
            super().setup(trainer)

    def configure_ddp(self) -> None:
        """Do not wrap the module."""

    def _setup_model(self, model: Any) -> Any:
        """Do not wrap the module."""
        return model

    def pre_backward(self, closure_loss: Any) -> None:
        """Raises StepError for a backward pass of Lightning's on several processes: nobody would sum its gradients."""
        if self.world_size > 1:
            raise StepError(
                "MeshweaveStrategy does not sum gradients: a compiled step does",
                where="the loss of training_step, or manual_backward",
                got=f"a backward pass of Lightning's on each of {self.world_size} processes, for its own rows",
                expected="automatic_optimization = False, and a training_step that calls a compiled step",
                hint="write self.step = mw.compile(...), then self.log('loss', self.step(batch)) and "
                "self.optimizers().step(), as in docs/trainers.md; for modules without it use strategy='ddp'",
            )

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        """Raises StepError for an optimizer without gradients that no compiled step has used: the step was compiled
        for another, that of an earlier `fit`."""
        is_manual = not self.lightning_module.automatic_optimization
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if is_manual and not has_gradients and not has_stepped(optimizer):
            raise StepError(
                "this optimizer trains nothing: no compiled step has used it, and its parameters have no gradients",
                where="self.optimizers().step() in training_step",
                got="a compiled step with another optimizer, such as that of an earlier fit",
                expected="a step compiled with optimizer=self.optimizers().optimizer of this fit",
                hint="let on_fit_start set self.step = None, so that each fit compiles, as in docs/trainers.md",
            )
        return super().optimizer_step(optimizer, closure, model, **kwargs)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Parameters and buffers, whole. All processes call it."""
        return dict(full_tensors(super().lightning_module_state_dict()))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """The state of an optimizer, whole. All processes call it."""
        return dict(full_tensors(super().optimizer_state(optimizer)))
