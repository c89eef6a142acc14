"""Recipes: which cast each of the five matrices of a linear layer goes through."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

from ..errors import UsageError, unknown
from .casts import Cast
from .metis import MetisOptions

Role = Literal["forward_input", "forward_weight", "backward_input", "backward_weight", "output_grad"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Input and weight of y = x Wᵀ; input and weight of the backward products gᵀx and g W; g, the output's gradient."""
FORWARD_ROLES: tuple[Role, ...] = ("forward_input", "forward_weight")
SAME_MATRIX: Mapping[Role, Role] = {"backward_input": "forward_input", "backward_weight": "forward_weight"}
"""The forward role of the matrix that a backward role casts again."""


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

    def __post_init__(self) -> None:
        """Refuse Metis with a rule that has a history: raises :class:`UsageError`."""
        with_history = [role for role, cast in self.casts.items() if cast.scaling_rule.history]
        if self.metis is not None and with_history:
            raise UsageError(
                f"Recipe {self.name!r} casts several matrices as one {with_history[0]} (Metis), so that they have no "
                f"common history; choose a scaling rule other than {self.casts[with_history[0]].rule!r}."
            )

    @cached_property
    def casts(self) -> Mapping[Role, Cast]:
        """The casts by role, without the roles that stay in full precision."""
        return {role: cast for role in ROLES if (cast := vars(self)[role]) is not None}

    @cached_property
    def draws(self) -> bool:
        """Whether random numbers are drawn, forward or backward."""
        decomposes = self.output_grad is not None and self.metis is not None and self.metis.backward
        return decomposes or any(cast.rounding == "stochastic" for cast in self.casts.values())

    @cached_property
    def varies(self) -> bool:
        """Whether the same matrices may be cast otherwise at another forward call."""
        forward = [self.casts[role] for role in FORWARD_ROLES if role in self.casts]
        return any(cast.rounding == "stochastic" or cast.scaling_rule.history for cast in forward)

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


def find_recipe(text: str) -> Recipe:
    """Return the recipe called ``text``, or the one that it describes.

    A description is a recipe's name or a cast for all roles, and what single roles have instead: ``role=cast`` or
    ``role=none``, separated by commas. A cast is ``format/rule``, and after further slashes a rounding, ``block=N``,
    ``q_scalar=X``. Raises :class:`UsageError` for a part that does not exist, with the nearest name.

    >>> find_recipe("e2m1/block,output_grad=e5m2/current/stochastic").output_grad.rounding
    'stochastic'
    >>> find_recipe("nvfp4,forward_input=none").forward_input is None
    True
    """
    first, *rest = [part.strip() for part in text.split(",")]
    if "=" in first.partition("/")[0]:
        first, rest = "fp32", [first, *rest]
    if first not in RECIPES and "/" not in first:
        raise unknown("recipe", first, RECIPES)
    base = RECIPES[first] if first in RECIPES else uniform(first, parse_cast(first))
    changes: dict[str, Cast | None] = {}
    for part in rest:
        role, _, cast = part.partition("=")
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        changes[role] = None if cast == "none" else parse_cast(cast)
    return replace(base, name=text, **changes) if changes else base  # type: ignore[arg-type]


def parse_cast(text: str) -> Cast:
    """Return the cast that ``format/rule[/rounding][/block=N][/q_scalar=X]`` describes."""
    number_format, *parts = text.split("/")
    if not parts:
        raise UsageError(f"The cast {text!r} has no scaling rule; write format/rule, such as e2m1/block.")
    options: dict[str, str | int | float] = {}
    for part in parts[1:]:
        name, _, value = part.partition("=") if "=" in part else ("rounding", "", part)
        if name not in OPTIONS:
            raise unknown("option of a cast", name, OPTIONS)
        try:
            options[name] = OPTIONS[name](value)
        except ValueError as error:
            raise UsageError(f"The {name} of the cast {text!r} is {value!r}; it must be a number.") from error
    return Cast(number_format, parts[0], **options)  # type: ignore[arg-type]


OPTIONS: Mapping[str, Callable[[str], str | int | float]] = {
    "rounding": str,
    "block": int,
    "rows": int,
    "q_scalar": float,
    "scale_dtype": str,
    "history": int,
    "margin": int,
    "amax": str,
}
"""What a cast has beside format and rule, and how it is read from a text."""
