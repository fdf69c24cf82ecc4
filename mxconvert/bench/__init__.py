"""How fast this machine converts, and what holds it back.

Rates of each resource that a conversion uses, measured alone and through the pipeline's own
code, and the time that each of them implies for a checkpoint. Nothing is written outside a
folder that is removed at the end.
"""

from mxconvert.bench.bounds import Bound, Workload
from mxconvert.bench.run import BenchOptions, BenchReport, run_bench

__all__ = ["BenchOptions", "BenchReport", "Bound", "Workload", "run_bench"]
