"""Extend and fine-tune a model: ``python scripts/finetune.py --help`` (the same as ``hf-posenc finetune``)."""

from __future__ import annotations

import sys

from hf_posenc.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["finetune", *sys.argv[1:]]))
