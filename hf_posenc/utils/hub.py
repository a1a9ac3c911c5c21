"""Errors of the Hugging Face Hub and of the network, raised as hf_posenc's own errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub import constants, get_token
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError is that of its HTTP client, whichever it is
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # it is public, and not in __all__

from hf_posenc.errors import HfPosencError, HubAccessError, HubUnreachableError, InvalidRequestError, first_line

_LOG_IN = "Log in with `hf auth login`, set HF_TOKEN, or give a token"


def is_repo_id(name: str) -> bool:
    """Return whether the Hub could have a repository of this name."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def is_path(name: str) -> bool:
    """Return whether a name of a model can only be that of a file or folder."""
    return name.endswith((".json", ".gguf")) or not is_repo_id(name)


def check_may_push(repo_id: str, token: str | None) -> None:
    """Raise what keeps a repository from being written to as far as this machine knows; nothing is asked of the Hub.

    Raises:
        HFValidationError: No repository can have this name.
        OfflineModeIsEnabled: Offline mode is set.
        HubAccessError: No token was given, and nobody is logged in.
    """
    validate_repo_id(repo_id)
    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled
    if token is None and get_token() is None:
        raise HubAccessError(
            f"{repo_id!r} cannot be pushed to: there is no token for the Hugging Face Hub here. {_LOG_IN} that may "
            "write there.",
            repo_id,
            None,
        )


@contextmanager
def hub_errors(repo_id: str, done: str, advice: str = "") -> Iterator[None]:
    """Raise errors of the Hub's client as hf_posenc's own; any other error passes.

    Args:
        repo_id: The repository, ``OWNER/NAME``.
        done: What is being done with it: "read", "pushed to".
        advice: A sentence for the end of the message: what is safe already, and how to go on.

    Raises:
        HubUnreachableError: There is no network, offline mode is set, or the server has a fault.
        HubAccessError: The repository is not there or private, or the token lacks the right.
        InvalidRequestError: It has no such revision, or no repository can have this name.
    """
    try:
        yield
    except Exception as error:
        # The client raises what an upload failed of as the cause of a RuntimeError that only names the file.
        reason = error.__cause__ if isinstance(error, RuntimeError) else error
        known_error = _as_ours(reason, repo_id, f"{repo_id!r} cannot be {done}", f" {advice}" if advice else "")
        if known_error is None:
            raise
        raise known_error from error


def _as_ours(error: BaseException | None, repo_id: str, cannot: str, end: str) -> HfPosencError | None:
    """Return hf_posenc's error for one of the Hub's client or of the network; None for any other."""
    if isinstance(error, HFValidationError):
        return InvalidRequestError(f"{cannot}: {first_line(error)} Give OWNER/NAME, such as me/longer-model.")
    if isinstance(error, RevisionNotFoundError):
        what = "it has no such revision. Give the name of a branch, a tag, or a whole commit hash."
        return InvalidRequestError(f"{cannot}: {what}{end}")
    if isinstance(error, GatedRepoError):
        page = f"{constants.ENDPOINT}/{repo_id}"
        what = f"access to it has to be granted. Ask for it on {page}. {_LOG_IN} of the account that has it."
        return HubAccessError(f"{cannot}: {what}{end}", repo_id, error.response.status_code)
    if isinstance(error, RepositoryNotFoundError):
        what = f"the Hub has no repository of this name, or it is private. Check the name. {_LOG_IN} that may read it."
        return HubAccessError(f"{cannot}: {what}{end}", repo_id, error.response.status_code)
    if isinstance(error, HfHubHTTPError):
        return _refusal(error, cannot, repo_id, end)
    if isinstance(error, OfflineModeIsEnabled):
        what = "offline mode is set (HF_HUB_OFFLINE=1), so the Hub is not asked. Unset it."
        return HubUnreachableError(f"{cannot}: {what}{end}", repo_id)
    if isinstance(error, (HTTPError, LocalEntryNotFoundError)):
        what = (
            f"{constants.ENDPOINT} cannot be reached ({first_line(error)}). Check the network, and HF_ENDPOINT if set."
        )
        return HubUnreachableError(f"{cannot}: {what}{end}", repo_id)
    return None


def _refusal(error: HfHubHTTPError, cannot: str, repo_id: str, end: str) -> HubAccessError | HubUnreachableError:
    status = error.response.status_code
    answer = f"{status}: {error.server_message}" if error.server_message else str(status)
    if status == 429 or status >= 500:
        return HubUnreachableError(f"{cannot}: the Hub cannot serve it now ({answer}). Try again later.{end}", repo_id)
    reason = f"the Hub refuses ({answer})."
    if status == 401:
        reason = f"the Hub does not accept the token ({answer}). {_LOG_IN} that is valid."
    elif status == 403:
        reason = f"the token may not do that ({answer}). Take a token that may write there, or another OWNER/NAME."
    return HubAccessError(f"{cannot}: {reason}{end}", repo_id, status)
