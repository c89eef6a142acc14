"""The jackknife: the error of an estimate from what it would be without one of its draws."""

from torch import Tensor


def jackknife_variance(left_out: Tensor) -> Tensor:
    """Return (K−1)/K·Σ(e₋ᵢ − ē)², e₋ᵢ the K ≥ 2 estimates without draw i, ē their mean (Efron and Stein 1981).

    The draws are the first dimension. For a mean over draws it is s²/K.
    """
    variance: Tensor = left_out.var(dim=0, correction=0) * (len(left_out) - 1)
    return variance
