"""Tiny real models and tokenizers on disk whose losses are known by arithmetic. Scoring them is the tests' business.

Each ``write_*`` function takes a directory, writes safetensors, config.json and (unless told otherwise) the character
tokenizer into it, and returns it. Letters ``a``, ``b``, ``c`` ... have the ids 0, 1, 2 ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

#: Vocabulary of the character tokenizer and of every analytic model.
V = 64
#: One character per token; the three specials come last.
ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXY .,\n\r-é€𝄞\u00a0"
BOS, EOS, UNK = 61, 62, 63
#: Log-probability that stands for "never": e^-80 does not show in float32, and is finite.
NEVER = -80.0
#: Loss per token of the counter model on text that counts, and of any text that is off by one.
COUNTER_NATS = -math.log(0.97)
COUNTER_MISS_NATS = -math.log(0.03 / (V - 1))
#: Loss per token of the BOS-needy model where the window lacks BOS.
NEEDY_NATS = math.log(1000)

assert len(ALPHABET) == BOS

Table = np.ndarray[Any, np.dtype[np.float64]]


# ---------------------------------------------------------------- tokenizers


def write_char_tokenizer(
    directory: Path, *, specials: bool = True, adds_bos: bool = False, adds_eos: bool = False, fold: bool = False
) -> Path:
    """One token per character of ``ALPHABET``, anything else is ``<unk>``.

    ``specials`` False: neither BOS nor EOS are declared. ``adds_bos``/``adds_eos``: the tokenizer adds them by itself.
    ``fold``: capitals are normalised to small letters (so that tokens do not spell the text).
    """
    vocabulary = {c: i for i, c in enumerate(ALPHABET)} | {"<bos>": BOS, "<eos>": EOS, "<unk>": UNK}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    if fold:
        backend.normalizer = normalizers.Lowercase()
    if adds_bos or adds_eos:
        template = "<bos> " * adds_bos + "$A" + " <eos>" * adds_eos
        backend.post_processor = processors.TemplateProcessing(
            single=template, special_tokens=[("<bos>", BOS), ("<eos>", EOS)]
        )
    named = {"bos_token": "<bos>", "eos_token": "<eos>"} if specials else {}
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", **named).save_pretrained(directory)
    return directory


def write_bpe_tokenizer(directory: Path, lines: Sequence[str], size: int = 384) -> Path:
    """A byte-level BPE trained on ``lines``: characters it has not seen fall into several tokens of one byte each."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(lines, trainer)
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", eos_token="<eos>").save_pretrained(directory)
    return directory


def write_word_tokenizer(directory: Path, words: Sequence[str]) -> Path:
    """One token per word; blanks between words belong to no token (as in WordPiece)."""
    vocabulary = {word: i for i, word in enumerate([*words, "<bos>", "<unk>"])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<bos>", unk_token="<unk>").save_pretrained(directory)
    return directory


# ---------------------------------------------------------------- tables of log-probabilities, [given, next]


def dyadic_table() -> Table:
    """F1: a, b, c, d have the probabilities 1/2, 1/4, 1/8, 1/8 whatever comes before."""
    row = np.full(V, NEVER)
    row[:4] = np.log([1 / 2, 1 / 4, 1 / 8, 1 / 8])
    return np.tile(row, (V, 1))


def counter_table() -> Table:
    """F2: after a comes b with 0.97, and so on round a, b, c, d; a also comes first, after BOS; all else 0.03/63."""
    table = np.full((V, V), -COUNTER_MISS_NATS)
    for given in range(V):
        table[given, (given + 1) % 4 if given < 4 else 0] = -COUNTER_NATS
    return table


def uniform_table() -> Table:
    """F3: every token is as likely as any other."""
    return np.full((V, V), -math.log(V))


# ---------------------------------------------------------------- models


def write_table_model(directory: Path, table: Table, *, poison: dict[tuple[int, int], float] | None = None) -> Path:
    """A Llama whose next-token log-probabilities are ``table[token]``: F1, F2, F3, F6.

    ``poison`` {(given, next): weight} overwrites single weights of the head; a weight of 3e38 is finite, its logit
    (times sqrt(V) = 8) is not.
    """
    model = _llama(hidden=V, intermediate=8)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(V))
        # RMSNorm of a one-hot vector is sqrt(V) times that vector.
        model.lm_head.weight.copy_(torch.from_numpy(table.T / math.sqrt(V)))
        for (given, following), weight in (poison or {}).items():
            model.lm_head.weight[following, given] = weight
    return _save(model, directory)


def write_needy_model(directory: Path) -> Path:
    """F4: in a window that holds BOS the counter's losses, in any other one exactly ln 1000 where the counter has 0.97.

    One head attends to BOS alone where there is one (its score is 181 above all others) and sets a flag; the MLP copies
    the token into a second block of dimensions if the flag is set; the head reads both blocks.
    """
    width, flag = 4 * V, 2 * V
    norm = math.sqrt(width)
    model = _llama(hidden=width, intermediate=V)
    table = counter_table()
    without = np.where(table == -COUNTER_NATS, -NEEDY_NATS, math.log(0.999 / (V - 1)))
    layer = model.model.layers[0]
    head_dim = width // 4
    still = head_dim // 2 - 1  # the rotary pair whose angle is 0 to float32 at every position
    gate = math.sqrt(width / 2)  # value of a normalised one of two equal entries
    copied = gate / (1 + math.exp(-gate)) * gate  # silu(gate) * up
    seen = math.sqrt(width / 3)  # token, flag and copy after the last norm
    with torch.no_grad():
        model.model.embed_tokens.weight[:, :V] = torch.eye(V)
        layer.self_attn.q_proj.weight[still, :V] = 1.0
        layer.self_attn.k_proj.weight[still, BOS] = 181.0 * math.sqrt(head_dim) / width
        layer.self_attn.v_proj.weight[0, BOS] = 1.0
        layer.self_attn.o_proj.weight[flag, 0] = 1 / norm
        layer.mlp.gate_proj.weight[:, flag] = 1.0
        layer.mlp.up_proj.weight[:, :V] = torch.eye(V)
        layer.mlp.down_proj.weight[V : 2 * V, :] = torch.eye(V) / copied
        model.lm_head.weight[:, :V] = torch.from_numpy(without.T / norm)
        model.lm_head.weight[:, V : 2 * V] = torch.from_numpy(table.T / seen - without.T / norm)
    return _save(model, directory)


def write_position_model(directory: Path, table: Table) -> Path:
    """A GPT-2 whose next-token log-probabilities are ``table[position in the window]``, whatever the tokens: F5, F7.

    The position embedding is one-hot, the token embedding zero. LayerNorm of a one-hot vector e is (e - 1/n)/s; its
    bias takes the 1/n away again.
    """
    positions, vocabulary = table.shape
    config = GPT2Config(
        vocab_size=vocabulary,
        n_positions=positions,
        n_embd=positions,
        n_layer=1,
        n_head=1,
        layer_norm_epsilon=1e-12,
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = GPT2LMHeadModel(config)
    spread = math.sqrt((1 - 1 / positions) / positions + 1e-12)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        model.transformer.wpe.weight.copy_(torch.eye(positions))
        model.transformer.ln_f.weight.fill_(1.0)
        model.transformer.ln_f.bias.fill_(1 / positions / spread)
        model.lm_head.weight.copy_(torch.from_numpy(table.T * spread))
    return _save(model, directory)


def position_table(positions: int = V) -> Table:
    """F5: at position p the token p has 0.97, all others 0.03/63."""
    table = np.full((positions, V), -COUNTER_MISS_NATS)
    table[np.arange(positions), np.arange(positions) % V] = -COUNTER_NATS
    return table


def meter_table(enough: int, positions: int = V) -> Table:
    """F7, on text of nothing but ``a``: the loss is 1.0 where fewer than ``enough`` tokens are visible, else 0.5."""
    table = np.empty((positions, V))
    for position in range(positions):
        p = math.exp(-0.5 if position + 1 >= enough else -1.0)
        table[position] = math.log((1 - p) / (V - 1))
        table[position, 0] = math.log(p)
    return table


def write_random_llama(directory: Path, *, vocabulary: int = V, seed: int = 0, context: int = 512) -> Path:
    """Two layers, 4 heads on 2 key-value heads, weights drawn wide enough that losses differ from token to token."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=min(BOS, vocabulary - 2),
        eos_token_id=min(EOS, vocabulary - 1),
    )
    model = LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0.0, 0.3, generator=generator)
    return _save(model, directory)


def write_gguf(path: Path, seed: int = 0) -> Path:
    """A random two-layer Llama with a byte-level tokenizer, as one GGUF file of 400 kB."""
    import gguf
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    vocabulary, width, inner, layers = 260, 64, 96, 2
    tokens = [*bytes_to_unicode().values(), "<bos>", "<eos>", "th", "he"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocabulary)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 3, 1, 1])
    writer.add_token_merges(["t h", "h e"])
    writer.add_bos_token_id(256)
    writer.add_eos_token_id(257)
    draw = np.random.default_rng(seed)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd": (vocabulary, width),
        "output_norm": (width,),
        "output": (vocabulary, width),
    }
    for i in range(layers):
        shapes |= {
            f"blk.{i}.attn_norm": (width,),
            f"blk.{i}.ffn_norm": (width,),
            f"blk.{i}.attn_q": (width, width),
            f"blk.{i}.attn_k": (width // 2, width),
            f"blk.{i}.attn_v": (width // 2, width),
            f"blk.{i}.attn_output": (width, width),
            f"blk.{i}.ffn_gate": (inner, width),
            f"blk.{i}.ffn_up": (inner, width),
            f"blk.{i}.ffn_down": (width, inner),
        }
    for name, shape in shapes.items():
        values = np.ones(shape) if len(shape) == 1 else draw.normal(0.0, 0.2, shape)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _llama(*, hidden: int, intermediate: int) -> Any:
    """A one-layer Llama that passes its embedding straight through: all weights zero, all norms one."""
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=512,
        rms_norm_eps=1e-12,
        rope_parameters={"rope_type": "default", "rope_theta": 1e16},
        tie_word_embeddings=False,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name else 0.0)
    return model


def _save(model: Any, directory: Path) -> Path:
    logging.disable_progress_bar()
    model.float().save_pretrained(directory)
    return directory
