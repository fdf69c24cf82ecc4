"""Objects of fsspec's file systems."""

from __future__ import annotations

import uuid

import pytest

from tests.store_base import (
    StoreBehaviour,
    make,
)


class TestMemory(StoreBehaviour):
    @pytest.fixture
    def store(self):
        return make(f"memory://{uuid.uuid4().hex}/below")


class TestS3ThroughFsspec(StoreBehaviour):
    @pytest.fixture
    def store(self, s3, bucket, monkeypatch):
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        return make(f"s3://{bucket}/some prefix", engine="fsspec", endpoint=s3.endpoint)


class TestS3(StoreBehaviour):
    """The store of botocore does the same."""

    folders_vanish = False  # SeaweedFS shows a folder after its last object is gone

    @pytest.fixture
    def store(self, s3, bucket, monkeypatch):
        for name, value in s3.environment().items():
            monkeypatch.setenv(name, value)
        store = make(f"s3://{bucket}/some prefix", endpoint=s3.endpoint)
        yield store
        store.close()
