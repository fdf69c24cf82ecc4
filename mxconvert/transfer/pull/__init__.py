"""Fetching an artifact: chunks checked as they land, index, manifest last."""

from mxconvert.transfer.pull.options import PullOptions, PullResult
from mxconvert.transfer.pull.preview import PullPreview, preview_pull
from mxconvert.transfer.pull.run import pull_artifact

__all__ = ["PullOptions", "PullPreview", "PullResult", "preview_pull", "pull_artifact"]
