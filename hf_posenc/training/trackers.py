"""Which experiment trackers Transformers can report to, and whether one is installed."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

# Where the package that is imported is not called as the tracker is; any one of them will do.
_IMPORTED = {
    "azure_ml": ("azureml",),
    "flyte": ("flytekit",),
    "tensorboard": ("tensorboard", "tensorboardX"),
    "kubeflow": (),  # no package: it is told where to report by the cluster
}
# Where `pip install` wants another name.
_INSTALLED = {"azure_ml": "azureml-core", "comet_ml": "comet-ml", "flyte": "flytekit"}


def check_trackers(report_to: str | list[str] | None) -> None:
    """Refuse a tracker that Transformers does not know, or whose package is missing, before anything is trained.

    Args:
        report_to: ``"none"``, ``"all"`` (that are installed), or the names of one or more trackers.

    Raises:
        ValueError: It is unknown, or not installed; the message says how to install it.
    """
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

    for name in [report_to] if isinstance(report_to, str) else report_to or ():
        if name not in ("none", "all"):
            _check_tracker(name, INTEGRATION_TO_CALLBACK)


def _check_tracker(name: str, trackers: Collection[str]) -> None:
    if name not in trackers:
        known = ", ".join(("none", "all", *trackers))
        raise ValueError(f"unknown report_to {name!r}. Known: {known}.")
    packages = _IMPORTED.get(name, (name,))
    if packages and not any(find_spec(package) for package in packages):
        raise ValueError(
            f"report_to {name!r} needs a package that is not installed: pip install {_INSTALLED.get(name, name)}"
        )
