"""The flags of ``hf-posenc explain`` and ``hf-posenc gallery``; imports no PyTorch, so that help answers at once."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class ExplainArguments:
    """Which model it is explained on, and where pictures go."""

    model: str | None = field(
        default=None,
        metadata={
            "help": "name on the Hub, folder or .gguf file, of which only the config is read; default: the numbers of "
            "Llama 2 7B"
        },
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "folder for explain.html and the pictures; default: words only"}
    )


@dataclass
class GalleryArguments:
    """Where the gallery goes."""

    output_dir: str = field(metadata={"help": "folder for gallery.html and the pictures, each as PNG and SVG"})
