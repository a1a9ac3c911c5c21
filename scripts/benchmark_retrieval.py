"""Questions that share a text, read once, against a prefill for each question (run by scripts/benchmark.py)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_posenc.evaluation.losses import evaluation_mode
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.measuring_retrieval import stop_ids_of
from hf_posenc.retrieving.prompts import Prompt, PromptMaker
from hf_posenc.retrieving.scoring import Asked, Reply, replies
from hf_posenc.retrieving.tasks.base import has_words

Result = dict[str, Any]
GOAL = 20.0  # at 100 questions of 16k tokens


def benchmark_retrieval(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    num_tokens: int,
    num_questions: int,
    num_prefills: int,
) -> Result:
    """Put all questions to one text, and some of them each with a prefill of its own; time and compare both.

    Args:
        model: Reads and answers.
        tokenizer: That of the model.
        num_tokens: Of a prompt with its longest answer.
        num_questions: Of the text.
        num_prefills: Questions that are put alone, evenly spread; their mean time stands for all.
    """
    prompts = PromptMaker(tokenizer, read_haystack(tokenizer, None)).make("passkey", num_tokens, None, 0, num_questions)
    alone = [prompts[at * num_questions // num_prefills] for at in range(num_prefills)]

    stop_ids = stop_ids_of(model, tokenizer)

    def is_right(prompt: Prompt, reply: Reply) -> tuple[bool, bool]:
        return reply.choices == prompt.answer_ids, has_words(tokenizer.decode(reply.written), prompt.answers[0])

    def is_done(prompt: Prompt, written: list[int]) -> bool:
        return has_words(tokenizer.decode(written), prompt.answers[0], ended=True)

    def ask_together(prompts: Sequence[Prompt]) -> tuple[float, list[tuple[bool, bool]]]:
        """Put the questions as ``retrieval`` does those of one text."""
        asked = [
            Asked(prompt.question_ids, prompt.answer_ids, prompt.max_new_tokens, partial(is_done, prompt))
            for prompt in prompts
        ]
        started = time.perf_counter()
        got = list(replies(model, prompts[0].text_ids, asked, stop_ids=stop_ids))
        return time.perf_counter() - started, [is_right(*each) for each in zip(prompts, got, strict=True)]

    def ask_alone(one: Prompt) -> tuple[float, tuple[bool, bool]]:
        """Put a question as ``retrieval`` does the only one of a text."""
        started = time.perf_counter()
        (reply,) = replies(model, one.ids, [Asked([], one.answer_ids, one.max_new_tokens)], stop_ids=stop_ids)
        return time.perf_counter() - started, is_right(one, reply)

    with evaluation_mode(model):
        list(replies(model, prompts[0].ids[:64], [Asked([], [0], 1)]))  # warm up
        shared, found = ask_together(prompts)
        each = [ask_alone(one) for one in alone]
    seconds = sum(took for took, _ in each) / num_prefills * num_questions
    same = [found[one.question] == scores for one, (_, scores) in zip(alone, each, strict=True)]
    return {
        "benchmark": f"{num_questions} questions of {num_tokens} tokens, each prefilled / shared",
        "ratio": seconds / shared,
        "goal": GOAL,
        "better": "higher",
        "seconds_shared": shared,
        "seconds_each_prefilled": seconds,
        "prefills_timed": num_prefills,
        "same_scores": f"{sum(same)} of {num_prefills}",
        "right_forced": sum(forced for forced, _ in found),
        "right_written": sum(written for _, written in found),
        "parameters": model.num_parameters(),
        "dtype": str(model.dtype),
        "device": str(model.device),
    }
