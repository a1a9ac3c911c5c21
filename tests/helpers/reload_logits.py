"""Run in a process of its own: load saved folders as plain Transformers and PEFT do, and write down their logits.

    python reload_logits.py IDS OUT [--with-hf-posenc] FOLDER...

IDS and OUT are safetensors files; OUT gets the logits of each folder under the folder's name, and its
``max_position_embeddings`` under the name with ``.length`` after it.
"""

from __future__ import annotations

import sys
from pathlib import Path

WITH_US = "--with-hf-posenc"


def main(ids_file: str, out: str, *folders: str) -> None:
    if WITH_US in folders:
        import hf_posenc

        hf_posenc.install()  # before Transformers is imported
    import torch
    from peft import AutoPeftModelForCausalLM
    from safetensors.torch import load_file, save_file
    from transformers import AutoModelForCausalLM

    assert ("hf_posenc" in sys.modules) == (WITH_US in folders)
    ids = load_file(ids_file)["ids"]
    found = {}
    for folder in folders:
        if folder == WITH_US:
            continue
        adapter = (Path(folder) / "adapter_config.json").is_file()
        model = (AutoPeftModelForCausalLM if adapter else AutoModelForCausalLM).from_pretrained(folder).eval()
        with torch.no_grad():
            found[folder] = model(ids).logits
        found[f"{folder}.length"] = torch.tensor(model.config.max_position_embeddings)
    save_file(found, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
