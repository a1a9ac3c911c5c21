"""The model card of a fine-tuned model: what was done, what it gave by length, how to load it, its limits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from hf_posenc.checkpoint.manifest import needs_hf_posenc
from hf_posenc.evaluation.records import Record
from hf_posenc.methods.registry import get_method, method_names, named_options
from hf_posenc.training.provenance import BaseModel, DocumentSource

_HUB = "https://huggingface.co"
_FOLDER = '"path/of/this/folder"'  # or the name that it gets on the Hub
_TASKS = {"AutoModelForCausalLM": "text-generation", "AutoModelForImageTextToText": "image-text-to-text"}


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


@dataclass(frozen=True)
class TrainedRun:
    """What a card tells.

    Attributes:
        description: What ``hf_posenc.patching.api.describe`` says of the model.
        base: The model that was extended.
        auto_class: Name of the auto class that loads it.
        documents: What it was trained on.
        held_out: Whether the measured texts are the last of those documents; else they were given apart.
        tokens_trained: Tokens it was fine-tuned on, over all runs.
        settings: Of the run: learning_rate, seq_len, lora and so on, shown as they are.
        stages: Of this run, in order; one that trains to one length only is one stage. Tokens of ``tokens_trained``
            that are of none are those of earlier runs.
        lengths: That were to be measured, in tokens.
        unextended: Perplexities of the model without its extension, before training; empty where that is not the base.
        before, after: Perplexities of the extended model before and after training, at the same lengths.
        is_adapter: The folder holds an adapter, not a whole model.
    """

    description: Mapping[str, Any]
    base: BaseModel
    auto_class: str
    documents: DocumentSource
    held_out: bool
    tokens_trained: int
    settings: Mapping[str, Any]
    stages: Sequence[TrainedStage]
    lengths: Sequence[int]
    unextended: Sequence[Record]
    before: Sequence[Record]
    after: Sequence[Record]
    is_adapter: bool = False

    @property
    def title(self) -> str:
        """The model's name, for people."""
        name = self.base.name.rpartition("/")[2] or "Model"
        return f"{name}, {_changed(self.method, self.target).replace('`', '')}"

    @property
    def method(self) -> str:
        return str(self.description["method"])

    @property
    def original(self) -> int:
        return int(self.description["original_max_position_embeddings"])

    @property
    def target(self) -> int:
        return int(self.description["context_length"])


def model_card(run: TrainedRun) -> str:
    """Return the text of README.md, with the metadata block the Hub reads."""
    text = [
        f"# {run.title}",
        "",
        _what_was_done(run),
        "",
        *_base_lines(run.base),
        "",
        "## Perplexity by length",
        "",
        *_table(run),
        "",
        "## Loading",
        "",
        *_loading(run),
        "",
        "## Training",
        "",
        *(_stages(run.stages) if len(run.stages) > 1 else ()),
        f"- documents: {run.documents.words}",
        *(f"- {name}: {value}" for name, value in run.settings.items()),
        "",
        "## Limits",
        "",
        *_limits(run),
        "",
        "## Licence",
        "",
        _licence(run.base.card),
        "",
    ]
    return str(ModelCard(f"---\n{_metadata(run).to_yaml()}\n---\n\n" + "\n".join(text)))


def _metadata(run: TrainedRun) -> ModelCardData:
    known = run.base.card
    dataset = run.documents.hub_id
    relation = "adapter" if run.is_adapter else "finetune"
    results = _eval_results(run) if dataset is not None and run.held_out else []
    return ModelCardData(
        base_model=run.base.hub_id,
        base_model_relation=relation if run.base.hub_id is not None else None,
        license=known.get("license"),
        license_name=known.get("license_name"),
        license_link=known.get("license_link"),
        language=known.get("language"),
        library_name="peft" if run.is_adapter else "transformers",
        pipeline_tag=_task(run),
        datasets=None if dataset is None else [dataset],
        tags=["hf_posenc", "context-extension", "long-context", run.method, *(["lora"] if run.is_adapter else [])],
        metrics=["perplexity"] if run.after else None,
        model_name=run.title if results else None,
        eval_results=results or None,
    )


def _task(run: TrainedRun) -> str | None:
    return run.base.card.get("pipeline_tag") or _TASKS.get(run.auto_class)


def _eval_results(run: TrainedRun) -> list[EvalResult]:
    """Return what the Hub shows: of a dataset that is there, and of the trained model only."""
    source = run.documents
    return [
        EvalResult(
            task_type=_task(run) or "text-generation",
            dataset_type=str(source.hub_id),
            dataset_name=f"{source.hub_id}, held-out part",
            dataset_config=source.config_name,
            dataset_split=source.split,
            metric_type="perplexity",
            metric_name=f"perplexity at {record.context_length} tokens ({record.protocol})",
            metric_value=round(record.perplexity, 4),
        )
        for record in run.after
    ]


def _what_was_done(run: TrainedRun) -> str:
    paper = f"`{run.method}` ({get_method(run.method).paper})"
    said = named_options(run.description["method"], run.description["options"])
    options = "".join(f", {name} {value}" for name, value in said.items())
    before_run = run.tokens_trained - sum(stage.tokens for stage in run.stages)
    earlier = f" ({before_run:,} of them in earlier runs)" if before_run else ""
    staged = f" in {len(run.stages)} stages, the last" if len(run.stages) > 1 else ""
    done = f"extended {run.description['factor']:g} times with {paper}{options} to {run.target} tokens"
    if run.method in method_names("instead_of_rope"):
        done = f"its RoPE replaced by {paper}{options}"
    return (
        f"Context length {run.original} tokens as trained, {done}, then fine-tuned on {run.tokens_trained:,} tokens"
        f"{earlier}{staged} in blocks of {run.settings['seq_len']}."
    )


def _changed(method: str, target: int) -> str:
    return (
        f"`{method}` in the place of RoPE"
        if method in method_names("instead_of_rope")
        else f"extended to {target} tokens"
    )


def _base_lines(base: BaseModel) -> list[str]:
    link = f"[`{base.hub_id}`]({_HUB}/{base.hub_id})"
    if base.is_exact:
        return [f"Base model: {link}."]
    if base.hub_id is not None:
        return [f"Base model: `{base.name}`, a copy of {link} or a model made from it: its files name that one."]
    named = f"`{base.name}`" if base.name else "one made in the program"
    return [f"Base model: {named}. Its files name no model on the Hub, so this card has no `base_model`."]


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


def _table(run: TrainedRun) -> list[str]:
    if not run.after:
        return ["Not measured: no held-out text is long enough, or eval_documents was 0."]
    lengths = [record.context_length for record in run.after]
    header = [f"{length}{' (original)' if length == run.original else ''}" for length in lengths]
    rows = [_row(_label(run, records[0]), records) for records in (run.unextended, run.before, run.after) if records]
    first, longest = run.after[0], run.after[-1]
    text = "texts given apart from what it was trained on"
    if run.held_out:
        text = f"the last part of {run.documents.words}, held out from training"
    return [
        f"| context length | {' | '.join(header)} |",
        f"|:---|{'---:|' * len(lengths)}",
        *rows,
        "",
        f"Lower is better; in brackets the 95 % bootstrap interval over {first.ci_unit}. All rows were measured in "
        f"this run, on the same tokens of {text}: {longest.num_documents} pieces of {longest.context_length} tokens. "
        f"Protocol `{first.protocol}`, {first.dtype}, {first.attn_implementation} attention. At "
        f"{longest.context_length} tokens: {longest.scored}",
    ]


def _row(label: str, records: Sequence[Record]) -> str:
    cells = (f"{one.perplexity:.2f} [{one.ci_low:.2f}, {one.ci_high:.2f}]" for one in records)
    return f"| {label} | {' | '.join(cells)} |"


def _label(run: TrainedRun, record: Record) -> str:
    if run.unextended and record is run.unextended[0]:
        extended = f"before this run (`{record.method}`, {record.factor:g} times)"
        own = "unextended" if record.method == "none" else extended
        return f"the base model, {own}"
    trained = f"fine-tuned on {record.tokens_trained:,} tokens" if record.tokens_trained else "not yet trained"
    return f"{_changed(record.method, round(record.factor * run.original))}, {trained}"


def _limits(run: TrainedRun) -> list[str]:
    measured = [record.context_length for record in run.after]
    left_out = [str(length) for length in run.lengths if length not in measured]
    lines = []
    if measured:
        lines.append("Only perplexity was measured, and on one kind of text.")
    if measured and left_out:
        lines.append(f"No held-out text reaches {', '.join(left_out)} tokens: nothing was measured there.")
    if measured and not run.unextended:
        lines.append(
            "The base model without extension was not measured: the run began with a model that was extended already."
        )
    lines += [
        "Whether the model finds what stands far back, follows instructions over long texts, or does on benchmarks of "
        "short texts what the base model does was not measured. `hf-posenc eval --tasks` and `hf-posenc lm-eval` do.",
        f"Beyond {max(measured, default=run.original)} tokens nothing is known of it.",
    ]
    return [f"- {line}" for line in lines]


def _licence(card: Mapping[str, Any]) -> str:
    if "license" not in card:
        return (
            "Not known: no card of the base model was there to be read. What the base model's licence asks holds for "
            "this model too; add it to this card (`license:`) before you publish it."
        )
    name = card.get("license_name", card["license"])
    link = card.get("license_link")
    return f"`{name}`{f' ({link})' if link else ''}, as the card of the base model has it."


def _loading(run: TrainedRun) -> list[str]:
    """Return how the model is loaded, with hf_posenc and without it; each block of code is complete in itself."""
    if run.is_adapter:
        return _loading_adapter(run)
    if run.method in method_names("is_encoding"):
        return [
            f"`{run.method}` takes the place of RoPE, which Transformers alone cannot run, and no server does:",
            "",
            *_code(
                "from hf_posenc import load_extended",
                "from transformers import AutoTokenizer",
                f'model = load_extended({_FOLDER}, dtype="auto")',
                f"tokenizer = AutoTokenizer.from_pretrained({_FOLDER})",
            ),
        ]
    plain = [
        f"from transformers import {run.auto_class}, AutoTokenizer",
        f'model = {run.auto_class}.from_pretrained({_FOLDER}, dtype="auto")',
        f"tokenizer = AutoTokenizer.from_pretrained({_FOLDER})",
    ]
    if needs_hf_posenc(dict(run.description)) or run.description["options"].get("temperature") == "logits":
        return [
            f"No config can say this rule whole (`{run.method}`): hf_posenc (`pip install hf_posenc`) puts it in while "
            "Transformers loads, from the manifest beside the weights. Without the import the model is another one.",
            "",
            *_code("import hf_posenc", *plain),
            "",
            _servers(" --as yarn", ", with a static rule in its place"),
        ]
    return ["Plain Transformers is enough:", "", *_code(*plain), "", _servers("", "")]


def _loading_adapter(run: TrainedRun) -> list[str]:
    name = f'"{run.base.hub_id}"' if run.base.is_exact else '"path/of/the/base/model"'
    return [
        "The adapter needs its base model extended as it was in training. While hf_posenc (`pip install hf_posenc`) is "
        "imported, PEFT sees to it; the base is loaded as it was published:",
        "",
        *_code(
            "import hf_posenc",
            "from peft import PeftModel",
            f"from transformers import {run.auto_class}, AutoTokenizer",
            f'base = {run.auto_class}.from_pretrained({name}, dtype="auto")',
            f"model = PeftModel.from_pretrained(base, {_FOLDER})",
            f"tokenizer = AutoTokenizer.from_pretrained({_FOLDER})",
        ),
        "",
        "For servers, and for Transformers without hf_posenc, merge it and save the whole model:",
        "",
        *_code(
            "from hf_posenc import save_extended",
            'save_extended(model.merge_and_unload(), "path/of/a/new/folder", tokenizer)',
        ),
    ]


def _servers(more: str, how: str) -> str:
    command = f"hf-posenc export path/of/this/folder --to vllm{more}"
    return (
        f"For vLLM, SGLang, llama.cpp and TGI `{command}` (or another name) prints the command that runs it{how}, or "
        "says why it cannot."
    )


def _code(*lines: str) -> list[str]:
    return ["```python", *lines, "```"]
