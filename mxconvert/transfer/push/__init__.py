"""Publishing an artifact: payload, index, manifest, tags, in this order."""

from mxconvert.transfer.push.options import PushOptions, PushResult
from mxconvert.transfer.push.run import PlannedFile, plan_push, push_artifact

__all__ = ["PlannedFile", "PushOptions", "PushResult", "plan_push", "push_artifact"]
