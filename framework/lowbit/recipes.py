"""Recipes: which cast each of the five matrices of a linear layer goes through."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from framework.errors import UsageError, unknown
from framework.lowbit.casts import Cast
from framework.lowbit.metis import MetisOptions
from framework.lowbit.roles import ROLES, Role


@dataclass(frozen=True)
class Recipe:
    """The casts of a linear layer y = Q_fi(x) Q_fw(W)ᵀ + b, with dx = Q_og(g) Q_bw(W) and dW = Q_og(g)ᵀ Q_bi(x).

    Another one is made by ``dataclasses.replace``, or from a text by :func:`find_recipe`.

    Args:
        name: what it is called.
        forward_input: the cast of the input in the forward product; ``None``: it stays as it is.
        forward_weight: of the weight in the forward product.
        backward_input: of the input in the product that gives the weight's gradient.
        backward_weight: of the weight in the product that gives the input's gradient.
        output_grad: of the output's gradient in both.
        metis: decompose matrices before they are cast; ``None``: cast them as they are.
    """

    name: str
    forward_input: Cast | None = None
    forward_weight: Cast | None = None
    backward_input: Cast | None = None
    backward_weight: Cast | None = None
    output_grad: Cast | None = None
    metis: MetisOptions | None = None

    @property
    def casts(self) -> Mapping[Role, Cast]:
        """The casts by role, without the roles that stay in full precision."""
        every: tuple[Cast | None, ...] = (
            self.forward_input,
            self.forward_weight,
            self.backward_input,
            self.backward_weight,
            self.output_grad,
        )
        return {role: cast for role, cast in zip(ROLES, every, strict=True) if cast is not None}

    @property
    def draws(self) -> bool:
        """Whether random numbers are drawn."""
        decomposes = self.output_grad is not None and self.metis is not None and self.metis.backward
        return decomposes or any(cast.rounding == "stochastic" for cast in self.casts.values())

    def with_every(self, **options: str | float | None) -> "Recipe":
        """Return the recipe with other options, fields of :class:`Cast`, for all of its casts."""
        changed = {role: replace(cast, **options) for role, cast in self.casts.items()}  # type: ignore[arg-type]
        return replace(self, **changed)  # type: ignore[arg-type]


def uniform(name: str, cast: Cast, output_grad: Cast | None = None) -> Recipe:
    """Return the recipe that casts everything alike, but perhaps the output's gradient."""
    return Recipe(name, cast, cast, cast, cast, output_grad or cast)


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32"),
        uniform("fp8", Cast("e4m3", "current"), Cast("e5m2", "current")),
        uniform("fp4_direct", Cast("e2m1", "tensor")),
        uniform("fp4_block", Cast("e2m1", "block")),
        uniform("nvfp4", Cast("e2m1", "nvfp4")),
        uniform("mxfp4", Cast("e2m1", "mx_even")),
        replace(uniform("fp4_metis", Cast("e2m1", "block")), metis=MetisOptions(rank=0.25)),
    )
}
"""By name. FP8 has the finer format forward and the wider one for gradients, and scales of the tensor itself;
``find_recipe("fp8").with_every(rule="delayed")`` takes them from the tensors before. MXFP4 rounds its scales to even:
of the four MX rules that has the smallest error in e2m1 on Gaussian, Laplace, Student t and log-normal values."""


def find_recipe(name: str) -> Recipe:
    """Return the recipe called ``name``; raises :class:`UsageError` with the nearest name."""
    if name not in RECIPES:
        raise unknown("recipe", name, RECIPES)
    return RECIPES[name]


__all__ = ["RECIPES", "Recipe", "UsageError", "find_recipe", "uniform"]
