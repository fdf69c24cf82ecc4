"""Object stores: one interface, one URL grammar, one way of retrying."""

from mxconvert.store.base import (
    Blob,
    Body,
    CommitStore,
    Condition,
    FileStore,
    Identity,
    ObjectInfo,
    Part,
    PartBody,
    PartLimits,
    PartStore,
    Store,
    Upload,
)
from mxconvert.store.client import (
    DEFAULT_JOBS,
    DEFAULT_RETRY_FOR,
    Abandoned,
    Client,
    ClientOptions,
    Counters,
    RangeIgnored,
)
from mxconvert.store.open import open_store
from mxconvert.store.options import Checksum, StoreOptions, parse_store_options
from mxconvert.store.url import StoreURL, is_tag, is_url, parse_url

__all__ = [
    "DEFAULT_JOBS",
    "DEFAULT_RETRY_FOR",
    "Abandoned",
    "Blob",
    "Body",
    "Checksum",
    "Client",
    "ClientOptions",
    "CommitStore",
    "Condition",
    "Counters",
    "FileStore",
    "Identity",
    "ObjectInfo",
    "Part",
    "PartBody",
    "PartLimits",
    "PartStore",
    "RangeIgnored",
    "Store",
    "StoreOptions",
    "StoreURL",
    "Upload",
    "is_tag",
    "is_url",
    "open_store",
    "parse_store_options",
    "parse_url",
]
