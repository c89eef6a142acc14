"""Recipes: which cast each of the five matrices of a linear layer goes through."""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, get_args

from ..errors import UsageError, require, unknown
from .casts import Cast, refuse_fractions
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

    Another one is made by ``dataclasses.replace``, or from a text by :func:`find_recipe`. Blocks lie along the last
    dimension of each matrix as it is stored; with ``along_sum`` along the dimension that each product sums over, so
    that W is cast transposed for dx, and x and, a second time, g transposed for dW.

    Args:
        name: what it is called.
        forward_input: the cast of the input in the forward product; ``None``: it stays as it is.
        forward_weight: of the weight in the forward product.
        backward_input: of the input in the product that gives the weight's gradient.
        backward_weight: of the weight in the product that gives the input's gradient.
        output_grad: of the output's gradient in both.
        metis: decompose matrices before they are cast; ``None``: cast them as they are.
        along_sum: blocks lie along the dimension that a product sums over.
        hadamard: values along the tokens to a random Hadamard transform, a power of two, of x and g in dW before their
            casts; 0: none.
        keep_first: matrices at the beginning of a model, each with a name of :func:`.known_matrices`, that stay as they
            are when it is converted.
        keep_last: such matrices at its end.
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
        """Refuse what is no cast, numbers that cannot be, and Metis with a rule that has a history: UsageError."""
        for role, cast in self.casts.items():
            if not isinstance(cast, Cast):
                raise UsageError(f"{role} of recipe {self.name!r} is {cast!r}; it must be a Cast, or None.")
        numbers = {name: vars(self)[name] for name in ("hadamard", "keep_first", "keep_last")}
        refuse_fractions(f"recipe {self.name!r}", **numbers)
        if not isinstance(self.along_sum, bool):
            raise UsageError(f"along_sum of recipe {self.name!r} is {self.along_sum!r}; it must be True or False.")
        for name, value in numbers.items():
            require(value >= 0, f"{name} of recipe {self.name!r} is {value}; it must be at least 0.")
        if self.hadamard & (self.hadamard - 1) or (self.hadamard and not self.along_sum):
            raise UsageError(
                f"hadamard of recipe {self.name!r} is {self.hadamard}; it must be a power of two, or 0 for none, and "
                "it needs along_sum=True, since it mixes the values that the product sums over."
            )
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

    def kept(self, layers: Sequence[str]) -> list[str]:
        """Return which of a model's matrices, in its order, are cast: without the first and last ones to keep.

        Raises :class:`UsageError` where none is left.
        """
        found = list(layers[self.keep_first : max(0, len(layers) - self.keep_last)])
        if layers and not found:
            raise UsageError(
                f"Recipe {self.name!r} leaves the first {self.keep_first} and the last {self.keep_last} of "
                f"{len(layers)} matrices as they are, so none is cast; lower keep_first or keep_last."
            )
        return found

    def with_every(self, **options: str | float | None) -> "Recipe":
        """Return the recipe with other options, fields of :class:`Cast`, for all of its casts."""
        changed = {role: replace(cast, **options) for role, cast in self.casts.items()}  # type: ignore[arg-type]
        return replace(self, **changed)  # type: ignore[arg-type]


def uniform(name: str, cast: Cast, output_grad: Cast | None = None, *, along_sum: bool = False) -> Recipe:
    """Return the recipe that casts everything alike, but perhaps the output's gradient."""
    return Recipe(name, cast, cast, cast, cast, output_grad or cast, along_sum=along_sum)


def tiled(name: str, cast: Cast, output_grad: Cast, rows: int, hadamard: int = 0) -> Recipe:
    """Return the recipe with blocks along the sum, and of ``rows`` rows for weights: forward and backward see one."""
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
"""By name. FP8 has the finer format forward and the wider one for gradients, and scales of the tensor itself;
``find_recipe("fp8").with_every(rule="delayed")`` takes them from the tensors before. MXFP4 rounds its scales to even:
of the four MX rules that has the smallest error in e2m1 on Gaussian, Laplace, Student t and log-normal values.
NVFP4 is NVIDIA's (arXiv 2509.25149), which also keeps first and last layers: ``nvfp4,keep_first=1,keep_last=1``.
``fp8_delayed`` has the defaults of Transformer Engine, ``fp8_rowwise`` and ``int8`` are torchao's, and ``fp8_block`` is
that of DeepSeek-V3 (arXiv 2412.19437)."""


def find_recipe(text: str) -> Recipe:
    """Return the recipe called ``text``, or the one that it describes.

    A description is a recipe's name or a cast for all roles, and what single roles have instead: ``role=cast`` or
    ``role=none``, separated by commas; and ``setting=number`` for the recipe's ``SETTINGS``. A cast is ``format/rule``,
    and after further slashes a rounding, ``block=N``, ``q_scalar=X`` or another of its ``OPTIONS``. Raises
    :class:`UsageError` for a part that does not exist, with the nearest name.

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
            changes[name] = number(name, value, SETTINGS[name], f"recipe {text!r}")
        elif name in ROLES:
            changes[name] = None if value == "none" else parse_cast(value)
        else:
            raise unknown("role", name, (*ROLES, *SETTINGS))
    return replace(base, name=text, **changes) if changes else base  # type: ignore[arg-type]


def parse_cast(text: str) -> Cast:
    """Return the cast that ``format/rule[/rounding][/block=N][/q_scalar=X]`` describes."""
    number_format, *parts = text.split("/")
    require(bool(parts), f"The cast {text!r} has no scaling rule; write format/rule, such as e2m1/block.")
    options: dict[str, str | int | float] = {}
    for part in parts[1:]:
        name, _, value = part.partition("=") if "=" in part else ("rounding", "", part)
        if name not in OPTIONS:
            raise unknown("option of a cast", name, OPTIONS)
        refuse_repetition(name, options, text)
        options[name] = number(name, value, OPTIONS[name], f"the cast {text!r}")
    return Cast(number_format, parts[0], **options)  # type: ignore[arg-type]


def number(name: str, value: str, read: Callable[[str], Any], owner: str) -> Any:
    """Return an option as it is read from a text."""
    try:
        return read(value)
    except ValueError as error:
        raise UsageError(f"The {name} of {owner} is {value!r}; it must be a number.") from error


def refuse_repetition(name: str, known: Container[str], text: str) -> None:
    """Raise :class:`UsageError` where a text says a thing twice."""
    require(name not in known, f"{text!r} names {name} twice; say each only once.")


SETTINGS: Mapping[str, Callable[[str], int]] = dict(
    along_sum=lambda text: bool(int(text)), hadamard=int, keep_first=int, keep_last=int
)
"""What a recipe has beside casts and Metis, and how it is read from a text: ``along_sum`` as 1 or 0."""
OPTIONS: Mapping[str, Callable[[str], str | int | float]] = dict(
    rounding=str, block=int, rows=int, q_scalar=float, scale_dtype=str, history=int, margin=int, amax=str
)
"""What a cast has beside format and rule, and how it is read from a text."""
