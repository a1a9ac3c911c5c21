"""The version, here and nowhere else: pyproject.toml and manifests read it."""

__version__ = "0.1.0"
