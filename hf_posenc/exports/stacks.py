"""The stacks a checkpoint can be exported to, and what of each was read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from hf_posenc.errors import InvalidRequestError, UnknownNameError
from hf_posenc.exports.folder import ExportFolder, check_rule, notes_for_servers, read_folder, refuse_adapter
from hf_posenc.exports.llama_cpp import ARCHITECTURES, LLAMA_SERVER, READ, llama_cpp, ollama
from hf_posenc.exports.nearest import as_static, refuse_attention_rule, what_is_lost
from hf_posenc.exports.servers import mlx, sglang, tgi, vllm


@dataclass(frozen=True)
class Stack:
    """A program that serves checkpoints.

    Attributes:
        title: Its name in sentences.
        read: The version or commit whose source the claims are from, and when it was read.
        ran: With what the log-probabilities of exported models were compared, and when; None for nothing.
        model_types: Families whose code there was seen to pass on what config.json says of positions.
        dynamic: What it does in place of Transformers' dynamic rule.
        lines: The commands and comments for a folder.
        runs_adapters: Whether it puts an adapter on its base model.
    """

    title: str
    read: str
    ran: str | None
    model_types: frozenset[str]
    dynamic: str
    lines: Callable[[ExportFolder], list[str]]
    runs_adapters: bool = False

    @property
    def checked(self) -> str:
        """The way in which the claims were checked, for people."""
        by_running = "" if self.ran is None else f" and by running {self.ran}"
        return f"checked against the source of {self.title} {self.read}{by_running}"


_STARTS_FIXED = "it computes one table when it starts"
STACKS: dict[str, Stack] = {
    "vllm": Stack(
        title="vLLM",
        read="0.33.0 (2026-11-21)",
        ran="0.32.0 on a CPU (2026-11-25)",
        model_types=frozenset({"llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}),
        dynamic=_STARTS_FIXED,
        lines=vllm,
        runs_adapters=True,
    ),
    "sglang": Stack(
        title="SGLang",
        read="0.5.23 (2026-11-21)",
        ran=None,
        # Its Mixtral passes on no scaling, and rounds rope_theta down (python/sglang/srt/models/mixtral.py).
        model_types=frozenset({"llama", "mistral", "qwen2", "qwen2_moe", "qwen3"}),
        dynamic=_STARTS_FIXED,
        lines=sglang,
    ),
    "llama.cpp": Stack(
        title="llama.cpp",
        read=f"{READ} (2026-11-21)",
        ran=f"files with {LLAMA_SERVER} (2026-11-24)",
        model_types=frozenset(ARCHITECTURES),
        dynamic="it has no such scaling type",
        lines=llama_cpp,
    ),
    "tgi": Stack(
        title="TGI",
        read="commit 0666316 (2026-11-21)",
        ran=None,
        model_types=frozenset({"llama", "mistral", "qwen2"}),
        dynamic="its scale is that of the longest batch so far",
        lines=tgi,
    ),
    "mlx": Stack(
        title="mlx-lm",
        read="0.32.2 (2026-11-24)",
        ran="it on a CPU (2026-11-24)",
        # Its Mixtral, Qwen2Moe and Qwen3Moe make a plain rotary embedding (mlx_lm/models/mixtral.py and others).
        model_types=frozenset({"llama", "mistral", "qwen2", "qwen3"}),
        dynamic="its scale is that of the text so far",
        lines=mlx,
    ),
    "ollama": Stack(
        title="Ollama",
        read="0.33.0-rc2 (2026-11-24)",
        ran=None,
        model_types=frozenset(ARCHITECTURES),
        dynamic="llama.cpp, which it runs, has no such scaling type",
        lines=ollama,
    ),
}


def export_command(path: str | Path, stack: str, as_method: str | None = None) -> str:
    """Return the commands that make a stack run the rule of a folder of ``save_extended``.

    Args:
        path: The folder.
        stack: ``"vllm"``, ``"sglang"``, ``"llama.cpp"``, ``"tgi"``, ``"mlx"`` or ``"ollama"``.
        as_method: For a rule that only hf_posenc runs: the static rule to run in its place, such as ``yarn``, with
            its default options and the same target. The comments say what is lost.

    Returns:
        Lines for a POSIX shell: commands, and comments that start with ``#``.

    Raises:
        FileNotFoundError: There is no manifest, or no config.json.
        ValueError: The stack is unknown, or cannot express the rule (with the reason) or run adapters; or there is no
            need for ``as_method``.
    """
    known = STACKS.get(stack.lower())
    if known is None:
        raise UnknownNameError("stack", stack, STACKS, key=stack.lower())
    return command_for(known, read_folder(path), as_method)


def command_for(known: Stack, folder: ExportFolder, as_method: str | None = None) -> str:
    """Return the result of ``export_command``, of a folder that is read already.

    Raises:
        ValueError: As for ``export_command``.
    """
    folder, comments = checked_for(known, folder, as_method)
    return "\n".join(
        [
            f"{title_of(folder)}{known.checked}",
            *comments,
            *known.lines(folder),
            *notes_for_servers(folder),
        ]
    )


def checked_for(stack: Stack, folder: ExportFolder, as_method: str | None = None) -> tuple[ExportFolder, list[str]]:
    """Return a folder whose rule a stack may be able to run, and comments on what ``as_method`` loses.

    Raises:
        ValueError: As for ``export_command``.
    """
    if folder.model_type not in stack.model_types:
        raise InvalidRequestError(
            f"how {stack.title} reads the positions of model_type {folder.model_type!r} has not been checked, or it "
            f"drops part of them. Checked: {', '.join(sorted(stack.model_types))}."
        )
    if folder.rope_type == "dynamic":
        raise InvalidRequestError(
            f"{stack.title} cannot express Transformers' dynamic rule, one scale per forward: {stack.dynamic}. Save "
            "the model with a static rule, such as ntk or yarn."
        )
    if as_method is not None or not stack.runs_adapters:
        refuse_adapter(folder)
    comments: list[str] = []
    if as_method is not None:
        own, folder = folder, as_static(folder, as_method)
        comments = what_is_lost(own, folder)
    refuse_attention_rule(folder, stack.title)
    check_rule(folder)
    return folder, comments


def title_of(folder: ExportFolder) -> str:
    """Return the start of a comment that says which rule a folder has."""
    manifest = folder.manifest
    return f"# {manifest['method']} x{manifest['factor']:g}, {folder.original} -> {folder.context_length} tokens; "
