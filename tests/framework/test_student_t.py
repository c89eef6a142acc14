import math

import pytest
from loopscope.student_t import critical_t, two_sided_p
from scipy import stats

FREEDOM = pytest.mark.parametrize("freedom", [1, 1.5, 2, 3, 3.7, 4, 7, 9, 11, 30, 30.2, 1000, 1e5])


@FREEDOM
def test_two_sided_p_matches_scipy(freedom: float) -> None:
    for t in (0.0, 1e-3, 0.1, 0.3, 0.7, 1.0, 2.0, 5.0, 12.0, 50.0, 1e3, 1e6):
        assert two_sided_p(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-9, abs=1e-290)
        assert two_sided_p(-t, freedom) == two_sided_p(t, freedom)
    assert two_sided_p(math.inf, freedom) == 0


@FREEDOM
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_critical_t_matches_scipy(freedom: float, confidence: float) -> None:
    assert critical_t(freedom, confidence) == pytest.approx(stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-9)
