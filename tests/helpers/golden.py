"""Record what a checkout of hf_posenc does, and compare two recordings to the bit.

    python tests/helpers/golden.py record --package CHECKOUT --output BEFORE
    python tests/helpers/golden.py record --package OTHER_CHECKOUT --output AFTER
    python tests/helpers/golden.py compare BEFORE AFTER

Both recordings have to be made on one machine with one Python environment: everything runs on the CPU, each process
with one thread, on small random models and on the tiny model of the package. Only what ``hf_posenc`` itself exports and
the command ``hf-posenc`` are used, so that the package can be laid out anew between the two. What may be renamed in
between stands in the tables here (``COMMANDS``, ``RUNS``, ``FILES``); differences that were agreed on stand in the
tables of ``compare``. ``golden_jobs`` does the recording, a process for each job.

``compare`` exits with 1 if something differs, and with 2 if the recordings cannot be compared.
"""

from __future__ import annotations

import argparse
import difflib
import json
import math
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

# ---- What may be renamed: command lines, settings of runs, file names ----

_YARN_DICTIONARY = '{"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}'
_EVAL = "eval tiny --documents book.txt --dtype float32 --cut --max-documents 2 --hide-progress"
_ASK = "eval tiny --dtype float32 --method none yarn --factor 4 --hide-progress"
_COMPARE = "compare tiny --documents book.txt --context-length 512 --dtype float32 --cut --max-documents 2"
_TUNE = "finetune tiny --documents book.txt --dtype float32 --eval-documents 2 --save-steps 10"
_SERVERS = ("vllm", "sglang", "llama.cpp", "tgi")
# With flags that fit: those where something lies at one depth, and those that need longer texts.
_TASKS = {
    **dict.fromkeys(("passkey", "niah_single", "niah_multikey"), "--context-lengths 256 512 --depths 0 100"),
    **dict.fromkeys(("niah_multivalue", "niah_multiquery", "vt", "fwe"), "--context-lengths 640"),
    "cwe": "--context-lengths 1024",
}
_LISTS = f"long_factor={json.dumps([1 + pair / 8 for pair in range(32)])}".replace(" ", "")
_COMMANDS = ("patch", "eval", "compare", "plan", "finetune", "report", "export", "explain", "methods", "doctor", "demo")
_PATCHED: dict[str, str | list[str]] = {
    "yarn": "patch tiny yarn --method yarn --factor 4",
    "yarn_paper": "patch tiny yarn_paper --method yarn --factor 4 --option ramp=paper",
    "linear": "patch tiny linear --method linear --context-length 1k",
    "ntk": "patch tiny ntk --method ntk --factor 2",
    "ntk_by_parts": "patch tiny ntk_by_parts --method ntk_by_parts",
    "llama3": "patch tiny llama3 --method llama3 --factor 8",
    "abf": "patch tiny abf --method abf --option rope_theta=1000000",
    "dynamic_sequence": "patch tiny dynamic_sequence --method dynamic --option scope=sequence",
    "dynamic_yarn": "patch tiny dynamic_yarn --method dynamic_yarn --factor 4",
    "dca": "patch tiny dca --method dca --factor 4",
    "alibi": "patch tiny alibi --method alibi",
    "dictionary": ["patch", "tiny", "dictionary", "--rope-scaling", _YARN_DICTIONARY],
}

# A group of commands runs in order in one folder, which holds `tiny`, the model of the package, and `book.txt`; other
# groups run beside it. `{method}` stands for each of available_methods(). Names of commands stay as they are.
COMMANDS: dict[str, dict[str, str | list[str]]] = {
    "listings": {
        "methods": "methods",
        "families": "methods --families",
        "presets": "presets",
        "published checkpoints": "presets --checkpoints",
        "recipes": "recipes",
        "explain {method}": "explain {method}",
        "explain yarn of the tiny model": "explain yarn --model tiny --factor 8 --option ramp=paper",
        "explain longrope with lists": f"explain longrope --model tiny --option {_LISTS}",
        "explain with pictures": "explain ntk --model tiny --output-dir explained",
        "gallery": "gallery --output-dir gallery",
        "version": "--version",
        "help": "--help",
        **{f"help of {name}": f"{name} --help" for name in _COMMANDS},
        "mistake: command": "evaluate",
        "mistake: flag": "eval tiny --documents book.txt --context-lengths 128 --metod yarn",
        "mistake: method": "patch tiny out --method yran",
        "mistake: option": "patch tiny out --method linear --option beta_fast=16",
        "mistake: factor": "patch tiny out --method yarn --factor 0.5",
        "mistake: factor and length": "patch tiny out --factor 4 --context-length 1k",
        "mistake: model": "eval nowhere/nothing --documents book.txt --context-lengths 128",
        "mistake: documents": "eval tiny --documents nothing.txt --context-lengths 128",
        "mistake: length": "eval tiny --documents book.txt --context-lengths many",
        "mistake: protocol": "eval tiny --documents book.txt --context-lengths 128 --protocol all",
        "mistake: recipe": "finetune tiny --documents book.txt --recipe yarn-4000 --output-dir out",
        "mistake: records": "report nothing.jsonl",
        "mistake: server": "export tiny --to ollama",
    },
    "checkpoints": {
        **{f"patch {name}": command for name, command in _PATCHED.items()},
        "patch a patched one": "patch yarn twice --method linear --factor 2",
        "patch a patched one anew": "patch yarn replaced --method linear --factor 2 --on-scaled replace",
        **{f"export {name} to {server}": f"export {name} --to {server}" for name in _PATCHED for server in _SERVERS},
        **{f"export dca as yarn to {server}": f"export dca --to {server} --as yarn" for server in _SERVERS},
        **{f"doctor {name}": f"doctor {name}" for name in ("tiny", *_PATCHED)},
        "doctor of a live model": "doctor yarn --live",
        "doctor of an old dictionary": "doctor old",
        "doctor mends an old dictionary": "doctor old --fix mended",
        "doctor of a wrong dictionary": "doctor wrong",
        "patch over another one": "patch tiny ntk --method linear",
        "plan tiny": "plan tiny --context-length 1k --dtype float32",
        "plan 7B": "plan llama7b --context-length 128k --dtype bfloat16 --gpu-memory 24GB",
        "plan 7B on a server": "plan llama7b --context-length 32k --dtype bfloat16 --gpu-memory 80GB --server --gpus 2",
        "plan training": "plan llama7b --context-length 32k --dtype bfloat16 --gpu-memory 80GB --token-budget 10M "
        "--lora --gradient-checkpointing --tokens-per-second 2000",
        "plan as JSON": "plan llama7b --context-length 64k --dtype bfloat16 --gpu-memory 80GB --recipe pose --json",
    },
    "perplexity": {
        "eval": f"{_EVAL} --context-lengths 128 256 512 --method none yarn dynamic_yarn dca --factor 4 --protocol "
        "same_tokens truncated --output results.jsonl",
        "eval again": f"{_EVAL} --context-lengths 128 256 512 --method none yarn --factor 4 --protocol same_tokens "
        "truncated --output results.jsonl",
        "eval by a dictionary": [*_EVAL.split(), "--context-lengths", "512", "--rope-scaling", _YARN_DICTIONARY],
        "eval the tokens that need context": f"{_EVAL} --context-lengths 512 --method yarn --protocol longppl "
        "--alpha 1 --beta -3 --short-context 64 --output longppl.jsonl",
        "eval an encoding": f"{_EVAL} --context-lengths 128 --method alibi --output encoding.jsonl",
        "compare, only told": f"{_COMPARE} --dry-run",
        # One rule each whose time differs: rows are measured in the order of their estimated times.
        "compare": f"{_COMPARE} --methods none yarn ntk --output compared.jsonl --hide-progress",
        "compare with tasks": f"{_COMPARE} --methods none dynamic_yarn --tasks passkey --depths 50 --hide-progress "
        "--output compared.jsonl",
        "compare distances": f"{_COMPARE} --methods none self_extend --output distances.jsonl --hide-progress",
        "report": "report results.jsonl --output-dir report --title Golden",
        "report of all": "report results.jsonl longppl.jsonl encoding.jsonl compared.jsonl --output-dir report_of_all",
    },
    "verdicts": {  # which need more text
        "eval": "eval tiny --documents novel:persuasion --dtype float32 --cut --max-documents 44 --hide-progress "
        "--context-lengths 128 256 512 --method none yarn dynamic_yarn --factor 2 --output results.jsonl",
        "report": "report results.jsonl --output-dir report",
    },
    "retrieval": {
        **{task: f"{_ASK} --tasks {task} {flags} --output {task}.jsonl" for task, flags in _TASKS.items()},
        "staged": "eval tiny --dtype float32 --context-lengths 512 --method dynamic_yarn self_extend --factor 4 "
        "--tasks passkey vt --depths 50 --samples 2 --output staged.jsonl --hide-progress",
        "own documents": f"{_ASK} --tasks niah_single --documents book.txt --context-lengths 512 --output own.jsonl",
        "report": f"report {' '.join(f'{task}.jsonl' for task in _TASKS)} staged.jsonl --output-dir report",
    },
    "training": {
        "finetune": f"{_TUNE} --method yarn --factor 2 --token-budget 3k --learning-rate 1e-4 --output-dir tuned",
        "finetune by a recipe": f"{_TUNE} --recipe longlora --factor 2 --token-budget 2k --output-dir adapters",
        "finetune in stages": f"{_TUNE} --stages 512:2k 1k:3k --output-dir staged",
        "finetune from a file": "finetune tiny --config tuned/run.toml --seed 3 --output-dir again",
        "finetune goes on": "finetune tiny --config tuned/run.toml --resume",
        "finetune into a full folder": "finetune tiny --config tuned/run.toml",
        "eval the tuned one": "eval tuned --documents book.txt --context-lengths 256 512 --cut --max-documents 2 "
        "--dtype float32 --output tuned.jsonl --hide-progress",
        "doctor of the tuned one": "doctor tuned",
        "doctor of the adapters": "doctor adapters",
        "export of the tuned one": "export tuned --to vllm",
        "report": "report tuned/results.jsonl tuned.jsonl --output-dir report",
    },
}

# Settings of fine-tuning runs of the tiny model, 20 steps each; `documents` names a function of golden_jobs.
_SHORT = {"factor": 2.0, "original_max_position_embeddings": 128, "learning_rate": 5e-4, "warmup_steps": 4}
_SHORT |= {
    "token_budget": 20 * 2 * 256,
    "per_device_train_batch_size": 2,
    "eval_documents": 2,
    "save_steps": 10,
    "seed": 7,
}
RUNS: dict[str, dict[str, Any]] = {
    "full": {"documents": "long", **_SHORT, "method": "yarn"},
    "packed": {
        "documents": "short",
        **_SHORT,
        "method": "ntk",
        "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 1,
    },
    "lora": {"documents": "long", **_SHORT, "method": "linear", "lora": True, "lora_rank": 4},
    "lora_all_linear": {
        **{"documents": "short", **_SHORT, "lora": True, "lora_targets": "all-linear", "lora_embeddings": False},
        **{"gradient_checkpointing": True, "lr_scheduler_type": "cosine", "weight_decay": 0.1},
    },
    "pose": {
        **{"documents": "long", **_SHORT, "method": "yarn", "options": {"ramp": "harmonic"}, "seq_len": 128},
        **{"position_schedule": "pose", "token_budget": 20 * 2 * 128},
    },
    "random_positions": {
        **{"documents": "long", **_SHORT, "position_schedule": "random", "seq_len": 128},
        **{"token_budget": 20 * 2 * 128},
    },
    "chats": {"documents": "chats", **_SHORT, "assistant_only_loss": True},
    "answers": {"documents": "answers", **_SHORT, "short_share": 0.5},
    "dynamic": {"documents": "long", **_SHORT, "method": "dynamic_yarn"},
    "distance": {"documents": "short", **_SHORT, "method": "self_extend"},
    "shifted": {"documents": "long", **_SHORT, "method": "linear", "shifted_sparse_attention": True},
    "encoding": {"documents": "long", **_SHORT, "method": "alibi"},
    "stages": {
        **{"documents": "long", **_SHORT, "factor": None, "stages": ["256:5k", "512:6k"], "length_upsampling": 2.0},
    },
}

# How `perplexity` is called, and on what: (method, factor), or None for the model as it is.
PROTOCOLS: dict[str, dict[str, Any]] = {
    "truncated": {},
    "last_k": {"last_k": 48},
    "sliding_window": {"stride": 48},
    "same_tokens": {},
    "longppl": {"context_lengths": [256, 512]},
    "yarn": {"context_lengths": [320, 512]},
    "yarn_govreport": {"context_lengths": [320, 512]},
    "pi": {"context_lengths": [320, 512]},
    "pose": {"context_lengths": [320, 512], "stride": 100},
    "longlora": {"context_lengths": [320, 512]},
    "dca": {"context_lengths": [320, 512]},
    "rerope": {"last_k": 64},
}
MEASURED: dict[str, tuple[str, float] | None] = {
    "plain": None,
    "yarn": ("yarn", 4.0),
    "dynamic_yarn": ("dynamic_yarn", 4.0),
}
# More of `perplexity`: keywords, and the method if it is not "yarn".
MEASUREMENTS: dict[str, tuple[dict[str, Any], str]] = {
    "two protocols": ({"protocol": ["truncated", "last_k"], "last_k": 32}, "yarn"),
    "prefill_chunk": ({"prefill_chunk": 48}, "yarn"),
    "prefill_chunk of stages": ({"prefill_chunk": 48}, "dynamic_yarn"),
    "prefill_chunk of distances": ({"prefill_chunk": 48}, "dca"),
    "logits_chunk": ({"logits_chunk": 7}, "yarn"),
    "batches": ({"protocol": "sliding_window", "stride": 64, "batch_size": 3}, "yarn"),
    "batches of stages": ({"protocol": "sliding_window", "stride": 64, "batch_size": 3}, "dynamic"),
    "bos": ({"bos": "prepended"}, "yarn"),
    "mean of windows": ({"protocol": "sliding_window", "stride": 64, "average": "windows"}, "yarn"),
    "max_tokens": ({"protocol": "sliding_window", "stride": 64, "max_tokens": 600}, "yarn"),
    "cut": ({"cut": True, "max_documents": 3}, "yarn"),
    "position_bucket": ({"position_bucket": 32, "seed": 5}, "yarn"),
    "length dependent": ({}, "dynamic, scope=sequence"),
    "self_extend": ({}, "self_extend"),
    "encoding": ({}, "alibi"),
}

# Files by what is recorded of them, wherever they lie: a name, or the end of one.
FILES = {
    "skipped": ("training_args.bin", ".progress", ".bak"),
    "folders of which names are recorded": ("checkpoint-", "runs"),
}

# ---- What has been agreed on: what compare does not tell ----

# (regular expression, replacement) for the paths of the first recording, and for its texts.
RENAMED_PATHS: list[tuple[str, str]] = []
RENAMED_WORDS: list[tuple[str, str]] = []
# Regular expressions of paths that may differ, with the reason.
MAY_DIFFER: dict[str, str] = {}

# Below these parts of a path stand words for people; `compare --numbers` leaves them out.
_WORDS = re.compile(r"/(words|scored|command|.*\.(md|html|txt))(/|$)")
_TOLD_LINES = 40  # of a text's difference


def compare(before: Path, after: Path, *, numbers: bool = False, only: Sequence[str] = ()) -> list[str]:
    """Return the differences of two recordings, each with its path.

    Args:
        before: Folder that ``record`` wrote.
        after: Another one.
        numbers: Leave out words for people.
        only: Jobs to look at, where a recording does not have all; none given: all, which have to be the same.

    Raises:
        ValueError: One is not a recording, or they were made in different environments.
    """
    first, second = _read(before, only), _read(after, only)
    checked = {"environment.json": "other versions or another machine", "about.json": "other jobs"}
    for name in list(checked)[: 1 if only else 2]:
        one, other = (json.loads((folder / name).read_text())["comparable"] for folder in (before, after))
        if one != other:
            raise ValueError(f"recordings of {checked[name]} cannot be compared: {one}, {other}.")
    old = {_renamed(path, RENAMED_PATHS): _renamed(value, RENAMED_WORDS) for path, value in first.items()}
    paths = [
        path
        for path in sorted(old.keys() | second.keys())
        if not any(re.search(pattern, path) for pattern in MAY_DIFFER) and not (numbers and _WORDS.search(path))
    ]
    told = {path: _difference(old[path], second[path]) for path in paths if path in old and path in second}
    told = {path: what for path, what in told.items() if what}
    told |= _alone([path for path in paths if path not in second], old, second, "missing in the second, was")
    told |= _alone([path for path in paths if path not in old], second, old, "added in the second, is")
    return [f"{path}: {told[path]}" for path in sorted(told)]


def _alone(paths: Sequence[str], there: dict[str, Any], other: dict[str, Any], what: str) -> dict[str, str]:
    """Tell of paths that one recording has alone; once for all of a folder that the other one has nothing of."""
    folders = other.keys() | {parent for path in other for parent in _parents(path)}
    of_folder: dict[str, list[str]] = {}
    for path in paths:
        top = next((parent for parent in _parents(path) if parent not in folders), path)
        of_folder.setdefault(top, []).append(path)
    return {
        top: f"{what} {_short(there[top]) if found == [top] else f'{len(found)} values'}"
        for top, found in of_folder.items()
    }


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:end]) for end in range(1, len(parts))]


def _read(folder: Path, only: Sequence[str]) -> dict[str, Any]:
    """Return all leaves of a recording by path: scalars, and lists of scalars."""
    files = {file.stem: file for file in sorted((folder / "jobs").glob("*.json"))}
    if not files or not (folder / "about.json").is_file():
        raise ValueError(f"{folder} is not a finished recording: `python tests/helpers/golden.py record` writes one.")
    if lacking := set(only) - files.keys():
        raise ValueError(f"{folder} has no job {', '.join(sorted(lacking))}. It has: {', '.join(files)}.")
    told = {name: json.loads(files[name].read_text(encoding="utf-8")) for name in only or files}
    return dict(leaf for name, value in told.items() for leaf in _leaves(name, value))


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(f"{path}/{key}", one)
    elif isinstance(value, list) and any(isinstance(one, (dict, list)) for one in value):
        yield f"{path}/count", len(value)
        for index, one in enumerate(value):
            yield from _leaves(f"{path}/{index}", one)
    else:
        yield path, value


def _renamed(value: Any, table: Sequence[tuple[str, str]]) -> Any:
    if isinstance(value, list):
        return [_renamed(one, table) for one in value]
    for pattern, replacement in table if isinstance(value, str) else ():
        value = re.sub(pattern, replacement, value)
    return value


def _same(one: Any, other: Any) -> bool:
    """Say whether two leaves are the same to the bit, so -0.0 is not 0.0, and 1 is not 1.0 or true."""
    return type(one) is type(other) and repr(one) == repr(other)


def _difference(one: Any, other: Any) -> str | None:
    if _same(one, other):
        return None
    if _is_number(one) and _is_number(other):
        return f"{one!r} -> {other!r}{_relative([one], [other])}"
    if isinstance(one, list) and isinstance(other, list):
        if all(map(_is_number, [*one, *other])) and len(one) == len(other):
            places = [index for index, pair in enumerate(zip(one, other, strict=True)) if not _same(*pair)]
            first = places[0]
            changed = f"{one[first]!r} -> {other[first]!r}{_relative(one, other)}"
            return f"{len(places)} of {len(one)} numbers, first at {first}: {changed}"
        lines = difflib.unified_diff(list(map(str, one)), list(map(str, other)), lineterm="", n=0)
        shown = [line for line in lines if not line.startswith(("---", "+++", "@@"))]
        more = [f"... {len(shown) - _TOLD_LINES} more"] if len(shown) > _TOLD_LINES else []
        return "\n    ".join(["other lines", *shown[:_TOLD_LINES], *more])
    return f"{_short(one)} -> {_short(other)}"


def _relative(one: list[float], other: list[float]) -> str:
    scale = max(map(abs, one))
    apart = max(abs(a - b) for a, b in zip(one, other, strict=True))
    return f" (relative {apart / scale:.1e})" if scale and math.isfinite(apart / scale) else ""


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 300 else f"{text[:300]} ..."


def record(package: Path, output: Path, only: Sequence[str], processes: int) -> None:
    """Record a checkout, in a process of its own that imports ``hf_posenc`` from there.

    Raises:
        ValueError: There is no checkout, or ``output`` is not empty.
        CalledProcessError: A job did not come to its end.
    """
    package, output = package.resolve(), output.resolve()
    if not (package / "hf_posenc" / "__init__.py").is_file() or not (package / "pyproject.toml").is_file():
        raise ValueError(f"{package} is not a checkout of hf_posenc.")
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty. Give a new folder.")
    output.mkdir(parents=True, exist_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    env |= {"PYTHONPATH": str(package), "PYTHONSAFEPATH": "1", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "COLUMNS": "120"}
    env |= {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg", "NO_COLOR": "1", "TZ": "UTC"}
    env |= {"HF_HOME": str(output / "cache"), "LC_ALL": "C.UTF-8"}
    jobs = Path(__file__).with_name("golden_jobs.py")
    words = [sys.executable, str(jobs), str(package), str(output), str(processes), *only]
    subprocess.run(words, env=env, check=True)


def entry_point(package: Path) -> str:
    """Return ``module:function`` of the command ``hf-posenc`` of a checkout."""
    told = tomllib.loads((package / "pyproject.toml").read_text(encoding="utf-8"))
    return str(told["project"]["scripts"]["hf-posenc"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record what a checkout does, or compare two recordings.")
    commands = parser.add_subparsers(dest="task", required=True)
    recording = commands.add_parser("record", help="run a checkout and write down what it does")
    recording.add_argument("--package", type=Path, required=True, help="a checkout of hf_posenc")
    recording.add_argument("--output", type=Path, required=True, help="a new folder")
    recording.add_argument("--only", nargs="*", default=[], help="jobs, such as llama perplexity; default: all")
    recording.add_argument("--processes", type=int, default=2, help="jobs at a time, each of one thread")
    comparing = commands.add_parser("compare", help="print what differs; exits with 1 if something does")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--numbers", action="store_true", help="leave out words for people")
    comparing.add_argument("--only", nargs="*", default=[], help="jobs to look at; default: all")
    given = parser.parse_args(argv)
    try:
        if given.task == "record":
            record(given.package, given.output, given.only, given.processes)
            return 0
        told = compare(given.before, given.after, numbers=given.numbers, only=given.only)
    except (ValueError, OSError) as error:
        print(f"golden: {error}", file=sys.stderr)
        return 2
    except subprocess.CalledProcessError:
        return 2
    words = sum(bool(_WORDS.search(one.partition(": ")[0])) for one in told)
    print("\n".join([*told, f"{len(told)} differences, {words} of them in words for people"]))
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())
