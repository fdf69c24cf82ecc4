"""The backends under test."""

from __future__ import annotations

import pytest
from mxconvert_kernels import Backend, FloatType, ScaleRule, get_backend
from mxconvert_kernels.spec import WHOLE_TYPES

from tests.kernels.interpreter import INTERPRETING, fuse_multiply_add

BACKENDS = ("triton",) if INTERPRETING else ("llvm", "numpy", "reference")
if INTERPRETING:
    fuse_multiply_add()


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend in turn."""
    return get_backend(request.param)


@pytest.fixture(params=BACKENDS[:2])
def fast_backend(request: pytest.FixtureRequest) -> Backend:
    """Each backend but the oracle."""
    return get_backend(request.param)


@pytest.fixture(params=WHOLE_TYPES)
def dtype(request: pytest.FixtureRequest) -> FloatType:
    return request.param


@pytest.fixture(params=ScaleRule)
def rule(request: pytest.FixtureRequest) -> ScaleRule:
    return request.param
