import pytest
from loopscope.training_hooks.measures.student_t import central_probability, critical_value
from scipy import stats


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 11, 30])
@pytest.mark.parametrize("t", [0.0, 0.3, 2.0, 12.0])
def test_the_central_probability_is_scipys(freedom, t):
    assert central_probability(t, freedom) == pytest.approx(2 * stats.t.cdf(t, freedom) - 1, abs=1e-12)


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 7, 11, 30])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
def test_the_critical_value_is_scipys(freedom, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert critical_value(confidence, freedom) == pytest.approx(expected, rel=1e-9)
