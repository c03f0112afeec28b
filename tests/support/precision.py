"""Small models of several architectures with weights of a realistic spread, for tests of precision."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)
from transformers.utils import logging

from tests.support.models import write_char_tokenizer

IDS = torch.arange(24).reshape(2, 12)


def write(directory: Path, module: Any, dtype: torch.dtype = torch.float32) -> Path:
    """Save a model with seeded weights of a realistic spread."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.08, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.02, generator=generator)
    logging.disable_progress_bar()
    module.to(dtype).save_pretrained(directory)
    return write_char_tokenizer(directory)


def llama(*, tied: bool = True) -> Any:
    """Two layers, width 64."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=tied,
        )
    )


def gpt2() -> Any:
    """Linear layers that are stored transposed, learned positions, biases."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=64, n_layer=2, n_head=4))


def gemma() -> Any:
    """An embedding that multiplies by the root of the width, sliding windows, a tied head."""
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=1,
            head_dim=32,
            sliding_window=8,
            max_position_embeddings=64,
        )
    )


def mixtral() -> Any:
    """Experts that are one tensor each in the file and merged in the module: only transformers can load it."""
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=2,
            max_position_embeddings=64,
        )
    )


def logits(module: Any) -> torch.Tensor:
    """The logits of a few fixed tokens."""
    with torch.inference_mode():
        found: torch.Tensor = module(input_ids=IDS, use_cache=False).logits
    return found
