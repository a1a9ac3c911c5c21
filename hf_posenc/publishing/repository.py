"""A repository on the Hugging Face Hub: made before anything expensive, filled with a saved folder at the end."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import CommitOperationAdd, HfApi, constants, hf_hub_download
from huggingface_hub.errors import RemoteEntryNotFoundError

from hf_posenc.checkpoint.extended import CHECKPOINT_FILES
from hf_posenc.errors import InvalidRequestError, InvalidTypeError
from hf_posenc.publishing.card import CARD, is_own_card
from hf_posenc.utils.hub import check_may_push, hub_errors

logger = logging.getLogger(__name__)

_PUSHED_TO = "pushed to"


@dataclass(frozen=True)
class Repository:
    """A repository of a model that can be written to.

    Attributes:
        repo_id: ``OWNER/NAME``.
        revision: The branch; None for the main one.
        token: None for that of the login.
    """

    repo_id: str
    revision: str | None = None
    token: str | None = field(default=None, repr=False)

    @property
    def url(self) -> str:
        """Its page."""
        return f"{constants.ENDPOINT}/{self.repo_id}"

    def upload(
        self,
        folder: Path,
        message: str,
        *,
        files: Sequence[str] | None = None,
        leave_out: Sequence[str] = (),
        any_card: bool = False,
    ) -> None:
        """Upload the files of a folder, in place of the checkpoint that was there.

        A model card there that was not written by hf_posenc is kept, and a warning says so.

        Args:
            folder: On this machine.
            message: Message of the commit.
            files: Paths in the folder; None for all of them.
            leave_out: Patterns of files that stay here.
            any_card: Replace every model card: the one in the folder was given by the user.

        Raises:
            HubAccessError, HubUnreachableError: The Hub refused or could not be reached; the folder is kept.
        """
        again = (
            f"Everything is saved in {str(folder)!r}; to upload it: {self._upload_command(folder, files, leave_out)}"
        )
        with hub_errors(self.repo_id, _PUSHED_TO, again):
            kept = [] if any_card or not self._has_card_of_others() else [CARD]
            if kept:
                logger.warning(
                    "%s: its model card was not written by hf_posenc and is kept; the new one is %s.",
                    self.url,
                    folder / CARD,
                )
            logger.info("pushing %s to %s", folder, self.url)
            HfApi(token=self.token).upload_folder(
                repo_id=self.repo_id,
                folder_path=folder,
                commit_message=message,
                revision=self.revision,
                allow_patterns=None if files is None else list(files),
                ignore_patterns=[*leave_out, *kept],
                # Of an earlier model: shards, or an adapter, that would be loaded with this one.
                delete_patterns=list(CHECKPOINT_FILES),
            )

    def _upload_command(self, folder: Path, files: Sequence[str] | None, leave_out: Sequence[str]) -> str:
        """Return the command that does what ``upload`` does."""
        others = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {
            *(files or ())
        }
        flags = {
            "--revision": [] if self.revision is None else [self.revision],
            "--include": files if files is not None and others else [],
            "--exclude": leave_out,
            "--delete": CHECKPOINT_FILES,
        }
        flag_words = [word for flag, values in flags.items() for value in values for word in (flag, value)]
        return shlex.join(["hf", "upload", self.repo_id, str(folder), ".", *flag_words])

    def _has_card_of_others(self) -> bool:
        try:
            card = hf_hub_download(self.repo_id, CARD, revision=self.revision, token=self.token)
        except RemoteEntryNotFoundError:
            return False
        return not is_own_card(Path(card))


def make_repository(
    name: str, *, private: bool | None = None, token: str | None = None, revision: str | None = None
) -> Repository:
    """Make a repository, or take one that is there, and see that it can be written to.

    Args:
        name: ``OWNER/NAME``, or ``NAME`` in the account that the token is of.
        private: Whether a new one is private; None is the default of the account.
        token: None for that of the login.
        revision: The branch to write to, made if it is not there; None for the main one.

    Raises:
        HubAccessError: There is no token, or it may not write there.
        HubUnreachableError: There is no network, or offline mode is set.
        ValueError: No repository can have this name, or the one that is there is public and a private one was asked
            for, or the other way round.
    """
    if not isinstance(name, str):
        raise InvalidTypeError(f"push_to_hub takes the name of a repository, such as 'me/longer', got {name!r}.")
    with hub_errors(name, _PUSHED_TO):
        check_may_push(name, token)
        api = HfApi(token=token)
        repo_id = api.create_repo(name, private=private, exist_ok=True).repo_id
        if private is not None and (found := bool(api.model_info(repo_id).private)) != private:
            raise InvalidRequestError(
                f"{repo_id!r} is there already and is {_visibility(found)}, and {_visibility(private)} was asked for. "
                "Change it in its settings on the Hub, or give another name."
            )
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        # The first request of every upload: whether these files may be written; nothing is stored by it.
        asked = CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=b"---\n---\n")
        api.preupload_lfs_files(repo_id, additions=[asked], revision=revision)
    return Repository(repo_id, revision, token)


def _visibility(private: bool) -> str:
    return "private" if private else "public"
