"""The retrieval tasks as tasks of EleutherAI's evaluation harness (lm-eval): ``hf_posenc_kv`` and so on.

``hf-posenc lm-eval MODEL --tasks hf_posenc_kv --metadata '{"max_seq_lengths": [4096, 8192]}'``. The names are those of
the registry, and of groups, with a prefix. Each answer is scored as it is written; lm-eval reads the whole text again
for each question.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset
from lm_eval.api.task import ConfigurableTask
from transformers import PreTrainedTokenizerBase

from hf_posenc.checkpoint.loading import read_tokenizer
from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.retrieving.config import check_retrieval
from hf_posenc.retrieving.haystack import read_haystack
from hf_posenc.retrieving.prompts import PromptMaker
from hf_posenc.retrieving.tasks import expand_groups, get_task
from hf_posenc.retrieving.tasks.base import num_written

PREFIX = "hf_posenc_"
_LENGTHS, _SAMPLES = (4096,), 100
# Tokens that a text is shorter: lm-eval puts text and question into tokens together, which may take a few more, and has
# one longest answer for all texts.
_SPARE = 64


class RetrievalTask(ConfigurableTask):  # type: ignore[misc]  # lm-eval may not be installed where types are checked
    """A task of the registry. Its score has a column for each length, the share of the answers that are written.

    Args:
        config: lm-eval's. ``task`` is the name with its prefix. ``metadata`` has ``max_seq_lengths``, tokens of prompt
            and answer together, by default 4096; ``num_samples`` of each length, by default 100; ``seed``, by default
            0; and the model's arguments, of which ``tokenizer`` or else ``pretrained`` says which tokenizer counts.

    Raises:
        TypeError, ValueError: A number that cannot be, no tokenizer, or a length too short for the task.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        name, metadata = config["task"].removeprefix(PREFIX), config.get("metadata") or {}
        lengths, samples, seed = _numbers(name, metadata)
        rows = list(_rows(name, _tokenizer(metadata), lengths, samples, seed))
        super().__init__(
            config={
                "task": config["task"],
                "custom_dataset": lambda **kwargs: {"test": Dataset.from_list(rows)},
                "test_split": "test",
                "output_type": "generate_until",
                "doc_to_text": "text",
                "gen_prefix": "answer_prefix",
                "doc_to_target": "target",
                "generation_kwargs": {
                    "until": [],
                    "do_sample": False,
                    "max_gen_toks": max(row["max_new_tokens"] for row in rows),
                },
                "process_results": _score,
                "metric_list": [
                    {"metric": str(length), "aggregation": "mean", "higher_is_better": True} for length in lengths
                ],
                "metadata": metadata,
            }
        )


def check_tasks(names: Sequence[str], metadata: dict[str, Any]) -> None:
    """Raise what our tasks would once lm-eval has loaded the model: a prompt of each task and length is made.

    Args:
        names: What ``--tasks`` has; names of others' tasks are passed over.
        metadata: As for ``RetrievalTask``.

    Raises:
        TypeError, ValueError: As for ``RetrievalTask``, or a name has our prefix, and is none of our tasks or groups.
    """
    tokenizer = _tokenizer(metadata)
    for name in _ours(names):
        lengths, _, seed = _numbers(name, metadata)
        list(_rows(name, tokenizer, lengths, 1, seed))


def write_task_files(names: Sequence[str], folder: Path) -> list[str]:
    """Write the file that lm-eval reads for each of our tasks; the others' names are kept.

    Returns:
        What to give to ``--tasks``: paths of the files, and names of others' tasks.

    Raises:
        ValueError: A name has our prefix, and is none of our tasks or groups.
    """
    others = [name for name in names if not name.startswith(PREFIX)]
    for name in _ours(names):
        path = folder / f"{PREFIX}{name}.yaml"
        path.write_text(f"task: {PREFIX}{name}\nclass: !function {__name__}.{RetrievalTask.__name__}\n")
        others.append(str(path))
    return others


def _ours(names: Sequence[str]) -> list[str]:
    """Return those of our tasks that are named, by themselves or by their groups."""
    ours = expand_groups([name.removeprefix(PREFIX) for name in names if name.startswith(PREFIX)])
    for name in ours:
        get_task(name)
    return ours


def _numbers(name: str, metadata: dict[str, Any]) -> tuple[list[int], int, int]:
    """Return the lengths, rising, the samples of each, and the seed."""
    lengths = metadata.get("max_seq_lengths", _LENGTHS)
    lengths = [lengths] if isinstance(lengths, int) else lengths
    samples, seed = metadata.get("num_samples", _SAMPLES), metadata.get("seed", 0)
    whole = isinstance(lengths, list | tuple) and all(isinstance(one, int) for one in (*lengths, samples, seed))
    if not whole:
        raise InvalidTypeError(
            "max_seq_lengths of --metadata must be whole numbers of tokens, such as [4096, 8192], and num_samples and "
            f"seed whole numbers, got {lengths!r}, {samples!r} and {seed!r}."
        )
    return check_retrieval([name], lengths, [50], samples), samples, seed


def _tokenizer(metadata: dict[str, Any]) -> PreTrainedTokenizerBase:
    source = metadata.get("tokenizer") or metadata.get("pretrained")
    if not isinstance(source, str):
        raise InvalidRequestError(
            "a retrieval task needs the model's tokenizer, to fill a length to the token. Give its name or folder: "
            '--metadata \'{"tokenizer": "MODEL"}\', or metadata={"tokenizer": "MODEL"} of a TaskManager.'
        )
    return read_tokenizer(source)


def _rows(
    name: str, tokenizer: PreTrainedTokenizerBase, lengths: Sequence[int], samples: int, seed: int
) -> Iterator[dict[str, Any]]:
    """Yield the rows of the data set, by length; a text has room for the chat template, which lm-eval adds."""
    maker = PromptMaker(tokenizer, read_haystack(tokenizer, None), "off")
    spare = _SPARE
    if tokenizer.chat_template:
        message = [{"role": "user", "content": ""}]
        spare += len(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))
    for length in lengths:
        for sample in range(samples):
            (prompt,) = maker.make(name, length, None, seed + sample, spare=spare)
            text = str(tokenizer.decode(prompt.ids, skip_special_tokens=True))
            question, newline, answer_prefix = text.rpartition("\n")
            yield {
                "text": question + newline,
                "answer_prefix": answer_prefix,
                "answers": list(prompt.answers),
                "choices": list(prompt.choices),
                "target": ", ".join(prompt.answers),
                "length": length,
                "max_new_tokens": prompt.max_new_tokens,
            }


def _score(row: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    """Return the share of the answers that are written, in the column of the text's length."""
    right = num_written(results[0], row["answers"], row["choices"])
    return {str(row["length"]): right / len(row["answers"])}
