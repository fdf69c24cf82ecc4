"""Which experts a rank holds."""

from __future__ import annotations

import pytest

from mxconvert.errors import UsageError
from mxconvert.placement import Placement, Ranks, format_experts, parse_experts


@pytest.mark.parametrize(
    ("num_experts", "world_size", "sizes"),
    [
        (30, 8, [4, 4, 4, 4, 4, 4, 3, 3]),
        (10, 4, [3, 3, 2, 2]),
        (13, 6, [3, 2, 2, 2, 2, 2]),
        (5, 2, [3, 2]),
        (16, 1, [16]),
        (4, 4, [1, 1, 1, 1]),
    ],
)
@pytest.mark.parametrize("placement", Placement)
def test_remainder_goes_to_the_first_ranks(
    num_experts: int, world_size: int, sizes: list[int], placement: Placement
) -> None:
    """RNK-01: balanced, and the ranks together hold each expert once."""
    ranks = Ranks(num_experts, world_size, placement)
    held = [ranks.experts(rank) for rank in range(world_size)]
    assert [len(experts) for experts in held] == sizes
    assert sorted(expert for experts in held for expert in experts) == list(range(num_experts))


def test_linear_is_contiguous_and_round_robin_strides() -> None:
    """The two placements, number by number."""
    assert Ranks(10, 4).experts(1) == (3, 4, 5)
    assert Ranks(10, 4, Placement.ROUND_ROBIN).experts(1) == (1, 5, 9)


@pytest.mark.parametrize("rank", [-1, 4, 10**9])
def test_rank_outside_the_group(rank: int) -> None:
    """RNK-03: the message names the valid range."""
    with pytest.raises(UsageError, match="expected 0 to 3"):
        Ranks(10, 4).experts(rank)


@pytest.mark.parametrize("world_size", [-1, 0, 11])
def test_world_size_out_of_range(world_size: int) -> None:
    """RNK-03: no rank without an expert, and no group without a rank."""
    with pytest.raises(UsageError, match="expected 1 to 10"):
        Ranks(10, world_size)


def test_dense_model_has_no_ranks() -> None:
    """RNK-03: said, instead of fetching everything."""
    with pytest.raises(UsageError, match="no routed experts"):
        Ranks(0, 2)
    with pytest.raises(UsageError, match="no routed experts"):
        parse_experts("0", 0)


def test_ranks_of_a_node() -> None:
    """Each node holds the same number of consecutive ranks."""
    ranks = Ranks(64, 16)
    assert [list(ranks.of_node(node, 4)) for node in (0, 3)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    for node, nodes in ((4, 4), (-1, 4), (0, 3), (0, 0)):
        with pytest.raises(UsageError):
            ranks.of_node(node, nodes)


def test_numbers_and_ranges_of_experts() -> None:
    """What is read is written the same, sorted, each once."""
    assert parse_experts("40, 0-3,2", 64) == (0, 1, 2, 3, 40)
    assert format_experts([40, 2, 1, 0, 3]) == "0-3,40"
    assert format_experts([7]) == "7"
    assert format_experts([]) == ""
    assert parse_experts(format_experts(range(64)), 64) == tuple(range(64))


@pytest.mark.parametrize("text", ["", "1,", "3-1", "64", "0-64", "a", "-1", "1-2-3", "0x1", "1.0"])
def test_unreadable_experts(text: str) -> None:
    """RNK-03: nothing is guessed; the item at fault and the valid range are named."""
    with pytest.raises(UsageError, match="0 to 63"):
        parse_experts(text, 64)
