"""``save_extended``: the checkpoint, its model card and what was measured of it, here and on the Hub."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from hf_posenc.checkpoint.extended import save_checkpoint
from hf_posenc.checkpoint.manifest import RESULTS
from hf_posenc.errors import InvalidRequestError, argument
from hf_posenc.evaluation.records import Record
from hf_posenc.publishing.card import CARD, check_records, is_own_card, write_card
from hf_posenc.publishing.repository import Repository, make_repository
from hf_posenc.utils.files import writable_folder


def save_extended(
    model: nn.Module,
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase | ProcessorMixin | None = None,
    *,
    tokens_trained: int | None = 0,
    base_model: str | None = None,
    fitted_on: Mapping[str, Any] | None = None,
    records: Sequence[Record] = (),
    card: str | bool | None = None,
    push_to_hub: str | Repository | None = None,
    private: bool | None = None,
    token: str | None = None,
    revision: str | None = None,
) -> Path:
    """Save a patched model so that Transformers 4.57 and 5 load it extended, without hf_posenc.

    A PEFT-wrapped model is saved as an adapter with the manifest beside it; ``load_extended`` applies it to the base.
    Everything is written to a folder of its own and moved to ``path`` at the end. What is pushed to the Hub is what was
    written now, not what else is in the folder.

    Args:
        model: A model that ``patch_model`` extended, or one loaded extended. One that ``load_model`` widened to
            float32 for a CPU without bfloat16 is saved in its checkpoint's dtype.
        path: The folder; the files of an earlier checkpoint in it are replaced, others are left alone.
        tokenizer: Saved too, with ``model_max_length`` set to the target; or a processor, with its tokenizer. Without
            one, the settings of a processor are copied from where the model came from.
        tokens_trained: Tokens it was fine-tuned on since, for the manifest; None if that is not known.
        base_model: Where the unextended model came from; None to take it from the config.
        fitted_on: For the manifest: what a rule or changed weights were fitted on, and how (``FitResult.facts``).
        records: Perplexities of this model, and of those it is compared with, which the card shows as a table and a
            curve. They are saved as ``results.jsonl``.
        card: Text of the model card, README.md; True for one that says what was done, and how to load and serve the
            model; None for that one if the model is pushed, has records, or is saved over one with such a card, else
            for none. A card that somebody wrote is replaced by a text of yours only.
        push_to_hub: Name of the repository to push to, ``"OWNER/NAME"``. It is made before anything is written. Or one
            that ``make_repository`` made before.
        private: Whether a new repository is private; None is the default of the account.
        token: For the Hub; None for that of the login.
        revision: Branch to push to, made if it is not there; None for the main one.

    Returns:
        The folder.

    Raises:
        RotaryMismatchError: The live model does not hold what would be saved.
        HubAccessError: There is no token, or it may not write to the repository.
        HubUnreachableError: The Hub cannot be reached, or offline mode is set.
        ValueError: The model is not extended, ``path`` cannot be written to, quantised weights cannot be saved as they
            are, the records are of other models, or no repository can have this name.
    """
    check_records(records, model, tokens_trained, fitted_on)
    target = writable_folder(path).absolute()
    where: dict[str, Any] = {"private": private, "token": token, "revision": revision}
    repository = None
    if isinstance(push_to_hub, Repository):
        repository = push_to_hub
    elif push_to_hub is not None:
        repository = make_repository(push_to_hub, **where)
    elif given := [name for name, value in where.items() if value is not None]:
        raise InvalidRequestError(
            f"{' and '.join(given)} {'is' if len(given) == 1 else 'are'} for {argument('push_to_hub')}, which is not "
            "given. Name the repository, such as push_to_hub='me/longer-model'."
        )
    written: list[str] = []

    def finish(folder: Path) -> None:
        if records:
            lines = [record.to_json() + "\n" for record in records]
            (folder / RESULTS).write_text("".join(lines), encoding="utf-8")
        if isinstance(card, str):
            (folder / CARD).write_text(card, encoding="utf-8")
        elif card or (card is None and (repository is not None or records or is_own_card(target / CARD))):
            write_card(model, folder, target, repository=repository, records=records)
        written.extend(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())

    folder = save_checkpoint(
        model,
        path,
        tokenizer,
        tokens_trained=tokens_trained,
        base_model=base_model,
        fitted_on=fitted_on,
        finish=finish,
    )
    if repository is not None:
        # A card that was kept here, as it is the user's own, is that of the repository too.
        files = list(dict.fromkeys([*written, CARD]))
        repository.upload(folder, "Model extended by hf_posenc", files=files, any_card=isinstance(card, str))
    return folder
