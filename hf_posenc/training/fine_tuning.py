"""Fine-tune an extended model on a token budget: Trainer does the training, this file prepares and keeps account."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments, set_seed

from hf_posenc.checkpoint.extended import partial_of, save_extended
from hf_posenc.checkpoint.pretrained import auto_class_of
from hf_posenc.checkpoint.quantised import keep_layout, refuse_laid_out
from hf_posenc.errors import InvalidRequestError
from hf_posenc.evaluation import Record
from hf_posenc.evaluation.lm_head import check_head
from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.evaluation.model_facts import hash_weights
from hf_posenc.families.discovery import unwrap
from hf_posenc.patching.api import is_patched, unpatch_model, unpatched
from hf_posenc.training.base_model import find_base_model
from hf_posenc.training.card import TrainedRun, TrainedStage, model_card
from hf_posenc.training.config import FinetuneConfig
from hf_posenc.training.document_source import document_source, said_of
from hf_posenc.training.extending import begin, check_model_levers
from hf_posenc.training.fitting import fit_recipe
from hf_posenc.training.lora import add_lora, base_not_looked_up, check_trainable, is_adapted
from hf_posenc.training.measure import measure
from hf_posenc.training.packing import PackedDataset
from hf_posenc.training.publishing import make_repo, push
from hf_posenc.training.run_folder import check_not_the_models_own, open_run
from hf_posenc.training.stage_list import parse_stages
from hf_posenc.training.stages import (
    Place,
    StageResult,
    load_finished,
    original_length,
    refuse_staged_run,
    train_stages,
)
from hf_posenc.training.texts import Documents, Texts, prepare_texts, read_stream, to_token_ids
from hf_posenc.training.toml_config import RUN_FILE, write_run
from hf_posenc.training.train_log import LOSS_LOG, LossLog, read_log
from hf_posenc.training.trainer import tokens_per_step, train, training_arguments
from hf_posenc.training.writing import saved_bytes, says_how_to_go_on, writing
from hf_posenc.utils.processes import from_main
from hf_posenc.utils.units import TokenCount

RESULTS = "results.jsonl"
_LORA_SETTINGS = ("lora_rank", "lora_alpha", "lora_targets", "lora_embeddings")


@dataclass(frozen=True)
class FinetuneResult:
    """What a run gave.

    Attributes:
        output_dir: The trained model, its card, logs and checkpoints.
        model: The trained model, as saved (PEFT-wrapped for LoRA).
        tokens_trained: Tokens the model was fine-tuned on, repeated passes counted, those of earlier runs included.
        steps: Optimizer steps of this run, over all resumed parts.
        train_loss: Mean of the losses of its steps, nats per token.
        records: Perplexities of the model without its extension (``method`` is "none"), where it was the base model;
            then those of the extended model before and after, told apart by ``tokens_trained``.
        seconds: Of training, over all resumed parts.
    """

    output_dir: Path
    model: Any
    tokens_trained: int
    steps: int
    train_loss: float
    records: list[Record]
    seconds: float


@says_how_to_go_on
def finetune(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    config: FinetuneConfig,
    *,
    eval_documents: Documents | None = None,
    tokens_trained: int = 0,
    source: Mapping[str, Any] | None = None,
) -> FinetuneResult:
    """Extend a model, train it on packed documents, measure it as it came, before and after, and save it.

    The model is trained in place. Trained weights are float32 meanwhile and end in the dtype they came in. In a
    distributed run every process calls this; the first one writes the files, and all return the same numbers.

    Args:
        model: A causal language model; extended by ``config``'s method unless it is extended already.
        tokenizer: Its tokenizer; ends each document with its EOS.
        documents: Texts, or their token ids (int64, 1-D), or rows of a dataset with a column ``text``, ``messages``
            (chats, put through the tokenizer's chat template), or ``prompt`` and ``completion``. Config says what of
            them counts in the loss (``assistant_only_loss``, ``completion_only_loss``).
        config: The run.
        eval_documents: Held-out documents; None holds out the last twentieth of ``documents``. They are measured on
            all of their tokens.
        tokens_trained: Tokens the model was fine-tuned on before, as its manifest says; counted on.
        source: More keys for ``run.toml``: where the command line read model and documents from. The model card names
            the documents by it too: ``{"documents": "emozilla/pg19", "split": "train"}``, as ``read_documents`` takes
            them.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: The Hub refused the repository to push to.
        ValueError: The request contradicts the model or its quantised weights, or the folder holds another run or the
            model itself.
        RuntimeError: Packed documents would see each other (see ``probe_isolation``).
    """
    if isinstance(tokens_trained, bool) or not isinstance(tokens_trained, int) or tokens_trained < 0:
        raise InvalidRequestError(f"tokens_trained must be a whole number >= 0, got {tokens_trained!r}.")
    folder = Path(str(config.output_dir))
    told = {**config.settings(), **said_of(documents), **(source or {})}
    check_not_the_models_own(folder, _name(model))
    config = fit_recipe(model, config)
    check_model_levers(model, config)
    repo_id = from_main(lambda: make_repo(config))
    if config.stages is not None and not isinstance(documents, Sequence):
        # Once, for all stages: each then trains on, and holds out, the same documents.
        longest = max(stage.token_budget for stage in parse_stages(config.stages, config.token_budget))
        whole = dataclasses.replace(config, stages=None, token_budget=TokenCount(longest))
        holds_out = config.eval_documents > 0 and eval_documents is None
        documents = read_stream(tokenizer, documents, original_length(model, config), whole, holds_out)
    if config.stages is not None:
        # Once too: each stage is checked and trained on the same tokens.
        documents = to_token_ids(tokenizer, documents, config)
        eval_documents = None if eval_documents is None else to_token_ids(tokenizer, eval_documents, None)
        texts = (tokenizer, documents, eval_documents)
        done = train_stages(
            partial(_train, *texts), partial(_check, *texts), model, config, told=told, tokens_trained=tokens_trained
        )
    else:
        refuse_staged_run(folder)
        place = Place(folder, folder, told)
        done = _train(tokenizer, documents, eval_documents, model, config, place, tokens_trained)
    if repo_id is not None:
        from_main(lambda: push(config, repo_id))
    found = {one.name: getattr(done, one.name) for one in dataclasses.fields(done)}
    return FinetuneResult(
        output_dir=folder, records=found.pop("unextended") + found.pop("before") + found.pop("after"), **found
    )


def _name(model: PreTrainedModel) -> str:
    return str(unwrap(model).config.name_or_path or "")


def _prepare(
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    model: PreTrainedModel,
    config: FinetuneConfig,
) -> tuple[dict[str, Any], Texts]:
    """Extend the model and make blocks of the texts; whatever does not go together is refused here."""
    description, positions = begin(model, config)
    with evaluation_mode(model):
        check_head(model)
    return description, prepare_texts(model, tokenizer, documents, eval_documents, config, positions)


def _check(
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    model: PreTrainedModel,
    config: FinetuneConfig,
) -> None:
    """Raise what a stage would raise when it begins; the model is left as it came, or without an extension of ours."""
    try:
        _prepare(tokenizer, documents, eval_documents, model, config)
    finally:
        if is_patched(model):
            unpatch_model(model)


def _train(
    tokenizer: PreTrainedTokenizerBase,
    documents: Documents,
    eval_documents: Documents | None,
    model: PreTrainedModel,
    config: FinetuneConfig,
    place: Place,
    tokens_trained: int,
) -> StageResult:
    """Do one run, or one stage of one: arguments as for ``finetune``; nothing is trained where it was already."""
    folder, base_model = Path(str(config.output_dir)), _name(model)
    check_trainable(model, config.lora and not place.goes_on)
    refuse_laid_out(model, "the model cannot be fine-tuned")
    keep_layout(model)  # checkpoints are written between forwards
    set_seed(config.seed)
    description, texts = _prepare(tokenizer, documents, eval_documents, model, config)
    args = training_arguments(model, config, texts.packed)
    if args.world_size > 1 and getattr(unwrap(model), "hf_device_map", None) is None:
        model.to(args.device)  # type: ignore[arg-type]  # every process to its own GPU, before the first forward

    facts = {"tokens_trained_before": tokens_trained, "base_weights": hash_weights(model)}
    facts["tokens_per_step"] = tokens_per_step(args, texts.packed)
    settings = {**config.fixed_settings(), "data": texts.packed.fingerprint(), **facts}
    checkpoint = from_main(lambda: open_run(folder, settings, resume=config.resumes, named=config.named_checkpoint))
    from_main(lambda: write_run(place.root / RUN_FILE, place.told))
    results = place.root / RESULTS
    unextended, before = place.unextended, place.before
    if before is None:
        unextended = _measure_unextended(model, tokenizer, texts, config, args, tokens_trained, results)
        before = _measure(model, tokenizer, texts, config, args, tokens_trained, results)
    trained = add_lora(model, config) if config.lora and not is_adapted(model) else model
    loss_log = LossLog(folder / LOSS_LOG, tokens_per_step(args, texts.packed), tokens_trained)
    total = tokens_trained + args.max_steps * loss_log.tokens_per_step
    staged = place.root != folder
    finished = staged and config.resumes and from_main(lambda: place.is_finished(folder, total))
    if finished:
        load_finished(trained, place.model)
    else:
        known = min((math.log(record.perplexity) for record in before), default=None)
        train(trained, args, texts.packed, config, loss_log, checkpoint, base_model, tokens_trained, known)
    after = _measure(trained, tokenizer, texts, config, args, total, results)

    def save() -> list[dict[str, Any]]:
        card = model_card(
            TrainedRun(
                description,
                find_base_model(base_model),
                auto_class_of(model),
                document_source(place.told),
                held_out=eval_documents is None,
                tokens_trained=total,
                settings=_read(place.told, texts.packed) | _card_settings(config, texts.packed, args),
                stages=[
                    *place.earlier,
                    TrainedStage(description["context_length"], args.max_steps, total - tokens_trained),
                ],
                lengths=texts.lengths,
                unextended=unextended,
                before=before,
                after=after,
                is_adapter=is_adapted(trained),
            )
        )
        with base_not_looked_up():
            save_extended(trained, place.model, tokenizer, tokens_trained=total, base_model=base_model, card=card)
        return read_log(loss_log.path)

    with writing("the trained model", place.model, saved_bytes(trained), leftovers=partial_of(place.model)):
        lines = from_main((lambda: read_log(loss_log.path)) if finished else save)
    return StageResult(
        model=trained,
        tokens_trained=total,
        steps=args.max_steps,
        train_loss=math.fsum(line["loss"] for line in lines) / max(len(lines), 1),
        unextended=unextended,
        before=before,
        after=after,
        seconds=lines[-1]["seconds"] if lines else 0.0,
    )


def _measure(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    config: FinetuneConfig,
    args: TrainingArguments,
    tokens_trained: int,
    results: Path,
) -> list[Record]:
    """Measure in every process, so that none waits for another; the first writes the records and shows progress."""
    main = args.process_index == 0
    return measure(
        model,
        tokenizer,
        texts.held_out,
        texts.lengths,
        config,
        tokens_trained=tokens_trained,
        output=results if main else None,
        progress=main,
    )


def _measure_unextended(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    texts: Texts,
    config: FinetuneConfig,
    args: TrainingArguments,
    tokens_trained: int,
    results: Path,
) -> list[Record]:
    """Measure the model as it is without its extension; nothing where that is not the base model any more."""
    if config.eval_documents == 0 or tokens_trained or not is_patched(model):
        return []
    devices = [args.device] if args.device.type == "cuda" else []
    with torch.random.fork_rng(devices), unpatched(model):  # what it is trained to must not depend on this
        return _measure(model, tokenizer, texts, config, args, 0, results)


def _read(told: Mapping[str, Any], packed: PackedDataset) -> dict[str, Any]:
    """Return which columns of the documents were read, and what of their tokens counted, where that is not all."""
    columns = told.get("text_field") or ()
    columns = [columns] if isinstance(columns, str) else columns
    counted = 100 * packed.counted.double().mean().item()
    return {
        **({"columns": ", ".join(f"`{name}`" for name in columns)} if columns else {}),
        **({"template": f"`{told['template']!r}`"} if told.get("template") else {}),
        **(
            {"counted in the loss": f"answers or turns of the assistant, {counted:.1f} % of the tokens"}
            if counted < 100
            else {}
        ),
    }


def _card_settings(config: FinetuneConfig, packed: PackedDataset, args: TrainingArguments) -> dict[str, Any]:
    shown = ("lora", "learning_rate", "lr_scheduler_type", "weight_decay", "seed")
    group = config.group(packed.seq_len)
    return {
        **({"recipe": config.recipe} if config.recipe is not None else {}),
        "seq_len": packed.seq_len,
        "steps": args.max_steps,
        "tokens_per_step": tokens_per_step(args, packed),
        **_unusual_settings(config),
        **{name: getattr(config, name) for name in shown},
        **({name: getattr(config, name) for name in _LORA_SETTINGS} if config.lora else {}),
        **({"shifted sparse attention while training, tokens of a group": group} if group is not None else {}),
        "warmup_steps": args.warmup_steps,
        "computed in": "bfloat16, float32 weights" if args.bf16 else "float32",
        "data": packed.fingerprint(),
    }


def _unusual_settings(config: FinetuneConfig) -> dict[str, Any]:
    """Return how blocks were read and what of them counted, where that is not every token, one after the other."""
    plain = FinetuneConfig(config.output_dir)
    positions = ("position_schedule", "pose_chunks", "short_share", "length_upsampling")
    names = (*positions, "assistant_only_loss", "completion_only_loss")
    return {name: getattr(config, name) for name in names if getattr(config, name) != getattr(plain, name)}
