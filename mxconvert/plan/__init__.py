"""The plan: every output file, fixed to the byte before any payload is read.

`build_plan` is a pure function of tensor records, config and options. Dry runs,
progress, resume, parallel work and the split over machines all come from it.
"""

from mxconvert.plan.build import build_plan, plan_digest
from mxconvert.plan.document import plan_document
from mxconvert.plan.plain import build_plain_plan

__all__ = ["build_plain_plan", "build_plan", "plan_digest", "plan_document"]
