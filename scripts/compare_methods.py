"""Compare methods on a text: ``python scripts/compare_methods.py --help`` (the same as ``hf-posenc compare``)."""

from __future__ import annotations

import sys

from hf_posenc.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["compare", *sys.argv[1:]]))
