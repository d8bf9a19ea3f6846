"""Small models that nobody here wrote, with uneven sizes: vocabulary 257, 3 heads, batch 5."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Made = tuple[nn.Module, Any, Any]


def hugging_face(
    kind: str, *, batch: int = 5, seq: int = 12, heads: int = 3, device: str = "cpu", layers: int = 2
) -> Made:
    """(model, batch, loss) of a Hugging Face model type, always the same parameters and tokens."""
    import transformers

    hidden = 16 * heads
    sizes: dict[str, Any] = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": heads,
        "vocab_size": 257,
    }
    causal = {"use_cache": False, "bos_token_id": 1, "eos_token_id": 2}
    settings = {
        "llama": {**sizes, "num_key_value_heads": heads, **causal},
        "qwen2": {**sizes, "num_key_value_heads": heads, **causal},
        "gpt2": {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 257, **causal},
        "bert": {**sizes, "max_position_embeddings": 64},
        "vit": {
            **{k: v for k, v in sizes.items() if k != "vocab_size"},
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 7,
        },
    }[kind]
    config = transformers.AutoConfig.for_model(kind, **settings)
    classes = {"bert": transformers.AutoModelForMaskedLM, "vit": transformers.AutoModelForImageClassification}
    torch.manual_seed(0)
    with torch.device(device):
        model = classes.get(kind, transformers.AutoModelForCausalLM).from_config(config)
    random = torch.Generator().manual_seed(1)
    if kind == "vit":
        data = {
            "pixel_values": torch.randn(batch, 3, 16, 16, generator=random),
            "labels": torch.randint(0, 7, (batch,), generator=random),
        }
    else:
        ids = torch.randint(0, 257, (batch, seq), generator=random)
        data = {"input_ids": ids, "labels": ids}
    return model.train(), data, lambda out, _: out.loss


def mlp(*, batch: int = 5, device: str = "cpu") -> Made:
    """Three linear layers of uneven widths."""
    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(nn.Linear(12, 30), nn.GELU(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 7))
    return model, _labelled(torch.Size((12,)), batch, 7), _cross_entropy


def cnn(*, batch: int = 5) -> Made:
    """Convolutions with batch normalisation, in-place ReLU, pooling and dropout."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(16, 10),
    )
    return model, _labelled(torch.Size((3, 12, 12)), batch, 10), _cross_entropy


def make(name: str) -> Made:
    return {"mlp": mlp, "cnn": cnn}[name]() if name in ("mlp", "cnn") else hugging_face(name)


def _labelled(shape: torch.Size, batch: int, classes: int) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(1)
    return torch.randn(batch, *shape, generator=random), torch.randint(0, classes, (batch,), generator=random)


def _cross_entropy(out: torch.Tensor, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(out, batch[1])
