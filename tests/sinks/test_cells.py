import numpy as np
import pytest
from hypothesis import example, given
from loopscope.sinks.csv_cells import cell, element, escape, parse_cell, parse_element, unescape

from tests.sinks.emits import VALUES, WORDS, exact


@given(VALUES)
@example([])
@example({})
@example([[]])
@example({"": {}})
@example([""])
@example([["a"]])
def test_every_value_comes_back_from_its_cell(value):
    assert exact(parse_cell(cell(value))) == exact(value)


@given(VALUES)
def test_every_value_comes_back_from_inside_a_list(value):
    assert exact(parse_element(element(value))) == exact(value)


@given(VALUES)
def test_no_cell_holds_a_comma_a_quote_a_line_end_or_nothing(value):
    assert cell(value)
    assert not set(cell(value)) & set(',"\n\r')


@given(WORDS)
def test_escaped_text_comes_back(text):
    assert unescape(escape(text)) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": 1.5, "b": 2}, "a:1.5;b:2"),
        ([1.0, float("nan"), float("-inf")], "1.0;nan;-inf"),
        ({"layer": [1, 2], "rest": {"x": True}}, "layer:[1;2];rest:[x:True]"),
        (np.float32(0.5), "0.5"),
        ((1, 2), "1;2"),
    ],
)
def test_cells_read_as_documented(value, text):
    assert cell(value) == text
