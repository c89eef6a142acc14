"""Metric descriptions as rows of a table."""

import pytest
from loopscope.errors import UsageError
from loopscope.hooks import MetricInfo, metric_table


def test_line_breaks_do_not_change_metric_rows():
    """A row may span several lines, and a formula may contain vertical bars."""
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
def test_row_without_four_cells_is_refused(row):
    """The error quotes the row and names the expected columns."""
    with pytest.raises(UsageError, match=r"The metric row .norm.* is invalid; write .name . formula . range . reading"):
        metric_table(f"""
            loss | mean | [0, ∞) | Should fall.
            {row}
        """)
