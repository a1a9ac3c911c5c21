"""The model card of an extended model: what was done, what it gave by length, how to load and serve it, its limits."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from torch import nn

from hf_posenc.checkpoint.manifest import read_manifest
from hf_posenc.checkpoint.pretrained import auto_class_of
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation.records import Record
from hf_posenc.evaluation.rows import rule_name, training_words
from hf_posenc.exports.folder import command, read_folder
from hf_posenc.exports.stacks import STACKS, command_for
from hf_posenc.families.discovery import is_adapter
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.methods.registry import get_method, method_names, named_options
from hf_posenc.patching.api import describe, verify_model
from hf_posenc.patching.extension import rule_is_elsewhere
from hf_posenc.patching.verification import extension_words
from hf_posenc.publishing.provenance import BaseModel, find_base_model
from hf_posenc.publishing.trained_run import TrainedRun, changed_words
from hf_posenc.reporting.comparable import Table, make_tables, sort_tables
from hf_posenc.reporting.perplexity_panels import perplexity_curve

if TYPE_CHECKING:
    from hf_posenc.publishing.repository import Repository

logger = logging.getLogger(__name__)

CARD = "README.md"
# The marks that tell a card of hf_posenc from one that somebody wrote, and the words that say so.
_OURS = "<!-- hf_posenc wrote this card"
_MARK = f"{_OURS} and replaces it when the model is saved again. Delete this line to keep a text of your own. -->"
_HUB = "https://huggingface.co"
_FOLDER = "path/of/this/folder"  # where it is not pushed to the Hub
_TASKS = {"AutoModelForCausalLM": "text-generation", "AutoModelForImageTextToText": "image-text-to-text"}
_SERVERS = ("vllm", "llama.cpp")
# What of a fit a card says, by the manifest's names.
_OF_A_FIT = ("teacher", "teacher_options", "objectives", "documents", "tokens", "steps", "seed", "instead")


@dataclass(frozen=True)
class CardFacts:
    """The facts of a card.

    Attributes:
        description: What ``hf_posenc.patching.api.describe`` says of the model.
        verified: What was compared when it was saved, in words.
        base: The model that was extended.
        auto_class: Name of the class that loads it: an auto class for a model that predicts tokens.
        is_adapter: The folder holds an adapter, not a whole model.
        repo_id: Its name on the Hub; None where it is not pushed.
        revision: The branch that it is pushed to; None for the main one.
        tokens_trained: Tokens it was fine-tuned on, over all runs; None where that is not known.
        fitted_on: What a rule or changed weights were fitted on, as in the manifest; None if nothing was fitted.
        records: Perplexities of the model and of what it is compared with; those of ``run`` are not among them.
        run: The fine-tuning run that ended with this model; None if there is none.
    """

    description: Mapping[str, Any]
    verified: str
    base: BaseModel
    auto_class: str
    is_adapter: bool = False
    repo_id: str | None = None
    revision: str | None = None
    tokens_trained: int | None = 0
    fitted_on: Mapping[str, Any] | None = None
    records: Sequence[Record] = ()
    run: TrainedRun | None = None

    @property
    def title(self) -> str:
        """The model's name, for people."""
        name = self.base.name.rpartition("/")[2] or "Model"
        return f"{name}, {changed_words(self.method, self.target).replace('`', '')}"

    @property
    def method(self) -> str:
        return str(self.description["method"])

    @property
    def original(self) -> int:
        return int(self.description["original_max_position_embeddings"])

    @property
    def target(self) -> int:
        return int(self.description["context_length"])

    @property
    def measured(self) -> list[int]:
        """The lengths at which this very model was measured, in tokens."""
        if self.run is not None:
            return [record.context_length for record in self.run.after]
        own = (self.description, self.tokens_trained, self.fitted_on)
        return sorted({one.context_length for one in self.records if _is_of(one, *own)})


def check_records(
    records: Sequence[Record], model: nn.Module, tokens_trained: int | None, fitted_on: Mapping[str, Any] | None
) -> None:
    """Check, before anything is written, that a card can show records as those of a model.

    Args:
        records: May be empty.
        model: As it will be saved, extended.
        tokens_trained, fitted_on: As in the manifest.

    Raises:
        ValueError: None of them is of a model extended and trained like this one, or a table of them would show no
            short text.
    """
    if not records:
        return
    description = describe(model)
    if not any(_is_of(record, description, tokens_trained, fitted_on) for record in records):
        rows = ", ".join(dict.fromkeys(f"{rule_name(one)} {training_words(one)}".rstrip() for one in records))
        trained = "trained or not is not known" if tokens_trained is None else f"trained on {tokens_trained:,} tokens"
        raise InvalidRequestError(
            f"the results are of {rows}, and none is of this model ({extension_words(description)}, {trained}). Give "
            "those that were measured with the same method, factor, options, original length and training."
        )
    make_tables(records)


def _is_of(
    record: Record,
    description: Mapping[str, Any],
    tokens_trained: int | None,
    fitted_on: Mapping[str, Any] | None,
) -> bool:
    if record.original_max_position_embeddings not in (None, description["original_max_position_embeddings"]):
        return False
    if tokens_trained is not None and record.tokens_trained not in (None, tokens_trained):
        return False
    if instead := (fitted_on or {}).get("instead"):  # whose numbers were saved as a fitted rule
        return bool(record.method == instead)
    # As JSON, which a record was read from: there tuples are lists.
    return all(
        json.dumps(getattr(record, name), sort_keys=True) == json.dumps(description[name], sort_keys=True)
        for name in ("method", "factor", "options")
    )


def is_own_card(file: Path) -> bool:
    """Return whether there is a model card that hf_posenc wrote, and nobody said that it is theirs since."""
    return file.is_file() and _OURS in file.read_text(encoding="utf-8", errors="replace")


def write_card(
    model: nn.Module,
    folder: Path,
    target: Path,
    *,
    repository: Repository | None = None,
    records: Sequence[Record] = (),
    run: TrainedRun | None = None,
) -> None:
    """Write README.md and its pictures into the folder that a model was saved to, before that is moved into place.

    Where the final folder has a card that hf_posenc did not write, none is written, and a warning says so.

    Args:
        model: What was saved.
        folder: Holds the checkpoint and its manifest.
        target: Where the folder's files go to.
        repository: Where on the Hub the model is pushed to; None for nowhere.
        records: Perplexities of the model and of what it is compared with.
        run: The fine-tuning run that ended with this model; None if there is none.
    """
    there = target / CARD
    if there.is_file() and not is_own_card(there):
        logger.warning("%s: this model card was not written by hf_posenc and is kept as it is.", there)
        return
    manifest = read_manifest(folder)
    assert manifest is not None  # it was saved
    rotary = RotaryModel(model)
    facts = CardFacts(
        describe(rotary),
        verify_model(rotary).found,
        find_base_model(str(manifest["base_model"] or "")),
        auto_class_of(rotary.model),
        is_adapter=is_adapter(model),
        repo_id=None if repository is None else repository.repo_id,
        revision=None if repository is None else repository.revision,
        tokens_trained=manifest["tokens_trained"],
        fitted_on=manifest.get("fitted_on"),
        records=records,
        run=run,
    )
    tables = _tables(facts)
    for table in tables:
        (folder / _picture(table)).write_bytes(perplexity_curve(table))
    (folder / CARD).write_text(model_card(facts, folder, tables), encoding="utf-8")


def model_card(facts: CardFacts, folder: Path, tables: Sequence[Table]) -> str:
    """Return the text of README.md, with the metadata block the Hub reads.

    Args:
        facts: What it tells.
        folder: The saved model, for the commands of servers.
        tables: What was measured, each with a picture in the folder.
    """
    run, measured = facts.run, facts.measured
    here = Path(_FOLDER) if facts.repo_id is None else Path(facts.repo_id.rpartition("/")[2])
    text = _template().render(
        facts=facts,
        base=facts.base,
        run=run,
        fit=facts.fitted_on,
        of_a_fit=_OF_A_FIT,
        tables=tables,
        measured=measured,
        left_out=[] if run is None else [length for length in run.lengths if length not in measured],
        mark=_MARK,
        hub=_HUB,
        done=_what_was_done(facts),
        trained=_what_was_trained(facts),
        needs_hf_posenc=_without_hf_posenc(facts),
        is_whole_in_config=_is_whole_in_config(facts),
        needs_manifest=rule_is_elsewhere(facts.description),
        is_encoding=facts.method in method_names("is_encoding"),
        place=_place(facts),
        source=_source(facts),
        local_folder=here,
        servers=_servers(facts, folder, here),
        rows=partial(_rows, facts),
        table_rows=lambda table: [(row.full_name, list(row.records.values())) for row in table.rows],
        how=_how,
        protocol=_protocol,
        picture=_picture,
    )
    return str(ModelCard(f"---\n{_metadata(facts).to_yaml()}\n---\n\n{text}"))


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("hf_posenc.publishing"),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("card.md")


def _tables(facts: CardFacts) -> list[Table]:
    """Return the measurements in tables of comparable rows; of a run, no rows if it measured no short text."""
    if facts.run is None:
        return make_tables(facts.records) if facts.records else []
    return sort_tables([*facts.run.unextended, *facts.run.before, *facts.run.after])[0]


def _picture(table: Table) -> str:
    return f"perplexity_{table.slug}.png"


def _metadata(facts: CardFacts) -> ModelCardData:
    known, run = facts.base.card, facts.run
    dataset = None if run is None else run.documents.hub_id
    # The Hub has no word for a model with other positions and the same weights.
    relation = "adapter" if facts.is_adapter else "finetune" if facts.tokens_trained else None
    results = _eval_results(facts, run) if run is not None and dataset is not None and run.held_out else []
    return ModelCardData(
        base_model=facts.base.hub_id,
        base_model_relation=relation if facts.base.hub_id is not None else None,
        license=known.get("license"),
        license_name=known.get("license_name"),
        license_link=known.get("license_link"),
        language=known.get("language"),
        library_name="peft" if facts.is_adapter else "transformers",
        pipeline_tag=_task(facts),
        datasets=None if dataset is None else [dataset],
        tags=["hf_posenc", "context-extension", "long-context", facts.method, *(["lora"] if facts.is_adapter else [])],
        metrics=["perplexity"] if facts.measured else None,
        model_name=facts.title if results else None,
        eval_results=results or None,
    )


def _task(facts: CardFacts) -> str | None:
    usual = _TASKS.get(facts.auto_class)
    return usual and facts.base.card.get("pipeline_tag", usual)


def _eval_results(facts: CardFacts, run: TrainedRun) -> list[EvalResult]:
    """Return the results that the Hub shows: of a dataset that exists, and of the trained model only."""
    source = run.documents
    return [
        EvalResult(
            task_type=_task(facts) or "text-generation",
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


def _what_was_done(facts: CardFacts) -> str:
    paper = f"`{facts.method}` ({get_method(facts.method).paper})"
    said = named_options(facts.method, facts.description["options"])
    options = "".join(f", {name} {value}" for name, value in said.items())
    done = f"extended {facts.description['factor']:g} times with {paper}{options} to {facts.target} tokens"
    if facts.method in method_names("instead_of_rope"):
        done = f"its RoPE replaced by {paper}{options}"
    return done


def _what_was_trained(facts: CardFacts) -> str:
    tokens = facts.tokens_trained
    if tokens is None or (facts.is_adapter and not tokens):  # others trained it, and did not say how much
        return ""
    if facts.run is not None:
        return f", then {facts.run.words(tokens)}"
    if tokens:
        return f", and fine-tuned on {tokens:,} tokens"
    if adapted := (facts.fitted_on or {}).get("adapted"):
        return f". Its weights are those of the base model but for {' and '.join(adapted['modules'])} ([Fit](#fit))"
    return ". Its weights are those of the base model"


def _rows(facts: CardFacts, rows: Sequence[tuple[str, Sequence[Record]]]) -> str:
    """Return a table of perplexities with a column for each length."""
    lengths = sorted({record.context_length for _, records in rows for record in records})
    header = [f"{length}{' (original)' if length == facts.original else ''}" for length in lengths]
    lines = [f"| context length | {' | '.join(header)} |", f"|:---|{'---:|' * len(lengths)}"]
    for label, records in rows:
        cells = {one.context_length: f"{one.perplexity:.2f} [{one.ci_low:.2f}, {one.ci_high:.2f}]" for one in records}
        lines.append(f"| {label} | {' | '.join(cells.get(length, '') for length in lengths)} |")
    return "\n".join(lines)


def _how(record: Record) -> str:
    return f"Lower is better; in brackets the 95 % bootstrap interval over {record.ci_unit}."


def _protocol(record: Record) -> str:
    return (
        f"Protocol `{record.protocol}`, {record.dtype}, {record.attn_implementation} attention. At "
        f"{record.context_length} tokens: {record.scored}"
    )


def _place(facts: CardFacts) -> str:
    """Return the model's name for our commands, which read main branches: its name on the Hub, or a placeholder."""
    return facts.repo_id if facts.repo_id is not None and facts.revision is None else _FOLDER


def _source(facts: CardFacts) -> str:
    """Return the arguments that name the model in Python."""
    branch = "" if facts.revision is None else f', revision="{facts.revision}"'
    return f'"{facts.repo_id or _FOLDER}"{branch}'


def _without_hf_posenc(facts: CardFacts) -> str | None:
    """Return a sentence on loading the model without hf_posenc; None where this changes nothing."""
    if facts.is_adapter:
        return "PEFT alone puts the adapter on its base model without the extension, and the result reads wrong."
    if _is_whole_in_config(facts):
        return None
    if facts.method in method_names("is_encoding"):
        return "Transformers alone fails, and no server runs it."
    if rule_is_elsewhere(facts.description):
        return (
            "Transformers, accelerate and servers alone build the model without its extension, and do not say so. "
            f"`hf_posenc.verify_model(model, {_source(facts)})` says whether a loaded model has it."
        )
    return "Transformers alone applies the temperature to a part of each head only."


def _is_whole_in_config(facts: CardFacts) -> bool:
    return not rule_is_elsewhere(facts.description) and facts.description["options"].get("temperature") != "logits"


def _servers(facts: CardFacts, folder: Path, here: Path) -> list[dict[str, str | None]]:
    """Return the commands of vLLM and llama.cpp for the model, or why they cannot; empty for adapters."""
    if facts.is_adapter or facts.auto_class not in _TASKS:
        return []
    saved = read_folder(folder)
    # Its own may be a path; and what a model was made from has other weights.
    base_model = facts.base.hub_id if facts.base.is_exact else None
    saved = replace(saved, manifest={**saved.manifest, "base_model": base_model})
    rows: list[dict[str, str | None]] = []
    for name in _SERVERS:
        stack = STACKS[name]
        # llama.cpp's converter reads a folder; vLLM a name on the Hub too, whose main branch the printed command means.
        reads_hub = name == "vllm" and facts.repo_id is not None and facts.revision is None
        try:
            words = command_for(stack, replace(saved, path=_place(facts) if reads_hub else str(here)))
        except InvalidRequestError as error:
            rows.append({"title": stack.title, "refusal": str(error), "command": None})
            continue
        if facts.repo_id is not None and not reads_hub:
            branch = () if facts.revision is None else ("--revision", facts.revision)
            words = f"{command('hf', 'download', facts.repo_id, *branch, '--local-dir', str(here))}\n{words}"
        rows.append({"title": stack.title, "refusal": None, "command": words})
    return rows
