"""The choice between exact Hessian-vector products and finite differences."""

from typing import Literal, get_args

from loopscope.data import Batch
from loopscope.errors import UnsuitableError
from loopscope.hooks import ModelDataContext
from loopscope.training import Method

from ..measures import notice

Choice = Literal["auto", "exact", "finite_difference"]
Chosen = Method | Literal[""]
"""The method that was chosen; empty before the choice."""
CHOICES: tuple[str, ...] = get_args(Choice)
EXACT_PRODUCTS = """
    exact_products | 1: H v by automatic differentiation; 0: by central finite differences | {0, 1}
        | 0 with ``method="auto"``: exact products fail or are wrong for this model or loss; a notice gives the reason.
"""


def choose_method(
    hook: str, choice: Choice, epsilon: float, model_ctx: ModelDataContext, batch: Batch | None = None
) -> Method:
    """Return the method for Hessian-vector products, after a check of exact ones on a batch.

    With ``"auto"``, finite differences replace exact products that fail or are wrong, with a notice.

    Raises:
        UnsuitableError: ``choice`` is ``"exact"``, and exact products fail or are wrong.
    """
    if choice == "finite_difference":
        return choice
    problem = model_ctx.find_hessian_problem(batch, epsilon=epsilon)
    if not problem:
        return "exact"
    if choice == "exact":
        raise UnsuitableError(
            f"Hook {hook!r} has method='exact', but {problem}; set {hook}.method to 'auto' or 'finite_difference'."
        )
    notice(f"Hook {hook!r} measures curvature by finite differences of step {epsilon:g}, since {problem}.")
    return "finite_difference"
