"""The commands and files with which other stacks run a checkpoint of ``save_extended``, or why they cannot."""

from hf_posenc.exports.gguf_copy import export_gguf, gguf_metadata, gguf_tensors
from hf_posenc.exports.stacks import STACKS, export_command

__all__ = ["STACKS", "export_command", "export_gguf", "gguf_metadata", "gguf_tensors"]
