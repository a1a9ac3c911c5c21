"""The whole text of refusals, each once; other tests assert the class of an error and the values that it names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from attention_models import sharp_model
from hf_posenc import (
    convert_layout,
    extend_config,
    load_extended,
    patch_model,
    perplexity,
    save_extended,
    unpatch_model,
)
from hf_posenc.assets import load_novel
from hf_posenc.errors import (
    AlreadyExtendedError,
    InvalidRequestError,
    InvalidTypeError,
    MissingFileError,
    UnknownNameError,
    UnknownOptionError,
)
from hf_posenc.training import FinetuneConfig
from hf_posenc.utils.dtypes import parse_dtype


def model() -> Any:
    return sharp_model("Llama")


def patch(*arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: patch_model(model(), *arguments, **options)


def finetuning(**settings: Any) -> Callable[[], Any]:
    return lambda: FinetuneConfig("out", method="yarn", factor=4, **settings)


SCALED = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}
REFUSALS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    # ---- what to extend, and how far ----
    "no model": (
        lambda: patch_model(3, "yarn", 4),
        InvalidTypeError,
        "expected a Transformers model (PreTrainedModel, or one wrapped by PEFT or torch.compile), got int. Load one "
        "with AutoModelForCausalLM.from_pretrained.",
    ),
    "factor below 1": (
        patch("yarn", 0.5),
        InvalidRequestError,
        "factor must be >= 1, got 0.5. It is target / original length: 4 makes a 4096-token model read 16384 "
        "(llama.cpp's 0.25 is the inverse).",
    ),
    "factor and length": (
        patch("yarn", 4, context_length=256),
        InvalidRequestError,
        "give factor or context_length, not both (got 4 and 256): factor is context_length / original length.",
    ),
    "a shorter length": (
        patch("yarn", context_length=32),
        InvalidRequestError,
        "context_length must be at least the original length, 64 tokens, got 32.",
    ),
    "original length of zero": (
        patch("yarn", 4, original_max_position_embeddings=0),
        InvalidRequestError,
        "original_max_position_embeddings must be >= 1, got 0.",
    ),
    "already patched": (
        lambda: patch_model(patch_model(model(), "yarn", 4), "linear", 2),
        AlreadyExtendedError,
        "model is already patched (yarn, factor 4). Call unpatch_model(model) first; factors do not multiply.",
    ),
    "already scaled": (
        lambda: extend_config(LlamaConfig(rope_parameters=SCALED), method="yarn", factor=4),
        AlreadyExtendedError,
        "the model is already scaled: yarn, factor 4, original length 2048. Factors do not multiply. Pass "
        "on_scaled='replace' to put the new rule in its place, with factor or context_length counted from the original "
        "length.",
    ),
    "nothing to undo": (
        lambda: unpatch_model(model()),
        InvalidRequestError,
        "model is not patched: there is nothing to undo. A checkpoint saved extended stays extended.",
    ),
    "a rule that no config can say": (
        lambda: extend_config(LlamaConfig(), method="dynamic_yarn", factor=4),
        InvalidRequestError,
        "no config can say method 'dynamic_yarn': it depends on the position of each query. Call patch_model on the "
        "loaded model, or take a static method such as 'yarn'.",
    ),
    # ---- names ----
    "unknown rope_type": (
        patch(rope_scaling={"rope_type": "yran", "factor": 4}),
        InvalidRequestError,
        "rope_scaling has rope_type 'yran'; it can be linear, dynamic, yarn, llama3, longrope, su. Did you mean "
        "'yarn'?",
    ),
    "unknown layout": (
        lambda: convert_layout(model(), "pairs"),
        UnknownNameError,
        "unknown layout 'pairs'. Known: interleaved, half_split.",
    ),
    "unknown novel": (
        lambda: load_novel("emmma"),
        UnknownNameError,
        "unknown novel 'emmma'. Did you mean 'emma'? Known: emma, mansfieldpark, northangerabbey, persuasion, "
        "prideprejudice, sensesensibility.",
    ),
    "unknown dtype": (
        lambda: parse_dtype("bfloat61"),
        UnknownNameError,
        "unknown dtype 'bfloat61'. Did you mean 'bfloat16'? Known: auto, checkpoint, float32, bfloat16, float16.",
    ),
    "unknown position schedule": (
        finetuning(position_schedule="pse"),
        UnknownNameError,
        "unknown position_schedule 'pse'. Did you mean 'pose'? Known: full, pose, cream, random.",
    ),
    "unknown kind of training data": (
        finetuning(task_mix="keys=0.4 text=0.6"),
        UnknownNameError,
        "unknown kind of training data 'keys'. Known: chains, kv, edges, knots, long_retention, text, needles, "
        "retention, short_text.",
    ),
    # ---- options of methods ----
    "unknown option": (
        patch("yarn", 4, beta=3),
        UnknownOptionError,
        "method 'yarn' takes no option 'beta'. It takes: attention_factor, beta_fast, beta_slow, mscale, "
        "mscale_all_dim, ramp, temperature, truncate.",
    ),
    "option of another method": (
        patch("linear", 4, beta_fast=3),
        UnknownOptionError,
        "method 'linear' takes no option 'beta_fast' (ntk_by_parts, yarn, yarn_rcd, dynamic_yarn do). It takes none.",
    ),
    "option out of range": (
        patch("yarn", 4, beta_fast=-1),
        InvalidRequestError,
        "beta_fast must be greater than 0, got -1.",
    ),
    "option of another type": (
        patch("yarn", 4, beta_fast="x"),
        InvalidTypeError,
        "beta_fast must be a number, got 'x' (str).",
    ),
    "switch": (patch("dca", 4, log_n="yes"), InvalidTypeError, "log_n must be True or False, got 'yes'."),
    "choice": (
        patch("dynamic_yarn", 4, growth="fast"),
        UnknownNameError,
        "unknown growth 'fast'. Known: linear, geometric.",
    ),
    "window": (patch("rerope", 4, window=0), InvalidRequestError, "window must be >= 1, got 0."),
    "two options": (
        patch("dca", 4, chunk_size=8, local_window=8),
        InvalidRequestError,
        "local_window must be less than chunk_size, got 8 and 8.",
    ),
    "list of another length": (
        patch("longrope", 4, short_factor=[1.0], long_factor=[1.0]),
        InvalidRequestError,
        "long_factor must hold 8 numbers (one per pair of features), got 1.",
    ),
    "base": (
        patch("abf", 4, rope_theta=1),
        InvalidRequestError,
        "rope_theta must be larger than the model's 10000 to slow the pairs down, got 1.",
    ),
    # ---- folders ----
    "a file for a folder": (
        lambda: save_extended(patch_model(model(), "yarn", 4), "file"),
        InvalidRequestError,
        "'file' cannot be a folder, because 'FOLDER/file' is a file. Give another path to write to.",
    ),
    "saved without an extension": (
        lambda: save_extended(model(), "new"),
        InvalidRequestError,
        "the model is not extended: call patch_model first, or save it with save_pretrained.",
    ),
    "no folder": (
        lambda: load_extended("/nowhere"),
        MissingFileError,
        "there is no folder '/nowhere', and it is no name on the Hugging Face Hub (OWNER/NAME).",
    ),
    "no manifest": (
        lambda: load_extended("empty"),
        MissingFileError,
        "empty has no context_extension.json: it was not written by save_extended. Use from_pretrained.",
    ),
    # ---- fine-tuning and evaluation ----
    "budget": (
        finetuning(token_budget="lots"),
        InvalidRequestError,
        "token_budget: expected a number of tokens such as 300000, 300k or 1M, got 'lots'",
    ),
    "block": (finetuning(seq_len=0), InvalidRequestError, "seq_len must be at least 2 tokens, got 0."),
    "steps": (
        finetuning(max_steps=100),
        InvalidRequestError,
        "max_steps cannot be 100 here: token_budget says how long a run is.",
    ),
    "learning rate": (
        finetuning(learning_rate=-1),
        InvalidRequestError,
        "learning_rate must be greater than 0, got -1. YaRN and PI use 2e-5.",
    ),
    "shares": (
        finetuning(task_mix="kv=2"),
        InvalidRequestError,
        "the shares of task_mix must sum to 1, these sum to 2. Divided by their sum they are kv=1.",
    ),
    "no documents": (
        lambda: perplexity(model(), [], [64]),
        InvalidRequestError,
        "documents is empty: there is nothing to measure on.",
    ),
    "a text for a list": (
        lambda: perplexity(model(), "text", [64]),
        InvalidTypeError,
        "documents must be a list of texts or of rows of token ids. Put a single document into a list.",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_the_text_of_a_refusal(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("x")
    Path("empty").mkdir()
    call, kind, text = REFUSALS[case]
    with pytest.raises(kind) as caught:
        call()
    assert type(caught.value) is kind
    assert str(caught.value).replace(str(tmp_path), "FOLDER") == text
