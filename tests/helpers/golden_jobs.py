"""What ``golden`` records of a checkout: models of many families, perplexities, fine-tuning runs and commands.

    python golden_jobs.py PACKAGE OUTPUT PROCESSES [JOB ...]

Started by ``golden.record``, which sets the environment. Each job runs in a process of its own, forked after the slow
imports, in a folder of its own; each command of ``hf-posenc`` in another process, so that none leaves anything behind.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.util
import json
import lzma
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

sys.path.append(str(Path(__file__).parent))  # PYTHONSAFEPATH leaves it out
import golden
import golden_cases
from golden_checkout import OUTPUT, PACKAGE, WORK, check_package, hf_posenc
from golden_digests import attempt, content, folder_content, lines, plain, said
from golden_models import build, calls_job, encodings_job, family_job, token_ids

# ---- Jobs: measuring and training the tiny model ----


def asset(pattern: str) -> Path:
    """Return the one file of the package of this name, wherever it lies."""
    (found,) = [path for path in (PACKAGE / "hf_posenc").rglob(pattern) if ".cache" not in path.parts]
    return found


def text(novel: str) -> str:
    return lzma.decompress(asset(f"{novel}.txt.xz").read_bytes()).decode("utf-8")


def set_out() -> None:
    """Put the tiny model and a text into the folder of the job."""
    shutil.copytree(asset("model.safetensors").parent, "tiny")
    Path("book.txt").write_text(text("persuasion")[20_000:40_000], encoding="utf-8")


def tiny() -> tuple[Any, Any]:
    return AutoModelForCausalLM.from_pretrained("tiny", dtype=torch.float32).eval(), AutoTokenizer.from_pretrained(
        "tiny"
    )


def in_method(model: Any, method: str | None, factor: float | None) -> Any:
    if method is None:
        return contextlib.nullcontext()
    name, _, option = method.partition(", ")
    return hf_posenc.patched(model, name, factor, **dict([option.split("=")] if option else ()))


def perplexity_job() -> dict[str, Any]:
    """Every protocol, on the model as it is, patched, and patched in stages; and more settings."""
    set_out()
    model, tokenizer = tiny()
    book = text("emma")
    documents = [book[begin : begin + 3600] for begin in (30_000, 90_000)]
    base = {"context_lengths": [128, 256, 512], "tokenizer": tokenizer, "progress": False}
    recorded: dict[str, Any] = {}

    def measure(key: str, method: str | None, factor: float | None, kwargs: dict[str, Any]) -> None:
        def call() -> dict[str, Any]:
            with said() as heard, in_method(model, method, factor):
                records = hf_posenc.perplexity(
                    model, documents, **{**base, **kwargs, "output": f"{len(recorded)}.jsonl"}
                )
            values = [plain(json.loads(record.to_json())) for record in records]
            file = Path(f"{len(recorded)}.jsonl")  # absent where longppl finds no token
            same = (content(file) if file.exists() else []) == values
            return {
                "written": same,
                "records": {f"{value['protocol']} {value['context_length']}": value for value in values},
                "words": heard,
            }

        recorded[key] = attempt(call)

    for protocol, kwargs in golden_cases.PROTOCOLS.items():
        for label, how in golden_cases.MEASURED.items():
            measure(f"{protocol}, {label}", *(how or (None, None)), {"protocol": protocol, **kwargs})
    for key, (kwargs, method) in golden_cases.MEASUREMENTS.items():
        measure(key, method, None if method == "alibi" else 4.0, kwargs)
    mistakes: dict[str, dict[str, Any]] = {
        "no protocol": {"protocol": "all"},
        "no length": {"context_lengths": []},
        "too long": {"context_lengths": [100_000]},
        "stride": {"protocol": "sliding_window", "stride": 600},
    }
    for key, kwargs in mistakes.items():
        measure(f"mistake: {key}", None, None, kwargs)
    return recorded


_TEMPLATE = (
    "{% for message in messages %}{{ '[' + message['role'] + ']\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + eos_token + '\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + eos_token + '\n' }}{% endif %}{% endfor %}"
)


def run_documents(kind: str) -> list[Any]:
    """Return what a run trains on: long or short texts, chats, or prompts with answers."""
    book = text("prideprejudice")
    if kind == "long":
        return [book[begin : begin + 9_000] for begin in range(10_000, 100_000, 9_000)]
    paragraphs = [" ".join(one.split()) for one in book[10_000:150_000].split("\n\n") if len(one) > 80]
    if kind == "short":
        return paragraphs
    pairs = zip(paragraphs[::2], paragraphs[1::2], strict=False)
    if kind == "answers":
        return [{"prompt": one, "completion": other} for one, other in pairs]
    roles = ("user", "assistant", "user", "assistant")
    turns = zip(*(paragraphs[index::4] for index in range(4)), strict=False)
    return [
        {"messages": [{"role": role, "content": one} for role, one in zip(roles, row, strict=True)]} for row in turns
    ]


def training_job(names: Sequence[str]) -> dict[str, Any]:
    """Fine-tuning runs: all that they write, every step's loss and the weights among it."""
    set_out()
    recorded = {}
    for name in names:
        settings = dict(golden_cases.RUNS[name])
        documents = run_documents(settings.pop("documents"))
        model, tokenizer = tiny()
        tokenizer.chat_template = _TEMPLATE

        def call() -> dict[str, Any]:
            with said() as heard:
                config = hf_posenc.FinetuneConfig(output_dir=name, **settings)  # noqa: B023
                result = hf_posenc.finetune(model, tokenizer, documents, config)  # noqa: B023
            values = {key: plain(getattr(result, key)) for key in ("tokens_trained", "steps", "train_loss")}
            return {"result": values, "files": folder_content(Path(name)), "words": heard}  # noqa: B023

        recorded[name] = attempt(call)
        shutil.rmtree(name, ignore_errors=True)
    return recorded


def trainer_job() -> dict[str, Any]:
    """A plain Trainer on a patched model with our callback; and settings that are refused."""
    torch.manual_seed(0)
    model = hf_posenc.patch_model(build("llama"), "yarn", 2)
    rows = [{"input_ids": one, "labels": one} for one in token_ids(128, rows=8)]
    settings = TrainingArguments(
        "trained", max_steps=6, per_device_train_batch_size=2, logging_steps=1, eval_strategy="steps", eval_steps=3
    )
    trainer = Trainer(model, settings, train_dataset=rows, eval_dataset=rows[:2])
    callback = hf_posenc.PerplexityCallback(trainer, list(token_ids(200, rows=3)), [64, 128])
    trainer.add_callback(callback)
    trainer.train()
    trainer.save_model("model")
    kept = [
        {key: value for key, value in line.items() if "runtime" not in key and "per_second" not in key}
        for line in trainer.state.log_history
    ]
    recorded: dict[str, Any] = {"log": plain(kept), "saved": folder_content(Path("model"))}
    recorded["records"] = [plain(json.loads(record.to_json())) for record in callback.records]
    mistakes: dict[str, dict[str, Any]] = {
        "method": {"method": "yran"},
        "recipe": {"recipe": "yarn-4000"},
        "option": {"method": "linear", "options": {"beta_fast": 3}},
        "rate": {"learning_rate": -1.0},
        "positions": {"position_schedule": "pos"},
        "stages": {"stages": ["512"]},
    }
    recorded["mistakes"] = {
        key: attempt(lambda: str(hf_posenc.FinetuneConfig(output_dir="out", **kwargs)))  # noqa: B023
        for key, kwargs in mistakes.items()
    }
    return recorded


# ---- Jobs: commands ----


def command(name: str, argv: list[str]) -> dict[str, Any]:
    """Run ``hf-posenc`` in a process of its own; return exit code, output, and what it wrote."""
    before = _written()
    files = {"output": Path("stdout.tmp"), "errors": Path("stderr.tmp")}
    module, _, function = golden.entry_point(PACKAGE).partition(":")

    def call() -> int:
        for number, file in enumerate(files.values(), start=1):
            os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
        warnings.formatwarning = lambda message, category, *_, **__: f"{category.__name__}: {message}\n"
        sys.argv = ["hf-posenc", *argv]
        try:
            return getattr(importlib.import_module(module), function)() or 0
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        except BaseException as error:
            print(f"crashed: {type(error).__name__}: {error}", file=sys.stderr)
            return 99

    code = os.waitstatus_to_exitcode(os.waitpid(fork(call), 0)[1])
    recorded: dict[str, Any] = {"exit code": code, "words": {}}
    for key, file in files.items():
        found = file.read_text(encoding="utf-8", errors="replace")
        where = recorded if key == "output" and argv[0] in _NUMBERS else recorded["words"]
        where[key] = lines(found, exact=key == "output" and argv[0] in (*_NUMBERS, *_EXACT))
        file.unlink()
    new = {path for path, stamp in _written().items() if before.get(path) != stamp}
    folders = sorted({path.parts[0] for path in new})
    recorded["wrote"] = {
        folder: folder_content(Path(folder)) if Path(folder).is_dir() else content(Path(folder)) for folder in folders
    }
    return recorded


# Whose output has no times; and of these, whose are commands to be typed and amounts that are computed, not words.
_EXACT = ("list", "doctor")
_NUMBERS = ("export", "plan")


def _written() -> dict[Path, tuple[int, int]]:
    files = [
        path for path in Path().rglob("*") if path.is_file() and not path.name.endswith(golden_cases.FILES["skipped"])
    ]
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in files}


def commands_job(group: str) -> dict[str, Any]:
    """Run a group of commands, one after the other, in one folder."""
    set_out()
    if group == "checkpoints":
        _config_folders()
    recorded = {}
    for key, typed in golden_cases.COMMANDS[group].items():
        for method in [row["name"] for row in hf_posenc.available_methods()] if "{method}" in key else [""]:
            name, argv = key.replace("{method}", method), typed if isinstance(typed, list) else typed.split()
            recorded[name] = command(name, [word.replace("{method}", method) for word in argv])
    return recorded


def _config_folders() -> None:
    """Folders with a config.json alone: of a model of 7 B parameters, with a dictionary of old, and a wrong one."""
    llama = {
        **{
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 32000,
            "torch_dtype": "bfloat16",
        },
        **{"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "max_position_embeddings": 4096, "rope_theta": 10000.0},
    }
    old = {"max_position_embeddings": 16384, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    wrong = {"rope_scaling": {"rope_type": "yarn", "faktor": 4.0, "beta_fast": 1, "beta_slow": 32}}
    for name, changes in (("llama7b", {}), ("old", old), ("wrong", wrong)):
        Path(name).mkdir()
        Path(name, "config.json").write_text(json.dumps(llama | changes, indent=1), encoding="utf-8")


# ---- Running jobs ----

JOBS: dict[str, Callable[[], dict[str, Any]]] = {
    **{f"commands_{group}": partial(commands_job, group) for group in golden_cases.COMMANDS},
    "perplexity": perplexity_job,
    **{f"finetune_{name}": partial(training_job, [name]) for name in golden_cases.RUNS},
    "trainer": trainer_job,
    **{family: partial(family_job, family) for family in golden_cases.FAMILIES},
    **{f"encodings_{family}": partial(encodings_job, family) for family in ("llama", "gemma3", "gpt_neox")},
    "calls": calls_job,
}


def fork(call: Callable[[], int]) -> int:
    """Run a call in a new process, which ends with what the call returns; return the process' id."""
    sys.stdout.flush()
    sys.stderr.flush()
    if (pid := os.fork()) != 0:
        return pid
    code = 70
    try:
        code = call()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def _cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def run_job(name: str) -> int:
    """Run one job in its folder and write what it tells."""
    folder = WORK / name
    folder.mkdir(parents=True)
    os.chdir(folder)
    warnings.simplefilter("ignore")
    if not name.startswith("commands_"):
        transformers.utils.logging.disable_progress_bar()
        transformers.utils.logging.set_verbosity_error()
        with (WORK / f"{name}.log").open("w") as log:
            os.dup2(log.fileno(), 1)  # the tables that Trainer prints
    began = time.perf_counter()
    recorded = JOBS[name]()
    check_package()
    text = json.dumps(recorded, indent=1, ensure_ascii=False)
    (OUTPUT / "jobs" / f"{name}.json").write_text(text + "\n", encoding="utf-8")
    os.chdir(OUTPUT)
    shutil.rmtree(folder)
    print(f"{time.perf_counter() - began:6.1f} s, {_cpu_seconds():5.1f} s of CPU: {name}", file=sys.stderr)
    return 0


def environment() -> dict[str, Any]:
    """Return what two recordings must share."""
    from importlib.metadata import version

    cpus = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.*)", cpus.read_text()) if cpus.is_file() else None
    names = ("torch", "transformers", "accelerate", "peft", "tokenizers", "safetensors", "numpy", "datasets")
    return {
        "versions": {name: version(name) for name in names},
        "python": platform.python_version(),
        "machine": [platform.machine(), model[1] if model else "", torch.backends.cpu.get_cpu_capability()],
    }


def main() -> int:
    processes, names = int(sys.argv[3]), sys.argv[4:] or list(JOBS)
    if unknown := set(names) - JOBS.keys():
        print(f"golden: no job {', '.join(sorted(unknown))}. Known: {', '.join(JOBS)}.", file=sys.stderr)
        return 2
    began = time.perf_counter()
    # OMP_NUM_THREADS is 1. Calling torch.set_num_threads here would make a thread pool that no fork can use.
    for name in hf_posenc.__all__:
        getattr(hf_posenc, name)  # imports all that is imported late, once
    check_package()
    (OUTPUT / "jobs").mkdir()
    WORK.mkdir()
    waiting, running, failed = list(names), dict[int, str](), list[str]()
    while waiting or running:
        while waiting and len(running) < processes:
            name = waiting.pop(0)
            running[fork(partial(run_job, name))] = name
        pid, status = os.wait()
        name = running.pop(pid)
        if status:
            failed.append(name)
    shutil.rmtree(WORK)
    seconds = time.perf_counter() - began
    if failed:
        print(f"golden: jobs that did not come to their end: {', '.join(failed)}", file=sys.stderr)
        return 1
    commit = subprocess.run(["git", "-C", str(PACKAGE), "rev-parse", "HEAD"], capture_output=True, text=True)
    about = {"comparable": sorted(names), "commit": commit.stdout.strip(), "seconds": round(seconds)}
    (OUTPUT / "environment.json").write_text(json.dumps({"comparable": environment()}, indent=1) + "\n")
    (OUTPUT / "about.json").write_text(json.dumps(about, indent=1) + "\n")  # last: it says that all is there
    print(f"{seconds:.0f} s, {_cpu_seconds():.0f} s of CPU", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
