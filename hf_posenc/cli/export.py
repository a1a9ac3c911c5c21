"""``hf-posenc export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hf_posenc.cli.shared_arguments import parse

# The same as in exports.stacks, which imports PyTorch too.
STACKS = ("vllm", "sglang", "llama.cpp", "tgi")


@dataclass
class ExportArguments:
    """Which program is to run the model."""

    to: str = field(metadata={"help": "the server", "choices": STACKS})
    # A keyword of Python, so the field has another name than the flag.
    as_method: str | None = field(
        default=None,
        metadata={
            "help": "for a method that only hf_posenc runs: the static method to run instead, such as yarn",
            "aliases": ["--as"],
            "metavar": "METHOD",
        },
    )


def export(argv: Sequence[str]) -> None:
    """Print the command with which vLLM, SGLang, llama.cpp or TGI runs an extended model, or why none can.

    Examples:
        hf-posenc export longer-model --to vllm
        hf-posenc export staged-model --to llama.cpp --as yarn
    """
    positional = {"model": "folder that hf-posenc patch or finetune wrote"}
    given, where = parse("export", export.__doc__, argv, (ExportArguments,), positional)
    from hf_posenc.exports import export_command

    print(export_command(given.model, where.to, where.as_method))
