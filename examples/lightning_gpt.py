"""A small transformer, trained by Lightning on compiled steps."""

import os
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader

import meshweave as mw
from meshweave.integrations.lightning import MeshweaveStrategy

SEQ, STEPS = 32, 10


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(256, 48), nn.Embedding(SEQ, 48)
        layer = nn.TransformerEncoderLayer(48, 4, 96, dropout=0.0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(48, 256)

    def forward(self, tokens):
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        x = self.embed(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.layers(x, mask=mask, is_causal=True))


def loss_of(logits, tokens):
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Module(lightning.LightningModule):
    def __init__(self, mesh):
        super().__init__()
        self.net, self.mesh, self.step, self.automatic_optimization = Net(), mesh, None, False

    def configure_optimizers(self):
        return torch.optim.AdamW(self.net.parameters(), lr=2e-3)

    def training_step(self, tokens, index):
        options = {"optimizer": self.optimizers().optimizer, "mesh": self.mesh}
        self.step = self.step or mw.compile(self.net, loss=loss_of, example=tokens, **options)
        loss = self.step(tokens)
        self.optimizers().step()  # counts: the update is done
        print(f"step {index} loss {loss:.6f}")


def main(mesh="dp=2"):
    torch.manual_seed(0)
    text = torch.tensor(list(Path(torch.__file__).with_name("functional.py").read_bytes()))
    rows = text[: len(text) // SEQ * SEQ].view(-1, SEQ)
    loader = DataLoader(rows, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(1))
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    several = {"devices": int(os.environ.get("WORLD_SIZE", "1")), "strategy": MeshweaveStrategy(), "accelerator": "cpu"}
    several |= {"use_distributed_sampler": False}  # every process loads the global batch
    trainer = lightning.Trainer(max_steps=STEPS, enable_checkpointing=False, **several, **quiet)
    module = Module(mesh)
    trainer.fit(module, loader)
    torch.save(trainer.strategy.lightning_module_state_dict(), "gpt.pt")


if __name__ == "__main__":
    main()
