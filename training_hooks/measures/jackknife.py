"""The jackknife: the error of an estimate from the estimates that leave out one draw each."""

from torch import Tensor


def jackknife_variance(left_out: Tensor) -> Tensor:
    """Return (K−1)/K·Σ(e₋ᵢ − ē)², e₋ᵢ the K ≥ 2 estimates without draw i, ē their mean (Efron and Stein 1981).

    The first dimension of ``left_out`` is K. For a mean over draws the result is s²/K.
    """
    # The variance with divisor K is Σ(e₋ᵢ − ē)²/K; times K − 1 it is (K−1)/K·Σ(e₋ᵢ − ē)².
    variance: Tensor = left_out.var(dim=0, correction=0) * (len(left_out) - 1)
    return variance
