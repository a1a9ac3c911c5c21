"""``hf-posenc``: one command for each station, each one call into the library.

PyTorch and Transformers are imported inside the commands, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from hf_posenc.cli import shared_arguments as args_
from hf_posenc.cli.eval_arguments import EvalArguments, perplexity_settings, retrieval_settings
from hf_posenc.cli.request_checks import check_folder, check_writable
from hf_posenc.cli.shared_arguments import TRACEBACK
from hf_posenc.cli.sources import read
from hf_posenc.errors import HfPosencError, MissingFileError, UnknownNameError, arguments_named_as_flags
from hf_posenc.methods.registry import DEFAULT_METHOD
from hf_posenc.patching.extension_config import (
    ExtensionConfig,
    check_request,
    resolve_rope_scaling,
    rows_to_measure,
)
from hf_posenc.retrieval.config import RetrievalConfig
from hf_posenc.utils.launching import LaunchArguments, launch_words, relaunch

_EXAMPLES = """\
examples:
  hf-posenc patch MODEL longer-model --method yarn --factor 4
  hf-posenc eval MODEL --documents book.txt --context-lengths 512 2k 8k --method none yarn --factor 4 --output r.jsonl
  hf-posenc compare MODEL --documents book.txt --context-length 32k --dry-run
  hf-posenc plan MODEL --context-length 128k --gpu-memory 24GB
  hf-posenc finetune MODEL --documents books/ --method yarn --factor 4 --token-budget 1M --output-dir trained
  hf-posenc report r.jsonl --output-dir report
  hf-posenc export longer-model --to vllm

MODEL is a name on the Hugging Face Hub, a folder or a .gguf file. `hf-posenc COMMAND --help` lists a command's flags.
"""


def patch(argv: Sequence[str]) -> None:
    """Extend a model and save it so that plain Transformers loads it extended."""
    places = {"model": "name on the Hub, folder or .gguf file", "output": "folder to write"}
    known = (args_.PatchArguments, ExtensionConfig, args_.OptionArguments, args_.ModelArguments)
    given, which, extension, options, loading = args_.parse("patch", _first_line(patch), argv, known, places)
    named = [which.method] if which.method else []
    named, extension, rules = resolve_rope_scaling(named, extension, args_.parse_options(options.option))
    methods = named or ([] if extension.preset else [DEFAULT_METHOD])
    check_request(methods, extension, rules)
    check_folder(given.model, given.output, may_hold_files=False)
    from hf_posenc.cli.patch import run_patch

    trained = _tokens_trained(given.model)
    run_patch(given.model, given.output, methods[0] if methods else None, extension, rules, loading, trained)


def evaluate(argv: Sequence[str]) -> None:
    """Measure perplexity or retrieval by context length, of a model as it is or extended by one or more methods."""
    known: list[Any] = [EvalArguments, ExtensionConfig, args_.OptionArguments]
    known += [args_.DocumentArguments, args_.ModelArguments, RetrievalConfig]
    places = {"model": "name on the Hub, folder or .gguf file"}
    parsed = args_.parse("eval", _first_line(evaluate), argv, known, places)
    given, what, extension, options, source, loading, asked = parsed
    told = {"command": shlex.join(["hf-posenc", "eval", *argv]), "tokens_trained": _tokens_trained(given.model)}
    rows = rows_to_measure(what.method, extension, args_.parse_options(options.option))
    settings = retrieval_settings(what, asked) if asked.tasks else perplexity_settings(what, asked)
    settings["documents"] = None if asked.tasks and not source.documents else read(source)
    from hf_posenc.cli.eval import evaluate as run

    run(given.model, rows, settings | told, what, asked, loading, on_scaled=extension.on_scaled)


def compare(argv: Sequence[str]) -> None:
    """Measure all methods that suit a model on your own text, with a time estimate first, and recommend one."""
    from hf_posenc.comparing.config import CompareConfig

    known = (CompareConfig, args_.DocumentArguments, args_.ModelArguments)
    places = {"model": "name on the Hub, folder or .gguf file"}
    given, what, source, loading = args_.parse("compare", _first_line(compare), argv, known, places)
    what.check()
    documents = read(source)
    from hf_posenc.cli.compare import compare as run

    run(given.model, documents, what, loading)


def plan(argv: Sequence[str]) -> None:
    """Say what a context length costs in memory and time, and which method, recipe and lever to take; config only."""
    from hf_posenc.cli.plan_arguments import PlanArguments

    places = {"model": "name on the Hub, folder or .gguf file; its weights are not read"}
    given, what = args_.parse("plan", _first_line(plan), argv, (PlanArguments,), places)
    from hf_posenc.cli.plan import run_plan

    print(run_plan(given.model, what))


def finetune(argv: Sequence[str]) -> None:
    """Fine-tune an extended model on a budget of tokens, measure it as it came, before and after, and save it."""
    from hf_posenc.training import FinetuneConfig
    from hf_posenc.training.toml_config import settings_besides_flags

    settable = (FinetuneConfig, args_.TrainingDocumentArguments, args_.FinetuneModelArguments)
    known = (*settable, args_.OptionArguments, args_.RunArguments, LaunchArguments)
    places = {"model": "name on the Hub, folder or .gguf file"}
    given, config, source, loading, options, _, launch = args_.parse(
        "finetune",
        _first_line(finetune),
        argv,
        known,
        places,
        defaults=lambda told: settings_besides_flags(told, settable),
    )
    if options.option:
        config = dataclasses.replace(config, options={**config.options, **args_.parse_options(options.option)})
    check_folder(given.model, config.output_dir)
    if words := launch_words(launch, "finetune", argv):
        relaunch(words)
    from hf_posenc.cli.finetune import run_finetune

    run_finetune(given.model, config, source, loading, _tokens_trained(given.model))


def report(argv: Sequence[str]) -> None:
    """Turn result files into a table, plots and one HTML page."""
    places = {"results": "one or more .jsonl files that hf-posenc eval or finetune wrote"}
    given, where = args_.parse("report", _first_line(report), argv, (args_.ReportArguments,), places, several=True)
    for path in given.results:
        if not Path(path).is_file():
            raise MissingFileError(f"there is no file {path!r}. hf-posenc eval --output {path} would write it.")
    check_writable(where.output_dir)
    from hf_posenc.evaluation.records import read_records, read_retrieval_records
    from hf_posenc.report import report as write

    kinds = (read_records, read_retrieval_records)
    records = [record for path in given.results for read in kinds for record in read(path)]
    paths = write(records, **vars(where), command=shlex.join(["hf-posenc", "report", *argv]))
    for written in (paths.html, paths.markdown, *paths.plots):
        print(written)


def export(argv: Sequence[str]) -> None:
    """Print the command with which vLLM, SGLang, llama.cpp or TGI runs an extended model, or why none can."""
    places = {"model": "folder that hf-posenc patch or finetune wrote"}
    given, where = args_.parse("export", _first_line(export), argv, (args_.ExportArguments,), places)
    from hf_posenc.exports import export_command

    print(export_command(given.model, where.to, where.as_method))


def explain(argv: Sequence[str]) -> None:
    """Show in words and pictures what a method does to a model, or how an encoding works; reads the config only."""
    from hf_posenc.cli.explain_arguments import ExplainArguments

    places = {"name": "a method from `hf-posenc methods`, or rope, xpos, sinusoidal, learned, alibi, t5_bias, ..."}
    known = (ExplainArguments, ExtensionConfig, args_.OptionArguments)
    given, what, extension, options = args_.parse("explain", _first_line(explain), argv, known, places)
    from hf_posenc.cli.explain import run_explain

    width = min(shutil.get_terminal_size().columns, 120)
    print(run_explain(given.name, what, extension, args_.parse_options(options.option), width))


def gallery(argv: Sequence[str]) -> None:
    """Draw positional encodings, and the rules that stretch RoPE: pictures and one HTML page."""
    from hf_posenc.cli.explain_arguments import GalleryArguments

    _, where = args_.parse("gallery", _first_line(gallery), argv, (GalleryArguments,), {})
    from hf_posenc.cli.gallery import run_gallery

    print("\n".join(map(str, run_gallery(where.output_dir))))


def methods(argv: Sequence[str]) -> None:
    """List the methods a model can be extended with, or the model types that can be extended."""
    _, chosen = args_.parse("methods", _first_line(methods), argv, (args_.MethodsArguments,), {})
    from hf_posenc.cli.listings import families_text, methods_text

    width = min(shutil.get_terminal_size().columns, 120)
    print(families_text(width) if chosen.families else methods_text(width))


def presets(argv: Sequence[str]) -> None:
    """List how published checkpoints are extended, or what is known of them."""
    from hf_posenc.cli.listings import PresetsArguments, checkpoints_text, presets_text

    _, chosen = args_.parse("presets", _first_line(presets), argv, (PresetsArguments,), {})
    print((checkpoints_text if chosen.checkpoints else presets_text)(min(shutil.get_terminal_size().columns, 120)))


def recipes(argv: Sequence[str]) -> None:
    """List the published ways to fine-tune: what each sets, and what of the paper is left to you."""
    args_.parse("recipes", _first_line(recipes), argv, (), {})
    from hf_posenc.cli.listings import recipes_text

    print(recipes_text(min(shutil.get_terminal_size().columns, 120)))


def demo(argv: Sequence[str]) -> None:
    """Show the full pipeline on a tiny model: extend, measure, fine-tune, measure, report; minutes on two cores."""
    _, chosen = args_.parse("demo", _first_line(demo), argv, (args_.DemoArguments,), {})
    check_writable(chosen.output_dir)
    from hf_posenc.cli.demo import run_demo

    run_demo(Path(chosen.output_dir), chosen.token_budget, dtype=chosen.dtype)


def lm_eval(argv: Sequence[str]) -> None:
    """Run tasks of lm-eval on a model as it is or extended: MODEL, flags as for eval, then any of lm-eval's."""
    from hf_posenc.cli.lm_eval import run_harness

    run_harness(_first_line(lm_eval), argv)


def doctor(argv: Sequence[str]) -> int:
    """Say what a checkpoint's config declares, how each Transformers reads it, and what is wrong; mend it with --fix.

    Returns:
        1 if something is wrong, 0 if the checkpoint is sound or was mended.
    """
    if "--capabilities" in argv:  # alone: there is nothing to look at
        methods(["--families"])
        return 0
    places = {"path": "folder, config.json, .gguf file or name on the Hub"}
    given, chosen = args_.parse("doctor", _first_line(doctor), argv, (args_.DoctorArguments,), places)
    from hf_posenc.doctor import Known, diagnose, diagnosis_text, write_mended

    known = Known(chosen.original_max_position_embeddings, chosen.rope_theta, chosen.ramp, chosen.trained_length)
    diagnosis = diagnose(given.path, known, live=chosen.live)
    print(diagnosis_text(diagnosis))
    if chosen.fix is not None:
        print("\n".join(f"written: {path}" for path in write_mended(diagnosis, chosen.fix)))
        return 0
    return 0 if diagnosis.sound else 1


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "patch": patch,
    "eval": evaluate,
    "lm-eval": lm_eval,
    "compare": compare,
    "plan": plan,
    "finetune": finetune,
    "report": report,
    "export": export,
    "explain": explain,
    "gallery": gallery,
    "methods": methods,
    "presets": presets,
    "recipes": recipes,
    "doctor": doctor,
    "demo": demo,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; a user's mistake gives one line on stderr and exit code 2, what doctor finds wrong exit code 1."""
    words = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(message)s")
    logging.getLogger("hf_posenc").setLevel(logging.INFO)
    # PEFT imports bitsandbytes where it is installed, which warns of an optional kernel that no command needs.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    try:
        with arguments_named_as_flags():
            return _command(words) or 0
    except BrokenPipeError:  # a reader such as `head` has had enough
        sys.stderr.close()
    except (HfPosencError, ValueError, OSError) as error:  # ours; and values and files that others refuse
        if TRACEBACK in words:
            raise
        print(f"hf-posenc: error: {_in_words(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hf-posenc: interrupted", file=sys.stderr)
        return 130
    return 0


def _command(words: list[str]) -> int | None:
    listing = "\n".join(f"  {name:<10}{_first_line(run)}" for name, run in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-posenc",
        description="Make a LLaMA, Mistral or Qwen model read further, and measure that it does.",
        epilog=f"commands:\n{listing}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", help="one of those below")
    parser.add_argument("--version", action="version", version=f"hf-posenc {_version()}")
    parser.add_argument(TRACEBACK, action="store_true", help=args_.TRACEBACK_HELP)
    own = next((index + 1 for index, word in enumerate(words) if not word.startswith("-")), len(words))
    # After the command, so that a launcher's processes get it too; once.
    after = [word for word in words[own:] if word != TRACEBACK] + [TRACEBACK] * (TRACEBACK in words)
    name = parser.parse_args(words[:own]).command
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS)
    return COMMANDS[name](after)


def _tokens_trained(model: str) -> int | None:
    """Return how many tokens a model was fine-tuned on, as its manifest says; 0 for one without, None if unknown."""
    from hf_posenc.checkpoint.manifest import find_manifest

    found = find_manifest(model)
    return 0 if found is None else found[0]["tokens_trained"]


def _in_words(error: BaseException) -> str:
    """Return a message without the number that the system has for it."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = f"{str(error.filename)!r} cannot be used: " if error.filename is not None else ""
        return f"{where}{error.strerror.lower()}."
    return str(error)


def _first_line(run: Callable[[Sequence[str]], int | None]) -> str:
    return (run.__doc__ or "").splitlines()[0]


def _version() -> str:
    try:
        return version("hf_posenc")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
