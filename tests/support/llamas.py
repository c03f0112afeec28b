"""Small random decoder-only transformers of several families, in memory. Scoring them is the tests' business."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

#: Enough for two tiles of the head, and a rest.
VOCABULARY = 4500

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": None,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def random_model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    """A model of a transformers family whose predictions are far from uniform, the same every time."""
    config = CONFIG_MAPPING[family](**{**SMALL, **options})
    torch.manual_seed(5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0.0, 0.1)
            elif "norm" in name:
                weight.uniform_(0.5, 1.5)
            else:
                weight.normal_(0.0, 0.1)
    return model.to(dtype).eval().requires_grad_(False)


def tokens(length: int, seed: int = 0) -> torch.Tensor:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed))
