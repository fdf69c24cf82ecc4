"""Artifacts at a store: versions in immutable folders, tags that point at them.

Below a URL lie ``<first 16 digits of the id>/``, a plain folder that engines load as it
is, and ``refs/<tag>.json``, a pointer that is moved by compare-and-swap. ``--flat``
puts one artifact's files at the URL itself. Nothing that must be right depends on a
listing. See ``docs/reference/push-and-pull.md``.
"""

from mxconvert.remote.documents import read_document
from mxconvert.remote.layout import PROBE, check_id, folder_of, is_folder, is_id, ref_key
from mxconvert.remote.manifests import RemoteArtifact, read_manifest
from mxconvert.remote.refs import Ref, honours_conditions, move_ref, read_ref, refs_of
from mxconvert.remote.resolve import Location, find_artifact, locate, no_version
from mxconvert.remote.versions import Version, list_versions

__all__ = [
    "PROBE",
    "Location",
    "Ref",
    "RemoteArtifact",
    "Version",
    "check_id",
    "find_artifact",
    "folder_of",
    "honours_conditions",
    "is_folder",
    "is_id",
    "list_versions",
    "locate",
    "move_ref",
    "no_version",
    "read_document",
    "read_manifest",
    "read_ref",
    "ref_key",
    "refs_of",
]
