"""Trains a small Llama on the standard library's own prose: weights that gradient descent made, on no grid of bits.

For accuracy figures that must not hang on how a published model was stored. ``python bench/small_model.py DIR`` writes
``DIR/model`` (safetensors, with a byte-pair tokenizer trained on the same text) and ``DIR/held-out.txt``.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import common

CONTEXT, ROWS, VOCABULARY = 256, 8, 1024
#: The last part of the text is never trained on.
HELD_OUT = 0.3


@dataclass(frozen=True, slots=True)
class Made:
    """A trained model, text it has not seen, and its last training loss in nats per token."""

    model: Path
    text: Path
    loss: float


def prose() -> str:
    """Python's documentation of its own language, topic by topic."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))


def make(directory: Path, seconds: float) -> Made:
    """Train for some seconds and save."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    from eval_kernel.quiet import quiet

    quiet()
    whole = prose()
    cut = int(len(whole) * (1 - HELD_OUT))
    directory.mkdir(parents=True, exist_ok=True)
    text = directory / "held-out.txt"
    text.write_text(whole[cut:])
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        [whole[:cut]],
        trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=["<s>"], initial_alphabet=alphabet),
    )
    ids = torch.tensor(tokenizer.encode(whole[:cut]).ids)
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    module = LlamaForCausalLM(config)
    optimiser = torch.optim.AdamW(module.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
    started, step, loss = time.monotonic(), 0, float("nan")
    while (spent := (time.monotonic() - started) / seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = 2e-3 * min((step + 1) / 20, 1.0) * (1 - 0.9 * spent)
        places = torch.randint(0, len(ids) - CONTEXT - 1, (ROWS,))
        rows = torch.stack([ids[p : p + CONTEXT] for p in places.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            found = module(input_ids=rows, labels=rows).loss
        optimiser.zero_grad()
        found.backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimiser.step()
        step, loss = step + 1, float(found.detach())
    target = directory / "model"
    logging.disable_progress_bar()
    module.save_pretrained(target)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<s>").save_pretrained(target)
    print(f"trained {step} steps of {ROWS * CONTEXT} tokens, last loss {loss:.3f} nats per token", file=sys.stderr)
    return Made(target, text, loss)


def main() -> int:
    """Train and say where the model is."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=common.CACHE / "bench-small-model")
    parser.add_argument("--quick", action="store_true", help="20 seconds of training")
    parser.add_argument("--seconds", type=float, default=180.0)
    options = parser.parse_args()
    made = make(options.directory, 20.0 if options.quick else options.seconds)
    common.finish({"bench": "small_model", "model": str(made.model), "text": str(made.text), "loss": made.loss})
    return 0


if __name__ == "__main__":
    sys.exit(main())
