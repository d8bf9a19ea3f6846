"""Tiny Hugging Face mixtures of experts, each family with the parts that it is known for."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor, nn

_SIZES: dict[str, Any] = {
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "use_cache": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "num_experts_per_tok": 2,
}
_AUX = {"output_router_logits": True}  # their loss has the auxiliary loss in it
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, **_AUX},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "head_dim": 8, "norm_topk_prob": True, **_AUX},
    "olmoe": {"num_experts": 4, **_AUX},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "moe_intermediate_size": 24,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "num_key_value_heads": 4,
    },
    "gpt_oss": {
        "num_local_experts": 4,
        "head_dim": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        **_AUX,
    },
    "granitemoe": {"num_local_experts": 4, **_AUX},
    "llama4_text": {"num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 48, "head_dim": 8},
}


def mixture(kind: str, *, implementation: str = "", **settings: Any) -> nn.Module:
    """A model of the family with the same parameters every time; `settings` replace those of its config."""
    sizes = {**_SIZES, **FAMILIES[kind], **settings}
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    config = transformers.AutoConfig.for_model(kind, **sizes)
    torch.manual_seed(0)
    options = {"experts_implementation": implementation} if implementation else {}
    model = transformers.AutoModelForCausalLM.from_config(config, **options)
    with torch.no_grad():  # routers of a fresh model give all experts nearly the same score
        for name, param in model.named_parameters():
            if param.dim() > 1 and "embed" not in name:
                param.normal_(0, 0.2)
    return model.train()


def tokens(*, batch: int = 4, seq: int = 8, seed: int = 1) -> dict[str, Tensor]:
    ids = torch.randint(3, 64, (batch, seq), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def own_loss(out: Any, _: Any) -> Tensor:
    return out.loss
