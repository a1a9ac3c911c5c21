"""The model card of a fine-tuned model: what was done, what it gave by length, how to load it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hf_posenc.evaluation.records import Record
from hf_posenc.manifest import is_on_attention_door
from hf_posenc.windows import KEEP


class TrainedStage(NamedTuple):
    """What a model was trained on to one target length.

    Attributes:
        context_length: The target, in tokens.
        steps: Optimizer steps.
        tokens: Trained on.
    """

    context_length: int
    steps: int
    tokens: int


def model_card(
    description: dict[str, Any],
    base_model: str,
    tokens_trained: int,
    settings: dict[str, Any],
    before: Sequence[Record],
    after: Sequence[Record],
    *,
    stages: Sequence[TrainedStage],
    adapter: bool = False,
    sliding_window: str | int = KEEP,
) -> str:
    """Return the text of README.md, with the metadata block the Hub reads.

    Args:
        description: What ``hf_posenc.patching.describe`` says of the model.
        base_model: Name or path of the model that was extended.
        tokens_trained: Tokens it was fine-tuned on, over all runs.
        settings: Of the run: learning_rate, seq_len, lora and so on, shown as they are.
        before, after: Perplexities of the extended model before and after training, at the same lengths.
        stages: Of this run, in order; one that trains to one length only is one stage. Tokens of ``tokens_trained``
            that are of none are those of earlier runs.
        adapter: The folder holds an adapter, not a whole model.
        sliding_window: What became of a window that every layer had.
    """
    original, target = description["original_max_position_embeddings"], description["context_length"]
    options = "".join(f", {name} {value}" for name, value in description["options"].items())
    before_run = tokens_trained - sum(stage.tokens for stage in stages)
    earlier = f" ({before_run:,} of them in earlier runs)" if before_run else ""
    staged = f" in {len(stages)} stages, the last" if len(stages) > 1 else ""
    return "\n".join(
        [
            "---",
            "library_name: " + ("peft" if adapter else "transformers"),
            *([f"base_model: {base_model}"] if _is_hub_name(base_model) else []),
            "tags: [hf_posenc, long-context]",
            "---",
            "",
            f"# {base_model.rstrip('/').rpartition('/')[2] or 'Model'}, extended to {target} tokens",
            "",
            f"Context length {original} tokens as trained, extended {description['factor']:g} times with "
            f"`{description['method']}`{options}, then fine-tuned on {tokens_trained:,} tokens{earlier}{staged} in "
            f"blocks of {settings['seq_len']}.",
            "",
            "## Perplexity by length",
            "",
            *_table(before, after, original),
            "",
            "## Loading",
            "",
            *_loading(adapter, description, sliding_window),
            "",
            "## Training",
            "",
            *(_stages(stages) if staged else ()),
            *(f"- {name}: {value}" for name, value in settings.items()),
            "",
        ]
    )


def _stages(stages: Sequence[TrainedStage]) -> list[str]:
    rows = [
        f"| {number} | {one.context_length} | {one.steps} | {one.tokens:,} |" for number, one in enumerate(stages, 1)
    ]
    return [
        "Each stage extended the original model anew, and went on with the weights of the one before.",
        "",
        "| stage | extended to | steps | tokens trained on |",
        "|---:|---:|---:|---:|",
        *rows,
        "",
        "The last one:",
        "",
    ]


def _is_hub_name(base_model: str) -> bool:
    """Say whether it can be a name on the Hub, which refuses cards with any other base model."""
    return re.fullmatch(r"[\w.-]+/[\w.-]+", base_model) is not None and not Path(base_model).exists()


def _table(before: Sequence[Record], after: Sequence[Record], original: int) -> list[str]:
    if not after:
        return ["Not measured: no held-out text, or eval_documents was 0."]
    lines = ["| context length | before | after |", "|---:|---:|---:|"]
    for one, other in zip(before, after, strict=True):
        cells = (f"{r.perplexity:.2f} [{r.ci_low:.2f}, {r.ci_high:.2f}]" for r in (one, other))
        mark = " (original)" if one.context_length == original else ""
        lines.append(f"| {one.context_length}{mark} | {' | '.join(cells)} |")
    first = before[0]
    state = f"fine-tuned on {first.tokens_trained:,} tokens" if first.tokens_trained else "extended, not yet trained"
    return [
        *lines,
        "",
        f"Before: {state}. Held-out text, protocol `{first.protocol}`, texts: {first.num_documents}, "
        f"{first.dtype}, {first.attn_implementation} attention; 95 % bootstrap interval over {first.ci_unit}.",
    ]


def _loading(adapter: bool, description: dict[str, Any], sliding_window: str | int) -> list[str]:
    if adapter:
        window = {} if sliding_window == KEEP else {"sliding_window": sliding_window}
        options = "".join(f", {name}={value!r}" for name, value in {**window, **description["options"]}.items())
        return [
            "The adapter needs its base model extended the same way; `load_extended` sees to it:",
            "",
            "```python",
            "from hf_posenc import load_extended",
            'model = load_extended("path/of/this/folder")',
            "```",
            "",
            "With PEFT alone, extend the base model before `PeftModel.from_pretrained`:",
            "",
            "```python",
            "from hf_posenc import patch_model",
            f"patch_model(base_model, {description['method']!r}, context_length={description['context_length']}, "
            f"original_max_position_embeddings={description['original_max_position_embeddings']}{options})",
            "```",
        ]
    if is_on_attention_door(description):
        return [
            f"No config can say `{description['method']}`: `load_extended` applies it, from the manifest beside the "
            "weights. Plain Transformers loads the weights without the rule; for servers see `hf-posenc export --as`.",
            "",
            "```python",
            "from hf_posenc import load_extended",
            "from transformers import AutoTokenizer",
            'model = load_extended("path/of/this/folder", dtype="auto")',
            'tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")',
            "```",
        ]
    return [
        "Plain Transformers is enough:",
        "",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        'model = AutoModelForCausalLM.from_pretrained("path/of/this/folder", dtype="auto")',
        'tokenizer = AutoTokenizer.from_pretrained("path/of/this/folder")',
        "```",
    ]
