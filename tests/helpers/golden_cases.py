"""What ``golden`` records: commands, fine-tuning runs, perplexities, and methods on small models of many families.

Tables alone, so that what was renamed between two checkouts is changed here.
"""

from __future__ import annotations

import json
from typing import Any

# ---- What may be renamed: command lines, settings of runs, file names ----

_YARN_DICTIONARY = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}'
_EVAL = "eval tiny --documents book.txt --dtype float32 --cut --max-documents 2 --hide-progress"
_ASK = "eval tiny --dtype float32 --method none yarn --factor 4 --hide-progress"
_COMPARE = "eval tiny --documents book.txt --context-lengths 512 --dtype float32 --cut --max-documents 2 --method auto"
_TUNE = "finetune tiny --documents book.txt --dtype float32 --eval-documents 2 --save-steps 10"
_SERVERS = ("vllm", "sglang", "llama.cpp", "tgi")
# With flags that fit: those where something lies at one depth, and those that need longer texts.
_TASKS = {
    **dict.fromkeys(("passkey", "niah_single_2", "niah_multikey_1"), "--context-lengths 256 512 --depths 0 100"),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery", "vt", "fwe"), "--context-lengths 640"),
    "cwe": "--context-lengths 1024",
}
_LISTS = f"long_factor={json.dumps([1 + pair / 8 for pair in range(32)])}".replace(" ", "")
_COMMANDS = ("patch", "eval", "plan", "finetune", "report", "export", "list", "doctor", "demo")
_PATCHED: dict[str, str | list[str]] = {
    "yarn": "patch tiny yarn --method yarn --factor 4",
    "yarn_paper": "patch tiny yarn_paper --method yarn --factor 4 --option ramp=paper",
    "linear": "patch tiny linear --method linear --context-length 1k",
    "ntk": "patch tiny ntk --method ntk --factor 2",
    "ntk_by_parts": "patch tiny ntk_by_parts --method ntk_by_parts",
    "llama3": "patch tiny llama3 --method llama3 --factor 8",
    "abf": "patch tiny abf --method abf --option rope_theta=1000000",
    "dynamic_sequence": "patch tiny dynamic_sequence --method dynamic --option scope=sequence",
    "dynamic_yarn": "patch tiny dynamic_yarn --method dynamic_yarn --factor 4",
    "dca": "patch tiny dca --method dca --factor 4",
    "alibi": "patch tiny alibi --method alibi",
    "dictionary": ["patch", "tiny", "dictionary", "--rope-scaling", _YARN_DICTIONARY],
}

# A group of commands runs in order in one folder, which holds `tiny`, the model of the package, and `book.txt`; other
# groups run beside it. `{method}` stands for each of available_methods(). Names of commands stay as they are.
COMMANDS: dict[str, dict[str, str | list[str]]] = {
    "listings": {
        "methods": "list methods",
        "families": "list families",
        "presets": "list presets",
        "published checkpoints": "list checkpoints",
        "recipes": "list recipes",
        "explain {method}": "list methods {method}",
        "explain yarn of the tiny model": "list methods yarn --model tiny --factor 8 --option ramp=paper",
        "explain longrope with lists": f"list methods longrope --model tiny --option {_LISTS}",
        "version": "--version",
        "help": "--help",
        **{f"help of {name}": f"{name} --help" for name in _COMMANDS},
        "mistake: command": "evaluate",
        "mistake: flag": "eval tiny --documents book.txt --context-lengths 128 --metod yarn",
        "mistake: method": "patch tiny out --method yran",
        "mistake: option": "patch tiny out --method linear --option beta_fast=16",
        "mistake: factor": "patch tiny out --method yarn --factor 0.5",
        "mistake: factor and length": "patch tiny out --factor 4 --context-length 1k",
        "mistake: model": "eval nowhere/nothing --documents book.txt --context-lengths 128",
        "mistake: documents": "eval tiny --documents nothing.txt --context-lengths 128",
        "mistake: length": "eval tiny --documents book.txt --context-lengths many",
        "mistake: protocol": "eval tiny --documents book.txt --context-lengths 128 --protocol all",
        "mistake: recipe": "finetune tiny --documents book.txt --recipe yarn-4000 --output-dir out",
        "mistake: records": "report nothing.jsonl",
        "mistake: server": "export tiny --to ollama",
    },
    "checkpoints": {
        **{f"patch {name}": command for name, command in _PATCHED.items()},
        "patch a patched one": "patch yarn twice --method linear --factor 2",
        "patch a patched one anew": "patch yarn replaced --method linear --factor 2 --on-scaled replace",
        **{f"export {name} to {server}": f"export {name} --to {server}" for name in _PATCHED for server in _SERVERS},
        **{f"export dca as yarn to {server}": f"export dca --to {server} --as yarn" for server in _SERVERS},
        **{f"doctor {name}": f"doctor {name}" for name in ("tiny", *_PATCHED)},
        "doctor of a live model": "doctor yarn --live",
        "doctor of an old dictionary": "doctor old",
        "doctor mends an old dictionary": "doctor old --fix mended",
        "doctor of a wrong dictionary": "doctor wrong",
        "patch over another one": "patch tiny ntk --method linear",
        "plan tiny": "plan tiny --context-length 1k --dtype float32",
        "plan 7B": "plan llama7b --context-length 128k --dtype bfloat16 --gpu-memory 24GB",
        "plan 7B on a server": "plan llama7b --context-length 32k --dtype bfloat16 --gpu-memory 80GB --server --gpus 2",
        "plan training": "plan llama7b --context-length 32k --dtype bfloat16 --gpu-memory 80GB --token-budget 10M "
        "--lora --gradient-checkpointing --tokens-per-second 2000",
        "plan as JSON": "plan llama7b --context-length 64k --dtype bfloat16 --gpu-memory 80GB --recipe pose --json",
    },
    "perplexity": {
        "eval": f"{_EVAL} --context-lengths 128 256 512 --method none yarn dynamic_yarn dca --factor 4 --protocol "
        "same_tokens truncated --output results.jsonl",
        "eval again": f"{_EVAL} --context-lengths 128 256 512 --method none yarn --factor 4 --protocol same_tokens "
        "truncated --output results.jsonl",
        "eval by a dictionary": [*_EVAL.split(), "--context-lengths", "512", "--rope-scaling", _YARN_DICTIONARY],
        "eval the tokens that need context": f"{_EVAL} --context-lengths 512 --method yarn --protocol longppl "
        "--alpha 1 --beta -3 --short-context 64 --output longppl.jsonl",
        "eval an encoding": f"{_EVAL} --context-lengths 128 --method alibi --output encoding.jsonl",
        "compare, dry run": f"{_COMPARE} --dry-run",
        # One rule each whose time differs: rows are measured in the order of their estimated times.
        "compare": f"{_COMPARE} none yarn ntk --output compared.jsonl --hide-progress",
        "compare with tasks": f"{_COMPARE} none dynamic_yarn --tasks passkey --depths 50 --hide-progress "
        "--output compared.jsonl",
        "compare distances": f"{_COMPARE} none self_extend --output distances.jsonl --hide-progress",
        "report": "report results.jsonl --output-dir report --title Golden",
        "report of all": "report results.jsonl longppl.jsonl encoding.jsonl compared.jsonl --output-dir report_of_all",
    },
    "verdicts": {  # which need more text
        "eval": "eval tiny --documents novel:persuasion --dtype float32 --cut --max-documents 44 --hide-progress "
        "--context-lengths 128 256 512 --method none yarn dynamic_yarn --factor 2 --output results.jsonl",
        "report": "report results.jsonl --output-dir report",
    },
    "retrieval": {
        **{task: f"{_ASK} --tasks {task} {flags} --output {task}.jsonl" for task, flags in _TASKS.items()},
        "staged": "eval tiny --dtype float32 --context-lengths 512 --method dynamic_yarn self_extend --factor 4 "
        "--tasks passkey vt --depths 50 --samples 2 --output staged.jsonl --hide-progress",
        "own documents": f"{_ASK} --tasks niah_single_2 --documents book.txt --context-lengths 512 --output own.jsonl",
        "report": f"report {' '.join(f'{task}.jsonl' for task in _TASKS)} staged.jsonl --output-dir report",
    },
    "training": {
        "finetune": f"{_TUNE} --method yarn --factor 2 --token-budget 3k --learning-rate 1e-4 --output-dir tuned",
        "finetune by a recipe": f"{_TUNE} --recipe longlora --factor 2 --token-budget 2k --output-dir adapters",
        "finetune in stages": f"{_TUNE} --stages 512:2k 1k:3k --output-dir staged",
        "finetune from a file": "finetune tiny --config tuned/run.toml --seed 3 --output-dir again",
        "finetune goes on": "finetune tiny --config tuned/run.toml --resume",
        "finetune into a full folder": "finetune tiny --config tuned/run.toml",
        "eval the tuned one": "eval tuned --documents book.txt --context-lengths 256 512 --cut --max-documents 2 "
        "--dtype float32 --output tuned.jsonl --hide-progress",
        "doctor of the tuned one": "doctor tuned",
        "doctor of the adapters": "doctor adapters",
        "export of the tuned one": "export tuned --to vllm",
        "report": "report tuned/results.jsonl tuned.jsonl --output-dir report",
    },
}

# Settings of fine-tuning runs of the tiny model, 20 steps each; `documents` names a function of golden_jobs.
_SHORT = {"factor": 2.0, "original_max_position_embeddings": 128, "learning_rate": 5e-4, "warmup_steps": 4}
_SHORT |= {
    "token_budget": 20 * 2 * 256,
    "per_device_train_batch_size": 2,
    "eval_documents": 2,
    "save_steps": 10,
    "seed": 7,
}
RUNS: dict[str, dict[str, Any]] = {
    "full": {"documents": "long", **_SHORT, "method": "yarn"},
    "packed": {
        "documents": "short",
        **_SHORT,
        "method": "ntk",
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
    },
    "lora": {"documents": "long", **_SHORT, "method": "linear", "lora": True, "lora_rank": 4},
    "lora_all_linear": {
        **{"documents": "short", **_SHORT, "lora": True, "trainable": "all", "lora_embeddings": False},
        **{"gradient_checkpointing": True, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
    },
    "pose": {
        **{"documents": "long", **_SHORT, "method": "yarn", "options": {"ramp": "harmonic"}, "seq_len": 128},
        **{"position_schedule": "pose", "token_budget": 20 * 2 * 128},
    },
    "random_positions": {
        **{"documents": "long", **_SHORT, "position_schedule": "random", "seq_len": 128},
        **{"token_budget": 20 * 2 * 128},
    },
    "chats": {"documents": "chats", **_SHORT, "assistant_only_loss": True},
    "answers": {"documents": "answers", **_SHORT, "short_share": 0.5},
    "dynamic": {"documents": "long", **_SHORT, "method": "dynamic_yarn"},
    "distance": {"documents": "short", **_SHORT, "method": "self_extend"},
    "shifted": {"documents": "long", **_SHORT, "method": "linear", "shifted_sparse_attention": True},
    "encoding": {"documents": "long", **_SHORT, "method": "alibi"},
    "stages": {
        **{"documents": "long", **_SHORT, "factor": None, "stages": ["256:5k", "512:6k"], "length_upsampling": 2.0},
    },
}

# How `perplexity` is called, and on what: (method, factor), or None for the model as it is.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "truncated": {},
    "last_k": {"last_k": 48},
    "sliding_window": {"stride": 48},
    "same_tokens": {},
    "longppl": {"context_lengths": [256, 512]},
    "yarn": {"context_lengths": [320, 512]},
    "yarn_govreport": {"context_lengths": [320, 512]},
    "pi": {"context_lengths": [320, 512]},
    "pose": {"context_lengths": [320, 512], "stride": 100},
    "longlora": {"context_lengths": [320, 512]},
    "dca": {"context_lengths": [320, 512]},
    "rerope": {"last_k": 64},
}
MEASURED: dict[str, tuple[str, float] | None] = {
    "plain": None,
    "yarn": ("yarn", 4.0),
    "dynamic_yarn": ("dynamic_yarn", 4.0),
}
# More of `perplexity`: keywords, and the method if it is not "yarn".
MEASUREMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "two protocols": ({"protocol": ["truncated", "last_k"], "last_k": 32}, "yarn"),
    "prefill_chunk": ({"prefill_chunk": 48}, "yarn"),
    "prefill_chunk of stages": ({"prefill_chunk": 48}, "dynamic_yarn"),
    "prefill_chunk of distances": ({"prefill_chunk": 48}, "dca"),
    "logits_chunk": ({"logits_chunk": 7}, "yarn"),
    "batches": ({"protocol": "sliding_window", "stride": 64, "batch_size": 3}, "yarn"),
    "batches of stages": ({"protocol": "sliding_window", "stride": 64, "batch_size": 3}, "dynamic"),
    "bos": ({"bos": "prepended"}, "yarn"),
    "mean of windows": ({"protocol": "sliding_window", "stride": 64, "average": "windows"}, "yarn"),
    "max_tokens": ({"protocol": "sliding_window", "stride": 64, "max_tokens": 600}, "yarn"),
    "cut": ({"cut": True, "max_documents": 3}, "yarn"),
    "position_bucket": ({"position_bucket": 32, "seed": 5}, "yarn"),
    "length dependent": ({}, "dynamic, scope=sequence"),
    "self_extend": ({}, "self_extend"),
    "encoding": ({}, "alibi"),
}

# Files by what is recorded of them, wherever they lie: a name, or the end of one.
FILES = {
    "skipped": ("training_args.bin", ".progress", ".bak"),
    "folders of which names are recorded": ("checkpoint-", "runs"),
}


# ---- Small models of many families, and what is asked of them ----

ORIGINAL = 64
LENGTHS = (64, 200)
SIZES: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": ORIGINAL,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_LISTS = {"short_factor": [1.0, 1.0, 1.1, 1.2], "long_factor": [1.0, 1.5, 2.5, 4.0]}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16}
# Transformers' name of the class before "Config" and "ForCausalLM", and settings beside the sizes.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"head_dim": 16}),
    "mistral": ("Mistral", {"head_dim": 16, "sliding_window": 160}),
    "qwen2": ("Qwen2", {"rope_parameters": {**_ROPE, "rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "gemma3": (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": (
        "Phi3",
        {
            "max_position_embeddings": 4 * ORIGINAL,
            "original_max_position_embeddings": ORIGINAL,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**_ROPE, "rope_type": "longrope", "partial_rotary_factor": 0.5, **_LISTS},
        },
    ),
    "gpt_neox": ("GPTNeoX", {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}, "rotary_pct": 0.5}),
    "cohere": ("Cohere", {}),
    "glm": ("Glm", {"head_dim": 16, "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}}),
    "qwen3_moe": ("Qwen3Moe", {**_EXPERTS, "head_dim": 16}),
    "deepseek_v3": (
        "DeepseekV3",
        {
            **_LATENT,
            **{"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1},
            **{"topk_group": 1, "moe_intermediate_size": 32, "first_k_dense_replace": 1},
        },
    ),
    "qwen2_vl": ("Qwen2VL", {"rope_parameters": {**_ROPE, "mrope_section": [2, 3, 3]}}),
}
SCALED = ("phi3",)  # whose own rule has to be replaced

# Method, factor and options; `longrope` without lists gets one number a pair. Methods that are not here, new ones too,
# are asked for with their defaults.
REQUESTS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "linear": ("linear", 4, {}),
    "ntk": ("ntk", 4, {}),
    "ntk_by_parts": ("ntk_by_parts", 4, {}),
    "ntk_by_parts, options": ("ntk_by_parts", 4, {"beta_fast": 8.0, "beta_slow": 2.0}),
    "yarn": ("yarn", 4, {}),
    "yarn, ramp=paper": ("yarn", 4, {"ramp": "paper"}),
    "yarn, ramp=harmonic": ("yarn", 4, {"ramp": "harmonic"}),
    "yarn, options": ("yarn", 4, {"beta_fast": 8.0, "attention_factor": 1.25, "truncate": False}),
    "yarn, temperature=logits": ("yarn", 4, {"temperature": "logits"}),
    "yarn, mscale": ("yarn", 4, {"mscale": 0.707, "mscale_all_dim": 0.5}),
    "llama3": ("llama3", 4, {}),
    "llama3, options": ("llama3", 8, {"low_freq_factor": 2.0, "high_freq_factor": 6.0}),
    "longrope": ("longrope", 4, {}),
    "longrope, attention_factor": ("longrope", 4, {"attention_factor": 1.1}),
    "abf": ("abf", 4, {"rope_theta": 5e6}),
    "nope": ("nope", 4, {}),
    "dynamic": ("dynamic", 4, {}),
    "dynamic, stage": ("dynamic", 4, {"stage": 32, "log_n": True}),
    "dynamic, scope=sequence": ("dynamic", 4, {"scope": "sequence"}),
    "dynamic_yarn": ("dynamic_yarn", 4, {}),
    "dynamic_yarn, geometric": ("dynamic_yarn", 8, {"stage": 48, "growth": "geometric", "beta_fast": 16.0}),
    "self_extend": ("self_extend", 4, {}),
    "self_extend, options": ("self_extend", 4, {"group": 5, "window": 24, "log_n": True}),
    "dca": ("dca", 4, {}),
    "dca, options": ("dca", 4, {"chunk_size": 48, "local_window": 8, "sharpen": True}),
    "rerope": ("rerope", 4, {}),
    "rerope, options": ("rerope", 4, {"window": 24, "log_n": True}),
    "leaky_rerope": ("leaky_rerope", 4, {}),
    "leaky_rerope, options": ("leaky_rerope", 4, {"window": 24, "leak": 4.0}),
}
ENCODINGS: dict[str, tuple[str, float | None, dict[str, Any]]] = {
    "sinusoidal": ("sinusoidal", None, {"embedding_scale": 0.05}),
    "learned": ("learned", None, {"context_length": 256}),
    "relative_bias": ("relative_bias", None, {"max_distance": 6}),
    "t5_bias": ("t5_bias", None, {"num_buckets": 8, "max_distance": 20}),
    "t5_bias, bidirectional": ("t5_bias", None, {"bidirectional": True}),
    "alibi": ("alibi", None, {}),
    "rope": ("rope", None, {}),
    "rope, interleaved": ("rope", None, {"interleaved": True, "rope_theta": 500.0}),
    "rope, complex": ("rope", None, {"computation": "complex", "partial_rotary_factor": 0.5}),
    "xpos": ("xpos", None, {"scale_base": 8}),
}
# Keywords of patch_model on the llama model, refused or not; and of extend_config.
CALLS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "context_length": {"method": "linear", "context_length": 160},
    "odd factor": {"method": "yarn", "factor": 2.37},
    "factor 1": {"method": "yarn", "factor": 1},
    "alias": {"method": "PI", "factor": 2},
    "original length": {"method": "yarn", "factor": 4, "original_max_position_embeddings": 32},
    "preset": {"preset": "llama-2-yarn-16x"},
    "unknown preset": {"preset": "lama-2-yarn-16x"},
    "dictionary": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
    "old dictionary": {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "dynamic dictionary": {"rope_scaling": '{"rope_type": "dynamic", "factor": 2.0}'},
    "dictionary and method": {"method": "ntk", "rope_scaling": {"type": "linear", "factor": 2.0}},
    "wrong dictionary": {"rope_scaling": {"rope_type": "yarn", "faktor": 4.0}},
    "dictionary of another base": {"rope_scaling": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}},
    "unknown method": {"method": "yran"},
    "unknown option": {"method": "linear", "beta_fast": 16},
    "option of a wrong type": {"method": "yarn", "beta_fast": "many"},
    "option out of range": {"method": "yarn", "beta_fast": 1, "beta_slow": 2},
    "factor below 1": {"method": "yarn", "factor": 0.25},
    "factor of a wrong type": {"method": "yarn", "factor": "four"},
    "factor and length": {"method": "yarn", "factor": 4, "context_length": 256},
    "length below the original": {"method": "yarn", "context_length": 32},
    "lists of a wrong length": {"method": "longrope", "long_factor": [1.0, 2.0]},
    "unknown on_scaled": {"method": "yarn", "on_scaled": "maybe"},
    "window of a model without one": {"method": "yarn", "sliding_window": "off"},
}
# The same on other families.
MORE_CALLS: dict[str, tuple[str, dict[str, Any]]] = {
    "window off": ("mistral", {"method": "yarn", "factor": 4, "sliding_window": "off"}),
    "window off, in stages": ("mistral", {"method": "dynamic_yarn", "factor": 4, "sliding_window": "off"}),
    "window off, in chunks": ("mistral", {"method": "dca", "factor": 4, "sliding_window": "off"}),
    "longer window": ("mistral", {"method": "yarn", "factor": 8, "sliding_window": 300}),
    "window too short": ("mistral", {"method": "yarn", "factor": 4, "sliding_window": 40}),
    "window and stages": ("mistral", {"method": "dynamic_yarn", "factor": 4, "sliding_window": 300}),
    "scaled already": ("phi3", {"method": "yarn", "factor": 4}),
    "preset of another family": ("qwen2", {"preset": "llama-2-yarn-16x"}),
}
# Presets with the config class they are for, its original length and window.
PRESETS: dict[str, tuple[str, int, int | None]] = {
    "llama-2-yarn-16x": ("Llama", 4096, None),
    "llama-2-longlora-8x": ("Llama", 4096, None),
    "mistral-0.1-yarn-8x": ("Mistral", 8192, 4096),
    "deepseek-coder-linear-4x": ("Llama", 4096, None),
}
