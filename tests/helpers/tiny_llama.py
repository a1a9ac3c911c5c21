"""A tiny random Llama and a tokenizer of one token a character: what most tests run on."""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TINY_SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def make_tiny_llama(**overrides: Any) -> LlamaForCausalLM:
    """A random float32 Llama of ``TINY_SIZES``; made in a moment."""
    settings: dict[str, Any] = {
        **TINY_SIZES,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "bos_token_id": 0,
        "eos_token_id": 0,
        "attn_implementation": "sdpa",
    }
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**{**settings, **overrides})).eval()


def make_tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character: 95 printable ASCII characters, the end of a line, and EOS, of a vocabulary of 128."""
    characters = ["<eos>", "\n", *(chr(code) for code in range(32, 127))]
    tokenizer = Tokenizer(models.BPE({character: index for index, character in enumerate(characters)}, []))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<eos>", eos_token="<eos>", model_max_length=64
    )
