"""The command line, ``hf-posenc``."""
