"""A .gguf file of a tiny Llama, written as the converter of llama.cpp writes it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase


def write_gguf(
    path: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerBase | None = None, **scaling: str | float
) -> Path:
    """Write a float32 GGUF as llama.cpp's converter does, rows of q and k interleaved.

    Its vocabulary is a one-letter BPE, or that of a byte-level BPE that splits texts as GPT-2's does.
    """
    import gguf

    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    for name, value in scaling.items():
        add = writer.add_string if isinstance(value, str) else writer.add_float32
        add(f"llama.rope.scaling.{name}", value)
    writer.add_tokenizer_model("gpt2")
    if tokenizer is None:
        letters = [chr(code) for code in range(33, 33 + 94)]
        tokens = [*letters, "ab", *(f"<{i}>" for i in range(config.vocab_size - 96)), "ba"]
        merges, special = ["a b", "b a"], (95, 96)  # Transformers 5.0 takes no single one
        types = [gguf.TokenType.NORMAL] * config.vocab_size
    else:
        bpe = json.loads(tokenizer.backend_tokenizer.to_str())
        tokens = tokenizer.convert_ids_to_tokens(range(config.vocab_size))
        merges = [" ".join(pair) for pair in bpe["model"]["merges"]]
        special = (tokenizer.bos_token_id, tokenizer.eos_token_id)
        control = {one["id"] for one in bpe["added_tokens"]}
        types = [gguf.TokenType.CONTROL if i in control else gguf.TokenType.NORMAL for i in range(config.vocab_size)]
        writer.add_tokenizer_pre("gpt-2")
        writer.add_add_bos_token(False)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(special[0])
    writer.add_eos_token_id(special[1])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        weight = tensor.numpy()
        for part, heads in (("q_proj", config.num_attention_heads), ("k_proj", config.num_key_value_heads)):
            if part in name:
                halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
                weight = halves.swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
