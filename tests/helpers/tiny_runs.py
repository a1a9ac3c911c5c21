"""What the fine-tuning tests share: a tokenizer of words, texts with something to learn, and a short run's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from hf_posenc.evaluation import read_records
from hf_posenc.training import FinetuneConfig
from hf_posenc.training.run_folder import LOSS_LOG, read_log
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
        "per_device_train_batch_size": 2,
        "learning_rate": 3e-3,
        "warmup_steps": 2,
        "eval_documents": 2,
        "save_steps": 6,
    }
    return FinetuneConfig(**{**settings, **changes})


def load(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder)


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


@contextmanager
def killed_at(step: int) -> Iterator[None]:
    """Let the run inside die just after the loss of ``step`` is written down; it is an error if it does not."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            yield


def losses(folder: Path) -> list[float]:
    """Return the loss of every step of a run."""
    return [line["loss"] for line in read_log(folder / LOSS_LOG)]


def assert_same_run(one: Path, other: Path, steps: int) -> None:
    """Two folders hold the same losses, weights and perplexities, to the bit."""
    names = ("step", "loss", "grad_norm", "learning_rate", "tokens_trained")
    logs = [[[line[name] for name in names] for line in read_log(folder / LOSS_LOG)] for folder in (one, other)]
    assert [line[0] for line in logs[0]] == list(range(1, steps + 1))
    assert logs[0] == logs[1]
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    assert weights[0].keys() == weights[1].keys()
    for name, value in weights[0].items():
        assert value.equal(weights[1][name]), name
    results = [[r.perplexity for r in read_records(folder / "results.jsonl")] for folder in (one, other)]
    assert results[0] == results[1] != []


def load_as_the_card_says(folder: Path, base: Path | None = None) -> dict[str, Any]:
    """Run all code of a model card, with its placeholders filled in, and return its names: model, tokenizer, ...

    Args:
        folder: Of the model.
        base: Of its base model, for an adapter whose card cannot name one.
    """
    card = (folder / "README.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in card.split("```python\n")[1:]:
        code = block.split("```")[0].replace("path/of/this/folder", str(folder))
        code = code.replace("path/of/the/base/model", str(base)).replace("path/of/a/new/folder", f"{folder}-merged")
        exec(code, names)
    return names
