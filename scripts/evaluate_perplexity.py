"""Measure perplexity: ``python scripts/evaluate_perplexity.py --help`` (the same as ``hf-posenc eval``)."""

from __future__ import annotations

import sys

from hf_posenc.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["eval", *sys.argv[1:]]))
