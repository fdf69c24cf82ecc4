"""Following a tag: each version in a folder of its own, ``current`` always whole."""

from mxconvert.transfer.watch import nats
from mxconvert.transfer.watch.folders import CURRENT, Versions
from mxconvert.transfer.watch.run import Watcher, WatchOptions, check_watching

__all__ = ["CURRENT", "Versions", "WatchOptions", "Watcher", "check_watching", "nats"]
