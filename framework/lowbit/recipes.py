"""Recipes: the casts of the five matrices of a linear layer."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from ..errors import UsageError, require, unknown
from .casts import Cast, refuse_fractions
from .metis import MetisOptions

Role = Literal["forward_input", "forward_weight", "backward_input", "backward_weight", "output_grad"]
ROLES: tuple[Role, ...] = get_args(Role)
"""Input and weight of y = x Wᵀ; input and weight of the backward products gᵀx and g W; the output's gradient g."""
FORWARD_ROLES: tuple[Role, ...] = ("forward_input", "forward_weight")
SAME_MATRIX: Mapping[Role, Role] = {"backward_input": "forward_input", "backward_weight": "forward_weight"}
"""The forward role with the same matrix, by backward role."""


@dataclass(frozen=True)
class Recipe:
    """The casts of a linear layer y = Q_fi(x) Q_fw(W)ᵀ + b, with dx = Q_og(g) Q_bw(W) and dW = Q_og(g)ᵀ Q_bi(x).

    Use ``dataclasses.replace`` to modify a recipe, and :func:`find_recipe` to create one from text. Blocks extend along
    the last dimension of each stored matrix. With ``along_sum``, they extend along the dimension that the product sums
    over: W is cast transposed for dx, and x and (a second time) g are cast transposed for dW.

    Args:
        name: the name of the recipe.
        forward_input: the cast of the input in the forward product; ``None``: full precision.
        forward_weight: the cast of the weight in the forward product.
        backward_input: the cast of the input in the product for the weight's gradient.
        backward_weight: the cast of the weight in the product for the input's gradient.
        output_grad: the cast of the output's gradient in both backward products.
        metis: the decomposition of matrices before their casts; ``None``: none.
        along_sum: whether blocks extend along the dimension that a product sums over.
        hadamard: the size, a power of two, of the random Hadamard transform along the tokens, applied to x and g in dW
            before their casts; 0: none.
        keep_first: the number of matrices at the start of a model, in the order of :func:`.castable_matrices`, that are
            not converted.
        keep_last: the number of matrices at its end that are not converted.
    """

    name: str
    forward_input: Cast | None = None
    forward_weight: Cast | None = None
    backward_input: Cast | None = None
    backward_weight: Cast | None = None
    output_grad: Cast | None = None
    metis: MetisOptions | None = None
    along_sum: bool = False
    hadamard: int = 0
    keep_first: int = 0
    keep_last: int = 0

    def __post_init__(self) -> None:
        """Raise :class:`UsageError` for invalid casts or numbers, and for Metis with a rule that has a history."""
        for role, cast in self.casts.items():
            if not isinstance(cast, Cast):
                raise UsageError(f"{role} of recipe {self.name!r} is {cast!r}; it must be a Cast, or None.")
        settings = {name: vars(self)[name] for name in ("hadamard", "keep_first", "keep_last")}
        refuse_fractions(f"recipe {self.name!r}", **settings)
        if not isinstance(self.along_sum, bool):
            raise UsageError(f"along_sum of recipe {self.name!r} is {self.along_sum!r}; it must be True or False.")
        for name, value in settings.items():
            require(value >= 0, f"{name} of recipe {self.name!r} is {value}; it must be at least 0.")
        if self.hadamard & (self.hadamard - 1) or (self.hadamard and not self.along_sum):
            raise UsageError(
                f"hadamard of recipe {self.name!r} is {self.hadamard}; it must be a power of two, or 0 for none, and "
                "it needs along_sum=True, since it mixes the values that the product sums over."
            )
        with_history = [role for role, cast in self.casts.items() if cast.scaling_rule.history]
        if self.metis is not None and with_history:
            raise UsageError(
                f"Recipe {self.name!r} casts {with_history[0]} as several matrices (Metis), which cannot share one "
                f"history; choose a scaling rule other than {self.casts[with_history[0]].rule!r}."
            )

    @cached_property
    def casts(self) -> Mapping[Role, Cast]:
        """The casts by role; roles in full precision are omitted."""
        return {role: cast for role in ROLES if (cast := vars(self)[role]) is not None}

    @cached_property
    def draws(self) -> bool:
        """Whether the forward or backward pass draws random numbers."""
        decomposes = self.output_grad is not None and self.metis is not None and self.metis.backward
        return decomposes or any(cast.rounding == "stochastic" for cast in self.casts.values())

    @cached_property
    def varies(self) -> bool:
        """Whether forward casts of equal matrices can differ between calls."""
        forward = [self.casts[role] for role in FORWARD_ROLES if role in self.casts]
        return any(cast.rounding == "stochastic" or cast.scaling_rule.history for cast in forward)

    def layers_to_cast(self, layers: Sequence[str]) -> list[str]:
        """Return the matrices to cast, in the order of the model: all except the first and last ones to keep.

        Raises :class:`UsageError` if none is left.
        """
        chosen = list(layers[self.keep_first : max(0, len(layers) - self.keep_last)])
        if layers and not chosen:
            raise UsageError(
                f"Recipe {self.name!r} keeps the first {self.keep_first} and the last {self.keep_last} of "
                f"{len(layers)} matrices in full precision, so none is cast; lower keep_first or keep_last."
            )
        return chosen

    def with_every(self, **options: str | float | None) -> "Recipe":
        """Return the recipe with other options (fields of :class:`Cast`) in all of its casts."""
        changed = {role: replace(cast, **options) for role, cast in self.casts.items()}  # type: ignore[arg-type]
        return replace(self, **changed)  # type: ignore[arg-type]


def uniform(name: str, cast: Cast, output_grad: Cast | None = None, *, along_sum: bool = False) -> Recipe:
    """Return a recipe with one cast for all roles, except for a given ``output_grad``."""
    return Recipe(name, cast, cast, cast, cast, output_grad or cast, along_sum=along_sum)


def tiled(name: str, cast: Cast, output_grad: Cast, rows: int, hadamard: int = 0) -> Recipe:
    """Return a recipe with blocks along the sum.

    Blocks of weights have ``rows`` rows, as many as columns, so forward and backward passes use equal cast weights.
    """
    weight = replace(cast, rows=rows)
    return Recipe(name, cast, weight, cast, weight, output_grad, along_sum=True, hadamard=hadamard)


FP8_BLOCK = Cast("e4m3", "block", block=128, scale_dtype="e8m0")

RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32"),
        uniform("fp8", Cast("e4m3", "current"), Cast("e5m2", "current")),
        uniform("fp4_direct", Cast("e2m1", "tensor")),
        uniform("fp4_block", Cast("e2m1", "block")),
        tiled("nvfp4", Cast("e2m1", "nvfp4"), Cast("e2m1", "nvfp4", "stochastic"), rows=16, hadamard=16),
        uniform("mxfp4", Cast("e2m1", "mx_even")),
        replace(uniform("fp4_metis", Cast("e2m1", "block")), metis=MetisOptions(rank=0.25)),
        uniform("fp8_delayed", Cast("e4m3", "delayed", history=1024), Cast("e5m2", "delayed", history=1024)),
        uniform("fp8_rowwise", Cast("e4m3", "row", scale_dtype="e8m0"), along_sum=True),
        tiled("fp8_block", FP8_BLOCK, FP8_BLOCK, rows=128),
        uniform("int8", Cast("int8", "row"), along_sum=True),
    )
}
"""Recipes by name.

FP8 uses the finer format forward, the wider one for gradients, and current scaling;
``find_recipe("fp8").with_every(rule="delayed")`` uses delayed scaling. MXFP4 rounds its scales to even: of the four MX
rules this one has the smallest error in e2m1 on Gaussian, Laplace, Student t and log-normal values. NVFP4 follows
NVIDIA (arXiv 2509.25149), which also keeps first and last layers: ``nvfp4,keep_first=1,keep_last=1``. ``fp8_delayed``
has the defaults of Transformer Engine, ``fp8_rowwise`` and ``int8`` follow torchao, and ``fp8_block`` follows
DeepSeek-V3 (arXiv 2412.19437)."""


def find_recipe(text: str) -> Recipe:
    """Return the recipe with the name ``text``, or the recipe that ``text`` describes.

    A description starts with a recipe's name, or with a cast for all roles. Changes follow, separated by commas:
    ``role=cast`` or ``role=none`` for single roles, and ``setting=number`` for the ``SETTINGS`` of the recipe. A cast
    is ``format/rule``, optionally with further slashes and a rounding, ``block=N``, ``q_scalar=X`` or another of its
    ``OPTIONS``. Raises :class:`UsageError` for unknown parts, with the nearest name.

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
    changes: dict[str, Any] = {}
    for part in rest:
        name, _, value = part.partition("=")
        refuse_repetition(name, changes, text)
        if name in SETTINGS:
            changes[name] = parse_number(name, value, SETTINGS[name], f"recipe {text!r}")
        elif name in ROLES:
            changes[name] = None if value == "none" else parse_cast(value)
        else:
            raise unknown("role", name, (*ROLES, *SETTINGS))
    return replace(base, name=text, **changes) if changes else base  # type: ignore[arg-type]


def parse_cast(text: str) -> Cast:
    """Return the cast of a text ``format/rule[/rounding][/block=N][/q_scalar=X]``."""
    number_format, *parts = text.split("/")
    require(bool(parts), f"The cast {text!r} has no scaling rule; write format/rule, such as e2m1/block.")
    options: dict[str, str | int | float] = {}
    for part in parts[1:]:
        name, _, value = part.partition("=") if "=" in part else ("rounding", "", part)
        if name not in OPTIONS:
            raise unknown("option of a cast", name, OPTIONS)
        refuse_repetition(name, options, text)
        options[name] = parse_number(name, value, OPTIONS[name], f"the cast {text!r}")
    return Cast(number_format, parts[0], **options)  # type: ignore[arg-type]


def parse_number(name: str, value: str, parse: Callable[[str], Any], owner: str) -> Any:
    """Parse the value of an option; raises :class:`UsageError` if it is not a number."""
    try:
        return parse(value)
    except ValueError as error:
        raise UsageError(f"The {name} of {owner} is {value!r}; it must be a number.") from error


def refuse_repetition(name: str, earlier_names: Container[str], text: str) -> None:
    """Raise :class:`UsageError` if a text contains a name twice."""
    require(name not in earlier_names, f"{text!r} names {name} twice; give each name only once.")


def parse_switch(text: str) -> bool:
    """Return whether a text is a number other than 0."""
    return bool(int(text))


SETTINGS: Mapping[str, Callable[[str], int]] = dict(along_sum=parse_switch, hadamard=int, keep_first=int, keep_last=int)
"""Settings of a recipe other than casts and Metis, with their parsers; ``along_sum`` is 1 or 0."""
OPTIONS: Mapping[str, Callable[[str], str | int | float]] = dict(
    rounding=str, block=int, rows=int, q_scalar=float, scale_dtype=str, history=int, margin=int, amax=str
)
"""Options of a cast other than format and rule, with their parsers."""
