"""Metrics described as rows of a text."""

import pytest
from loopscope.errors import UsageError
from loopscope.hooks import MetricInfo, metric_table


def test_each_row_is_a_metric_wherever_its_lines_are_broken():
    in_one_line = metric_table("""
        norm | ‖g‖₂ | [0, ∞) | Large: the run may diverge.
        share/<parameter> | |a·b| / ‖a‖ of one parameter | [0, 1] | Small: noise.
    """)
    assert in_one_line == [
        MetricInfo("norm", "‖g‖₂", "[0, ∞)", "Large: the run may diverge."),
        MetricInfo("share/<parameter>", "|a·b| / ‖a‖ of one parameter", "[0, 1]", "Small: noise."),
    ]
    in_many = metric_table("""
        norm |
            ‖g‖₂ | [0, ∞) | Large: the
            run may diverge.
        share/<parameter> | |a·b| / ‖a‖
            of one parameter | [0, 1]
                | Small: noise.
    """)
    assert in_many == in_one_line


@pytest.mark.parametrize("row", ["norm | ‖g‖₂ | [0, ∞)", "norm | a | b | c | d", "norm ‖g‖₂"])
def test_a_row_that_has_not_four_cells_is_refused_with_its_text(row):
    with pytest.raises(UsageError, match=r"name . formula . range . reading.*this is not: 'norm"):
        metric_table(f"""
            loss | mean | [0, ∞) | Should fall.
            {row}
        """)
