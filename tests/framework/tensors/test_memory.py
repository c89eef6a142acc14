"""Addresses of the objects in a tuple: read from memory, and by the documented function ``id``."""

from typing import Any

import pytest
from loopscope.tensors import addresses
from loopscope.tensors.memory import addresses_by_id, addresses_in_memory

TUPLES: list[tuple[Any, ...]] = [(), (None,), (1, "text", object()), tuple(object() for _ in range(700))]


@pytest.mark.parametrize("objects", TUPLES, ids=len)
def test_both_ways_return_equal_addresses(objects: tuple[Any, ...]) -> None:
    assert addresses_in_memory(objects) == addresses_by_id(objects)


def test_fast_way_is_selected() -> None:
    assert addresses is addresses_in_memory


@pytest.mark.parametrize("read", [addresses_in_memory, addresses_by_id])
def test_addresses_identify_objects_not_values(read: Any) -> None:
    first, second = [1], [1]
    assert read((first, second)) == read((first, second))
    assert read((first,)) != read((second,))
