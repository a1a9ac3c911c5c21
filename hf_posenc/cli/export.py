"""``hf-posenc export``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from hf_posenc.cli.shared_arguments import ModelArguments, parse
from hf_posenc.errors import InvalidRequestError
from hf_posenc.settings import same_field
from hf_posenc.utils.units import ContextLength, Duration

# The same as in exports.stacks, which imports PyTorch too; and a file.
GGUF = "gguf"
STACKS = ("vllm", "sglang", "llama.cpp", "tgi", "mlx", "ollama", GGUF)
# The same as in serving.server_verdict.
SERVER_DTYPES = ("float32", "float16", "bfloat16", "quantised")


@dataclass
class ExportArguments:
    """Which program is to run the model."""

    to: str | None = field(
        default=None, metadata={"help": "the server, or gguf for a file with the rule in it", "choices": STACKS}
    )
    # A keyword of Python, so the field has another name than the flag.
    as_method: str | None = field(
        default=None,
        metadata={
            "help": "for a method that only hf_posenc runs: the static method to run instead, such as yarn",
            "aliases": ["--as"],
            "metavar": "METHOD",
        },
    )
    base: str | None = field(
        default=None,
        metadata={"help": "with --to gguf: .gguf file of the model, to copy tensors and vocabulary from"},
    )
    output: str | None = field(default=None, metadata={"help": "with --to gguf: .gguf file to write"})


@dataclass
class VerifyArguments:
    """Which running server is compared with the model."""

    verify: str | None = field(
        default=None,
        metadata={"help": "instead of --to: address of a server, such as http://localhost:8080", "metavar": "URL"},
    )
    probe_length: ContextLength | None = field(
        default=None, metadata={"help": "tokens to compare; default: the original length and an eighth more"}
    )
    server_model: str | None = field(default=None, metadata={"help": "name of the model on a server that has several"})
    server_dtype: str | None = field(
        default=None,
        metadata={"help": "what the server computes in; default: what it says, or bfloat16", "choices": SERVER_DTYPES},
    )
    api_key: str | None = field(default=None, metadata={"help": "key that the server wants"})
    dtype: str = same_field(ModelArguments, "dtype")
    device: str | None = same_field(ModelArguments, "device")
    timeout: Duration = field(default=Duration(600), metadata={"help": "longest wait for one answer, such as 10m"})


def export(argv: Sequence[str]) -> int:
    """Print how another program runs an extended model, write a GGUF file with its rule, or check a running server.

    Examples:
        hf-posenc export longer-model --to vllm
        hf-posenc export longer-model --to gguf --base model.gguf --output longer.gguf
        hf-posenc export staged-model --to llama.cpp --as yarn
        hf-posenc export longer-model --verify http://localhost:8080

    Returns:
        1 if a server was checked and does not run the rule, else 0.
    """
    positional = {"model": "folder that hf-posenc patch, finetune or fit wrote"}
    known = (ExportArguments, VerifyArguments)
    given, where, server = parse("export", export.__doc__, argv, known, positional)
    if (where.to is None) == (server.verify is None):
        raise InvalidRequestError("give one of --to (a program, or gguf) and --verify (the address of a server).")
    of_server = [one.name.replace("_", "-") for one in fields(server) if getattr(server, one.name) != one.default]
    if where.to is not None and of_server:
        raise InvalidRequestError(f"--{' and --'.join(of_server)} are for --verify, and --to checks no server.")
    if where.to != GGUF and (where.base or where.output):
        raise InvalidRequestError(f"--base and --output are for --to {GGUF}.")
    if where.to == GGUF and not where.output:
        raise InvalidRequestError("--to gguf needs --output: the .gguf file to write.")
    if server.verify is not None:
        from hf_posenc.serving import check_server

        check = check_server(
            given.model,
            server.verify,
            as_method=where.as_method,
            probe_length=server.probe_length,
            server_model=server.server_model,
            server_dtype=server.server_dtype,
            api_key=server.api_key,
            timeout=server.timeout,
            dtype=server.dtype,
            device=server.device,
        )
        print(check)
        return 0 if check.agrees else 1
    from hf_posenc.exports import export_command, export_gguf

    if where.to == GGUF:
        print(export_gguf(given.model, where.output, base=where.base, as_method=where.as_method))
    else:
        print(export_command(given.model, where.to, where.as_method))
    return 0
