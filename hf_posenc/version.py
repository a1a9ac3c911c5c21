"""The version, here and nowhere else: pyproject.toml and manifests read it."""

__version__ = "0.1.0"

# Versions of vLLM that ``hf_posenc.vllm_plugin`` was tested with: how they begin.
VLLM_TESTED = "0.32."
# Of its ``--additional-config``: the adapter that the plugin puts on long requests.
VLLM_KEY = "hf_posenc"
