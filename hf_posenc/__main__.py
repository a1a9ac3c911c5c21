"""``python -m hf_posenc`` is ``hf-posenc``."""

import sys

from hf_posenc.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
