"""Perplexity by context length: one pass a document where that is enough, resumable, with its protocol on record."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation.config import EvalConfig, KeyTokens, check_short_context
from hf_posenc.evaluation.documents import (
    Document,
    choose_texts,
    count_documents,
    hash_token_ids,
    hash_tokenizer,
    settle_bos,
    to_token_ids,
    warn_of_averages,
)
from hf_posenc.evaluation.key_tokens import KeyTokenFinder
from hf_posenc.evaluation.lm_head import check_head
from hf_posenc.evaluation.losses import (
    evaluation_mode,
    length_dependent_rope_types,
    memory_need,
    refuse_chunks,
    window_losses,
)
from hf_posenc.evaluation.memory import memory_logged, peak_memory
from hf_posenc.evaluation.model_facts import hash_weights, make_run_key, model_facts
from hf_posenc.evaluation.passes import Evaluation, default_bucket
from hf_posenc.evaluation.protocols import ProtocolName
from hf_posenc.evaluation.records import Record, check_output
from hf_posenc.evaluation.windows import Pass, Run, plan_passes
from hf_posenc.families.rotary_model import RotaryModel
from hf_posenc.settings import optional, whole
from hf_posenc.utils.dtypes import slow_dtype_advice
from hf_posenc.utils.processes import Processes

logger = logging.getLogger(__name__)

_FEEDING = ("prefill_chunk", "logits_chunk", "batch_size")  # settings that ``window_losses`` takes too


def perplexity(
    model: PreTrainedModel,
    documents: Sequence[Document],
    context_lengths: Sequence[int] | EvalConfig,
    protocol: ProtocolName | Sequence[ProtocolName] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    output: str | Path | None = None,
    label: str = "",
    model_name: str | None = None,
    tokens_trained: int | None = 0,
    progress: bool = True,
    seed: int = 0,
    position_bucket: int | None = None,
    sharded: bool = False,
    command: str = "",
    key_tokens: KeyTokens | None = None,
    **settings: Any,
) -> list[Record]:
    """Measure the perplexity of documents at several context lengths.

    Our own protocols, on the same documents at every length (those that reach the longest):

    - ``truncated``: the first N tokens of each document, tokens 1 to N - 1 scored.
    - ``last_k``: tokens N - k to N - 1 scored, each with everything before it as context.
    - ``sliding_window``: windows of N tokens over the whole document, each token but the first scored once.
    - ``same_tokens``: the tokens from the shortest context length on, scored at every length, each with up to N tokens
      fed: the one for comparing lengths, and methods.
    - ``longppl``: LongPPL, the perplexity of the tokens that need the long context; see ``key_tokens``.

    And the published ones, as their code does it: ``yarn``, ``yarn_govreport``, ``pi``, ``pose``, ``longlora``,
    ``dca``, ``rerope``. The table is ``hf_posenc.evaluation.protocols.RULES``; records say in words what they are of.

    One pass at the longest length serves ``truncated`` and ``last_k`` at all lengths, unless the model's frequencies
    depend on the length fed (Transformers' ``dynamic``, ``longrope`` with two lists): then each length has its own.

    Args:
        model: A causal language model, patched or not, wrapped by PEFT or not.
        documents: Texts (with ``tokenizer``) or rows of token ids; never truncated by the tokenizer.
        context_lengths: Tokens fed at a time, BOS included; or an ``EvalConfig`` with all settings.
        protocol: One name or several, which share what passes they can; None is ``truncated``.
        tokenizer: The model's tokenizer; may be None where ``documents`` are token ids.
        output: JSON-lines file the records are appended to. What an interrupted run has done is kept in
            ``<output>.progress``: the same call skips it and gives the same numbers; records already in ``output``
            are not measured again.
        label: Free words for the records, such as the name of a report's row.
        model_name: The records' model; None takes the path or name the model was loaded from.
        tokens_trained: Tokens the model was fine-tuned on, for the records; 0 is zero-shot, None unknown.
        progress: Show a progress bar with the remaining time.
        seed: Seed of the bootstrap intervals.
        position_bucket: Tokens that share a value of the loss by position, which records of ``truncated`` hold; None
            takes a 32nd of the original length (at least 16), and 256 where that is unknown.
        sharded: Share the documents among the processes of torchrun or accelerate: every process calls this with the
            same arguments and gets the same records, those of a single process; only the main one writes.
        command: What was typed to measure this, for the records.
        key_tokens: How ``longppl`` chooses its tokens, and which model does; None is ``KeyTokens()``.
        **settings: The other fields of ``EvalConfig``, which documents them: ``stride``, ``last_k``, ``max_tokens``,
            ``min_tokens``, ``max_documents``, ``cut``, ``bos``, ``average``, ``prefill_chunk``, ``logits_chunk`` and
            ``batch_size``. A prefill in chunks gives equal numbers, and less memory only where a layer's activations
            are larger than the cache of all layers. Whatever is not the mean over tokens says so when it runs, and in
            its record.

    Returns:
        A record per protocol and length, in the order of the protocols, by rising length. Where ``longppl`` finds no
        key token, it warns and there is none.

    Raises:
        ValueError: No document is long enough; a length, stride, chunk or protocol that cannot be; a model whose head
            or losses cannot be trusted; ``output`` is a folder.
        TypeError: ``documents`` is not a list, ``context_lengths`` not one of whole numbers, or texts came without a
            tokenizer.
    """
    path = None if output is None else check_output(output)
    config = EvalConfig.of(context_lengths, protocol, **settings)
    position_bucket = optional(whole(1))(argument("position_bucket"), position_bucket)
    rotary = RotaryModel(model)
    model, text_config = rotary.model, rotary.text_config
    runs, bos_id = settle_bos(config.runs(), text_config, tokenizer, config.bos)
    ids = to_token_ids(documents, tokenizer, text_config.vocab_size)
    texts = choose_texts(runs, ids, bos_id, config)
    warn_of_averages(runs)
    longppl = [run.context_length for run in runs if run.protocol == "longppl"]
    if key_tokens is not None and not longppl:
        raise InvalidRequestError(f"key_tokens is for protocol longppl, not for {', '.join(config.protocol)}.")
    key_tokens = key_tokens or KeyTokens()
    evaluator = RotaryModel(key_tokens.evaluator).model if key_tokens.evaluator is not None and longppl else None
    models = [model] if evaluator is None else [model, evaluator]
    with ExitStack() as stack:
        for one in models:
            stack.enter_context(evaluation_mode(one))
            check_head(one)
        facts = model_facts(model, model_name, tokens_trained, label, command)
        facts |= {"tokenizer_hash": hash_tokenizer(tokenizer)}
        decisive = {"weights": hash_weights(model), "seed": seed}
        with_evaluator = decisive
        if evaluator is not None:
            to_token_ids(ids, None, evaluator.config.get_text_config(decoder=True).vocab_size)  # has these tokens too
            with_evaluator = {**decisive, "evaluator": hash_weights(evaluator)}
        original = facts["original_max_position_embeddings"]
        feeding: dict[str, Any] = {name: getattr(config, name) for name in _FEEDING}
        losses_of, *judges = (partial(window_losses, one, **feeding) for one in models)
        finder = KeyTokenFinder.of(key_tokens, losses_of, judges, original)
        check_short_context(finder.short_context, longppl)
        identities = {}
        for run in runs:
            identity = facts | run.facts(count_documents(run, texts[run], ids, config), config.max_tokens)
            identity["text_hash"] = hash_token_ids(row[: run.fed(len(row))] for row in texts[run])
            if run.protocol == "longppl":
                identity |= finder.facts(identity["scored"])
            decides = with_evaluator if run.protocol == "longppl" else decisive
            identities[run] = {**identity, "run_key": make_run_key(identity, decides)}
        bucket = position_bucket or default_bucket(original)
        evaluation = Evaluation(finder, texts, bos_id, identities, seed, bucket, path, Processes(sharded))
        passes = _passes(models, runs, config.prefill_chunk)
        fed = [windows for one in passes for windows in evaluation.fed(one)]
        needs = [memory_need(one, fed, **feeding) for one in models]
        need = replace(max(needs, key=lambda one: one.beyond_model), model=sum(one.model for one in needs))
        log = evaluation.processes.is_main and len(evaluation.records) < len(runs)
        with memory_logged(model.device, need, facts["method"], log=log):
            shorter = slow_dtype_advice(model) + "fewer documents (--max-documents), or shorter --context-lengths"
            evaluation.measure(passes, partial(peak_memory, model.device), progress, shorter)
    return [evaluation.records[run] for run in runs if run in evaluation.records]


def _passes(models: list[PreTrainedModel], runs: list[Run], prefill_chunk: int | None) -> list[Pass]:
    rope_types = [name for model in models for name in length_dependent_rope_types(model)]
    if not rope_types:
        return plan_passes(runs, causal_in_position=True)
    refuse_chunks(rope_types, prefill_chunk)
    name = " and ".join(rope_types)
    logger.warning("rope_type %r depends on the length that is fed: one pass for each context length.", name)
    return plan_passes(runs, causal_in_position=False)
