"""A .gguf file of a tiny Llama, written as the converter of llama.cpp writes it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from transformers import LlamaForCausalLM


def write_gguf(path: Path, model: LlamaForCausalLM, **scaling: str | float) -> Path:
    """Write a float32 GGUF as llama.cpp's converter does, rows of q and k interleaved, with a one-letter BPE."""
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
    writer.add_token_list(
        [chr(code) for code in range(33, 33 + 94)] + ["ab", *(f"<{i}>" for i in range(config.vocab_size - 96)), "ba"]
    )
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges(["a b", "b a"])  # Transformers 5.0 takes no single one
    writer.add_bos_token_id(95)
    writer.add_eos_token_id(96)
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
