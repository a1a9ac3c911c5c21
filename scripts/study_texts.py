"""Write the texts of ``study_adapt.py``: two to fit on, of four kinds each, and four that are measured, a kind each.

    python scripts/study_texts.py outputs/study-texts

Needs Debian or Ubuntu: packages are downloaded with apt-get, and nothing is installed. English novels come with
hf_posenc, Python code with the interpreter and Transformers.
"""

from __future__ import annotations

import argparse
import gzip
import inspect
import subprocess
import tempfile
from collections.abc import Iterable
from pathlib import Path

import transformers.generation.utils
import transformers.modeling_utils

from hf_posenc.assets import load_novel
from hf_posenc.checkpoint.pretrained import load_tokenizer

PACKAGES = ("linux-doc-6.1", "debian-reference-fr", "debian-faq-fr")
TOKENS_OF_A_KIND = 8192  # in a text to fit on


def joined(files: Iterable[Path]) -> str:
    """Return the text of files, packed ones too, in the order of their names."""
    texts = ((gzip.decompress if file.suffix == ".gz" else bytes)(file.read_bytes()) for file in sorted(files))
    return "\n".join(text.decode("utf-8") for text in texts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default=".cache/smollm2-135m-instruct", help="whose tokenizer counts")
    args = parser.parse_args()
    tokenizer = load_tokenizer(args.model)
    with tempfile.TemporaryDirectory() as packed:
        subprocess.run(["apt-get", "download", *PACKAGES], cwd=packed, check=True)
        for file in Path(packed).glob("*.deb"):
            subprocess.run(["dpkg-deb", "-x", file, packed], check=True)
        share = Path(packed, "usr/share")
        french = joined(share.glob("debian-reference/*.fr.txt.gz"))
        french_held_out = joined(share.glob("doc/debian/FAQ/*.fr.txt.gz"))
        manual = joined(share.glob("doc/linux-doc-6.1/Documentation/admin-guide/*.rst.gz"))
    code = inspect.getsource(transformers.modeling_utils) + inspect.getsource(transformers.generation.utils)
    kinds = [
        tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        for text in (load_novel("emma"), code, manual, french)
    ]
    found = {
        "persuasion": load_novel("persuasion"),
        "documentation": joined(Path(__file__).parents[1].glob("docs/pages/**/*.md")),
        "code": inspect.getsource(argparse) + inspect.getsource(inspect),
        "french": french_held_out,
    }
    for number in range(2):
        part = slice(number * TOKENS_OF_A_KIND, (number + 1) * TOKENS_OF_A_KIND)
        found[f"four_kinds_{number + 1}"] = "".join(tokenizer.decode(ids[part]) for ids in kinds)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name, text in found.items():
        (args.folder / f"{name}.txt").write_text(text, "utf-8")
        print(f"{name}.txt: {len(tokenizer(text, verbose=False).input_ids)} tokens")


if __name__ == "__main__":
    main()
