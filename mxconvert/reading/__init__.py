"""The tensors of an artifact, verified, straight from where it lies."""

from mxconvert.reading.artifact import MAX_BYTES, OpenArtifact, open_artifact

__all__ = ["MAX_BYTES", "OpenArtifact", "open_artifact"]
