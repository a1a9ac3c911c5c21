"""Pushing a trained model to the Hub, by the options of TrainingArguments: push_to_hub, hub_model_id and so on."""

from __future__ import annotations

import logging
from pathlib import Path

from huggingface_hub import create_repo, upload_folder

from hf_posenc.training.config import FinetuneConfig

logger = logging.getLogger(__name__)

# Checkpoints and stages of the run, whole or not, and names that begin with "_", as Trainer leaves them out.
_NOT_PUSHED = ["checkpoint-*", "checkpoints.partial/*", "stage-*", "_*"]


def make_repo(config: FinetuneConfig) -> str | None:
    """Make the repository that a run is pushed to, so that a token that may not is found before the training.

    Returns:
        Its name, ``OWNER/NAME``; None where nothing is to be pushed.

    Raises:
        huggingface_hub.errors.HfHubHTTPError: The Hub refused it.
    """
    if not config.push_to_hub:
        return None
    name = config.hub_model_id or Path(str(config.output_dir)).absolute().name
    url = create_repo(name, token=config.hub_token, private=config.hub_private_repo, exist_ok=True)
    return str(url.repo_id)


def push(config: FinetuneConfig, repo_id: str) -> None:
    """Upload the trained model with its card, results and logs; checkpoints stay here."""
    logger.info("pushing %s to https://huggingface.co/%s", config.output_dir, repo_id)
    upload_folder(
        repo_id=repo_id,
        folder_path=str(config.output_dir),
        commit_message="Model trained by hf_posenc",
        token=config.hub_token,
        revision=config.hub_revision,
        ignore_patterns=_NOT_PUSHED,
    )
