"""Counts of codes and scales on a sample that does not depend on the pieces."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mxconvert_kernels.histograms import SAMPLE_EVERY, HistogramSampler, histograms

from tests.kernels.blocks import codes


def random_result(blocks: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(blocks)
    packed = rng.integers(0, 256, (blocks, 16), np.uint8)
    return packed, rng.integers(100, 130, blocks).astype(np.uint8)


@pytest.mark.parametrize("every", [1, 2, 7, SAMPLE_EVERY, 10_000])
def test_counts(every):
    packed, scales = random_result(1000)
    found = histograms(packed, scales, every)
    expected = np.bincount(codes(packed[::every]).ravel(), minlength=16)
    np.testing.assert_array_equal(found.codes, expected)
    assert found.scales.tolist() == np.bincount(scales[::every], minlength=256).tolist()
    assert (found.codes.dtype, found.scales.dtype) == (np.int64, np.int64)


@pytest.mark.parametrize("every", [1, 3, SAMPLE_EVERY])
def test_pieces_add_up(every):
    packed, scales = random_result(700)
    edges = [0, 1, 60, 61, 62, 300, 300, 699, 700]
    parts = [
        histograms(packed[begin:end], scales[begin:end], every, first_block=begin)
        for begin, end in itertools.pairwise(edges)
    ]
    whole = histograms(packed, scales, every)
    np.testing.assert_array_equal(sum(part.codes for part in parts), whole.codes)
    np.testing.assert_array_equal(sum(part.scales for part in parts), whole.scales)


def test_a_sampler_counts_as_often_as_it_is_asked():
    sampler = HistogramSampler(1)
    packed, scales = random_result(9000)  # more than is kept at a time
    for begin in range(0, 9000, 1500):
        piece = slice(begin, begin + 1500)
        sampler.add(packed[piece], scales[piece], first_block=begin)
        assert sampler.histograms().scales.sum() == begin + 1500
    found, expected = sampler.histograms(), histograms(packed, scales, 1)
    np.testing.assert_array_equal(found.codes, expected.codes)
    np.testing.assert_array_equal(found.scales, expected.scales)


def test_the_sample_covers_all_columns():
    """Of rows of any number of blocks but a multiple of the prime."""
    for blocks_in_row in (16, 64, 90, 224, 512):
        sampled = np.arange(0, blocks_in_row * SAMPLE_EVERY, SAMPLE_EVERY) % blocks_in_row
        assert len(set(sampled.tolist())) == blocks_in_row


def test_any_kind_of_buffer_and_none_at_all():
    found = histograms(b"\x21" * 16 + b"\xff" * 16, bytearray([7, 9]), 1)
    assert found.codes.nonzero()[0].tolist() == [1, 2, 15]
    assert found.codes[[1, 2, 15]].tolist() == [16, 16, 32]
    assert found.scales.nonzero()[0].tolist() == [7, 9]
    assert not histograms(b"", b"").codes.any()


def test_errors():
    with pytest.raises(ValueError, match="packed: expected 32 bytes for 2 scales, found 31 bytes"):
        histograms(bytes(31), bytes(2))
    with pytest.raises(ValueError, match="every: expected at least 1, found 0"):
        histograms(bytes(16), bytes(1), 0)
    with pytest.raises(ValueError, match="first_block: expected at least 0, found -1"):
        histograms(bytes(16), bytes(1), first_block=-1)
    with pytest.raises(ValueError, match="scales: expected a C-contiguous buffer"):
        histograms(bytes(32), np.zeros(4, np.uint8)[::2])
