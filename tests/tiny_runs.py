"""What the fine-tuning tests share: a tokenizer of words, texts with something to learn, and a short run's settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from hf_posenc.training import FinetuneConfig
from hf_posenc.training.train_log import LossLog

SEQ = 128  # factor 2 of the fixture's 64
Build = Callable[..., LlamaForCausalLM]


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = {"</s>": 0, **{f"w{i}": i for i in range(1, 128)}}
    inner = Tokenizer(models.WordLevel(words, unk_token="</s>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="</s>", eos_token="</s>")


def make_documents() -> list[torch.Tensor]:
    """Texts with something to learn: each repeats its own stretch of 10 tokens."""
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(1, 60, (10,), generator=generator).repeat(20) for _ in range(24)]


def config(folder: Path, **changes: Any) -> FinetuneConfig:
    settings: dict[str, Any] = {
        "output_dir": str(folder),
        "factor": 2.0,
        "token_budget": 12 * 2 * SEQ,
        "micro_batch_size": 2,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "eval_documents": 2,
        "save_steps": 6,
    }
    return FinetuneConfig(**{**settings, **changes})


def logits_of(model: nn.Module, length: int = SEQ) -> torch.Tensor:
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        return model.eval()(torch.randint(1, 60, (1, length), generator=generator)).logits.float()


class Killed(BaseException):
    pass


def kill_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the process die just after the loss of ``step`` is written down."""
    write = LossLog.on_log

    def dying(self: LossLog, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        write(self, args, state, control, logs, **kwargs)
        if state.global_step == step:
            raise Killed

    monkeypatch.setattr(LossLog, "on_log", dying)
