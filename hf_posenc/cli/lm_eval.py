"""``hf-posenc lm-eval``: EleutherAI's evaluation harness on a model as it is, or extended."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hf_posenc.cli.shared_arguments import ModelArguments, OptionArguments, parse, parse_options
from hf_posenc.errors import InvalidRequestError, MissingPackageError
from hf_posenc.patching.extension_config import ExtensionConfig, rows_to_measure

_FLAG = re.compile(r"--?[A-Za-z]")
_TASKS = ("--tasks", "-t")


@dataclass
class HarnessArguments:
    """How the model is extended."""

    method: str | None = field(
        default=None,
        metadata={"help": "a method from `hf-posenc list methods`; default: the model as it is, or as --preset says"},
    )


def lm_eval(argv: Sequence[str]) -> None:
    """Run tasks of lm-eval on a model, as it is or extended; all other flags are passed to lm-eval.

    Examples:
        hf-posenc lm-eval MODEL --method yarn --factor 4 --tasks piqa --limit 100
        hf-posenc lm-eval MODEL --tasks hf_posenc_kv --metadata '{"max_seq_lengths": [4096, 8192]}'

    Raises:
        ImportError: lm-eval is not installed.
        TypeError, ValueError: The request for a method is wrong, as for ``hf-posenc eval``, or one of our tasks cannot
            be as --metadata has it, or lm-eval refuses its own.
    """
    known = (HarnessArguments, ExtensionConfig, OptionArguments, ModelArguments)
    ours, theirs = split_flags(argv, known)
    positional = {"model": "name on the Hub, folder or .gguf file; first, before all flags"}
    given, which, extension, options, loading = parse("lm-eval", lm_eval.__doc__, ours, known, positional)
    named = [] if which.method is None else [which.method]
    rules = parse_options(options.option)
    rows_to_measure(named, extension, rules)
    if {"--model", "-M"} & {word.partition("=")[0] for word in theirs}:
        raise InvalidRequestError(
            "--model is always hf_posenc here; other model classes of lm-eval are run by lm_eval itself."
        )
    if find_spec("lm_eval") is None:
        raise MissingPackageError("lm-eval is not installed. It comes with: pip install 'hf_posenc[lm-eval]'")
    arguments = model_args(given.model, which.method, extension, rules, loading)
    from hf_posenc.checkpoint.loading import to_device  # brings torch

    # lm-eval's own default is cuda:0, with or without such a GPU.
    device = str(to_device(None)) if loading.device in (None, "auto") else loading.device
    words = ["--model", "hf_posenc", "--model_args", json.dumps(arguments), "--device", device]
    call_lm_eval(["run", *words, *theirs])


def split_flags(argv: Sequence[str], known: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return the words of our flags, with what comes before any flag, and those of all others."""
    names = {one.name for kind in known for one in fields(kind)} | {"h", "help", "help_all", "traceback"}
    ours: list[str] = []
    theirs: list[str] = []
    here = ours
    for word in argv:
        if _FLAG.match(word):
            here = ours if word.lstrip("-").partition("=")[0].replace("-", "_") in names else theirs
        here.append(word)
    return ours, theirs


def model_args(
    model: str, method: str | None, extension: ExtensionConfig, rules: dict[str, Any], loading: ModelArguments
) -> dict[str, Any]:
    """Return lm-eval's ``model_args``, as JSON can say them, without what is left at its default."""
    usual = vars(ExtensionConfig())
    arguments: dict[str, Any] = {"pretrained": model, "method": method, "options": rules or None}
    arguments |= {name: value for name, value in vars(extension).items() if value != usual[name]}
    arguments |= {"dtype": loading.dtype, "attn_implementation": loading.attn_implementation}
    arguments["parallelize"] = True if loading.device == "auto" else None
    return {name: value for name, value in arguments.items() if value is not None}


def call_lm_eval(words: Sequence[str]) -> None:
    """Run lm-eval's own command, which reads ``sys.argv``, with our model class and tasks known to it."""
    from lm_eval.__main__ import HarnessCLI, cli_evaluate
    from lm_eval.config.evaluate_config import EvaluatorConfig

    import hf_posenc.evaluation.lm_eval_model  # noqa: F401  # registers the class
    from hf_posenc.retrieving.lm_eval_tasks import PREFIX, check_tasks, write_task_files

    others, names = _split_tasks(words)
    has_ours = any(name.startswith(PREFIX) for name in names)
    before = sys.argv
    with TemporaryDirectory() as folder:
        tasks = ["--tasks", *write_task_files(names, Path(folder))]
        sys.argv = ["lm-eval", *(others + tasks if has_ours else words)]
        try:
            if has_ours:  # lm-eval makes its tasks after it has loaded the model
                check_tasks(names, EvaluatorConfig.from_cli(HarnessCLI().parse_args()).metadata)
            cli_evaluate()
        finally:
            sys.argv = before


def _split_tasks(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words without the tasks, and the names of the tasks."""
    others: list[str] = []
    names: list[str] = []
    is_task = False
    for word in words:
        flag, _, value = word.partition("=")
        is_task = flag in _TASKS if _FLAG.match(word) else is_task
        if is_task:
            names += filter(None, (value if flag in _TASKS else word).split(","))
        else:
            others.append(word)
    return others, names
