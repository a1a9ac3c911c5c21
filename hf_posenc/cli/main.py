"""``hf-posenc``: its commands, each in a file of its own.

PyTorch and Transformers are imported inside the commands, so that help and mistakes answer at once.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Sequence

from hf_posenc.cli.demo import demo
from hf_posenc.cli.doctor import doctor
from hf_posenc.cli.eval import evaluate
from hf_posenc.cli.export import export
from hf_posenc.cli.finetune import finetune
from hf_posenc.cli.fit import fit
from hf_posenc.cli.list import list_known
from hf_posenc.cli.lm_eval import lm_eval
from hf_posenc.cli.patch import patch
from hf_posenc.cli.plan import plan
from hf_posenc.cli.report import report
from hf_posenc.cli.shared_arguments import TRACEBACK, TRACEBACK_HELP, summary_line
from hf_posenc.errors import HfPosencError, UnknownNameError, arguments_named_as_flags
from hf_posenc.version import __version__

_EXAMPLES = """\
examples:
  hf-posenc patch MODEL longer-model --method yarn --factor 4
  hf-posenc eval MODEL --documents book.txt --context-lengths 512 2k 8k --method none yarn --factor 4 --output r.jsonl
  hf-posenc eval MODEL --documents book.txt --context-lengths 32k --method auto --dry-run
  hf-posenc plan MODEL --context-length 128k --gpu-memory 24GB
  hf-posenc finetune MODEL --documents books/ --method yarn --factor 4 --token-budget 1M --output-dir trained
  hf-posenc fit MODEL --documents books/ --context-length 32k --output longer
  hf-posenc report r.jsonl --output-dir report
  hf-posenc export longer-model --to vllm
  hf-posenc list methods

MODEL is a name on the Hugging Face Hub, a folder or a .gguf file.
`hf-posenc COMMAND --help` shows a command's common flags, `hf-posenc COMMAND --help-all` every flag.
"""


COMMANDS: dict[str, Callable[[Sequence[str]], int | None]] = {
    "patch": patch,
    "eval": evaluate,
    "lm-eval": lm_eval,
    "plan": plan,
    "fit": fit,
    "finetune": finetune,
    "report": report,
    "export": export,
    "list": list_known,
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
    except (HfPosencError, ValueError, OSError, OverflowError) as error:  # ours; and what others refuse
        if TRACEBACK in words:
            raise
        print(f"hf-posenc: error: {_in_words(error)}", file=sys.stderr)
        return 2
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError" or TRACEBACK in words:  # torch's, which is not imported here
            raise
        print(
            f"hf-posenc: error: the device has too little memory: {str(error).splitlines()[0]} "
            "`hf-posenc plan` says how much is needed, and what needs less.",
            file=sys.stderr,
        )
        return 2
    except KeyboardInterrupt:
        print("hf-posenc: interrupted", file=sys.stderr)
        return 130
    return 0


def _command(words: list[str]) -> int | None:
    listing = "\n".join(f"  {name:<10}{summary_line(run.__doc__)}" for name, run in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="hf-posenc",
        description="Make a LLaMA, Mistral or Qwen model read texts longer than it was trained on, and measure it.",
        epilog=f"commands:\n{listing}\n\n{_EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", metavar="COMMAND", help="one of the commands below")
    parser.add_argument("--version", action="version", version=f"hf-posenc {__version__}")
    parser.add_argument(TRACEBACK, action="store_true", help=TRACEBACK_HELP)
    own = next((index + 1 for index, word in enumerate(words) if not word.startswith("-")), len(words))
    # After the command, so that a launcher's processes get it too; once.
    after = [word for word in words[own:] if word != TRACEBACK] + [TRACEBACK] * (TRACEBACK in words)
    name = parser.parse_args(words[:own]).command
    if name not in COMMANDS:
        raise UnknownNameError("command", name, COMMANDS)
    return COMMANDS[name](after)


def _in_words(error: BaseException) -> str:
    """Return a message without the number that the system has for it."""
    if isinstance(error, OSError) and error.errno is not None and error.strerror:
        where = f"{str(error.filename)!r} cannot be used: " if error.filename is not None else ""
        return f"{where}{error.strerror.lower()}."
    return str(error)


if __name__ == "__main__":
    sys.exit(main())
