"""Whether a running server computes what the model of a folder computes."""

from hf_posenc.serving.server_check import ServerCheck, check_server

__all__ = ["ServerCheck", "check_server"]
