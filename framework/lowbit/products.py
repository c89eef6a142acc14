"""Modules that multiply by parameters of their own, without a layer for each: experts, attention, Conv1D."""

import math
import re
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from ..errors import RunNotice
from ..state import Transient
from .linear import BitLinear, between_graphs, equip
from .recipes import Recipe

SUFFIX = "_casts"  # of the name of the module that holds the casts, after the parameter's
SAME_MATRIX = frozenset([
    *("__getitem__", "__get__", "chunk", "index_select", "narrow", "select", "split", "split_with_sizes", "unbind"),
    *("adjoint", "movedim", "permute", "swapaxes", "t", "transpose", "expand", "flatten", "reshape", "squeeze"),
    *("unsqueeze", "view", "view_as", "bfloat16", "clone", "contiguous", "detach", "double", "float", "half", "to"),
    *("type", "type_as", "tensor_split"),
])  # fmt: skip
"""Functions that return a matrix, or some of several, as it is, in another shape or type."""
OPERANDS = {
    "linear": ("input", "weight", "bias"),
    "matmul": ("input", "other"),
    "mm": ("input", "mat2"),
    "bmm": ("input", "mat2"),
    "addmm": ("input", "mat1", "mat2"),
    "baddbmm": ("input", "batch1", "batch2"),
    "grouped_mm": ("mat_a", "mat_b", "offs"),
    "einsum": ("equation", "one", "other"),
}
"""Products that are cast, with their operands in order; without further ones, such as the alpha of ``addmm``."""


class Told(Transient):
    """The functions that somebody was told of."""

    def __init__(self) -> None:
        self.names: set[str] = set()


class ProductCasts(BitLinear):
    """The casts of the products by one parameter, which belongs to the module that holds this one: no weight here.

    Counters of casts and the training state know it as they know a low-bit layer.
    """

    told: Told

    def extra_repr(self) -> str:
        """Return the recipe's name; which way round the matrix lies, only the products know."""
        return f"recipe={self.recipe.name!r}"


class CastsProducts(nn.Module):
    """A module whose products by parameters of its own are cast; a base of the class that it is given.

    In its forward pass the products of ``OPERANDS`` are cast where one operand is such a parameter, a part of it such
    as ``w[expert]``, or a view. Of several matrices each is cast by itself, in blocks along the dimension that the
    product sums over. What else is done with them is told once, and left as it is.
    """

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return what the module returns, from products of narrow matrices."""
        run = _between_graphs if "torch._dynamo" in sys.modules else _run
        return run(self, inputs, options)


def _run(module: CastsProducts, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    with Products(module):
        return super(CastsProducts, module).forward(*inputs, **options)


_between_graphs = between_graphs(_run)


@cache
def casting(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class of which a module of class ``plain`` becomes one; it bears the same name."""
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (CastsProducts, plain), names)


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module has, or had before its products were cast."""
    return type(module).__mro__[2] if isinstance(module, CastsProducts) else type(module)


def matrix_of(module: nn.Module, key: str) -> nn.Parameter:
    """Return the parameter of a module called ``key``, or the weight of its child of that name."""
    child = module._modules.get(key)
    return module.get_parameter(key if child is None else f"{key}.weight")


def cast_products(module: nn.Module, key: str, recipe: Recipe, generator: torch.Generator) -> None:
    """Cast the products of a module by one of its parameters, from now on."""
    if not isinstance(module, CastsProducts):
        module.__class__ = casting(type(module))  # type: ignore[arg-type]  # optimizers, ties and hooks go on holding the same object
    layer = nn.Linear(1, 1, bias=False, device="meta")  # which draws nothing
    layer.weight = nn.Parameter(matrix_of(module, key).detach().new_empty(0, 0))
    equip(layer, recipe, generator, may_split=False)
    layer.register_parameter("weight", None)
    layer.__class__ = ProductCasts
    assert isinstance(layer, ProductCasts)
    layer.told = Told()
    module.add_module(key + SUFFIX, layer.train(module.training))


def products_of(module: nn.Module) -> dict[str, ProductCasts]:
    """Return the casts of a module's products, by the names that they have in it."""
    return {name: child for name, child in module.named_children() if isinstance(child, ProductCasts)}


def leave_products(module: CastsProducts) -> None:
    """Make it a module again that multiplies in full precision."""
    for name in products_of(module):
        delattr(module, name)
    module.__class__ = plain_class(module)  # type: ignore[assignment]


class Products(TorchFunctionMode):
    """Casts the products by a module's parameters in the body (``with Products(module):``)."""

    def __init__(self, module: CastsProducts) -> None:
        super().__init__()
        held = {name.removesuffix(SUFFIX): casts for name, casts in products_of(module).items() if casts.recipe.casts}
        self._names = {id(casts): f"{key!r} of {type(module).__name__}" for key, casts in held.items()}
        found = [(matrix_of(module, key), casts) for key, casts in held.items()]
        # By identity, which nothing else can have while the tensor is held here.
        self._known: dict[int, tuple[Tensor, ProductCasts]] = {id(pair[0]): pair for pair in found}
        self._uses: Counter[int] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options, name = options or {}, getattr(function, "__name__", "")
        if function is functional.multi_head_attention_forward:
            with self:
                return _attention(*arguments, **options)
        used = [casts for each in tree_iter((arguments, options)) if (casts := self._casts(each))]
        if not used:
            return function(*arguments, **options)
        product = self._product(name, arguments, options) if len(used) == 1 else None
        if product is not None:
            return product
        result = function(*arguments, **options)
        parts = [each for each in tree_iter(result) if isinstance(each, Tensor) and each.is_floating_point()]
        if name in SAME_MATRIX and self._casts(arguments[0]):
            self._known |= {id(part): (part, used[0]) for part in parts}
        elif parts and name not in used[0].told.names:
            used[0].told.names.add(name)
            warnings.warn(
                f"{self._names[id(used[0])]} is used by {name}, of which nothing is cast; products that are: "
                f"{', '.join(OPERANDS)}.",
                RunNotice,
                stacklevel=2,
            )
        return result

    def _casts(self, operand: Any) -> ProductCasts | None:
        return self._known[id(operand)][1] if id(operand) in self._known else None

    def _product(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Tensor | None:
        """Return the product that a function would make, cast; ``None`` if it makes none that can be."""
        name = name.strip("_").removesuffix("_fallback")  # __matmul__, torch._grouped_mm, that of transformers
        order = OPERANDS.get(name, ())
        named = {key: value for key, value in options.items() if value is not None}
        if not order or not named.keys() <= {*order} or len(arguments) + len(named) > len(order):
            return None
        operands = [*arguments, *(named[key] for key in order if key in named)]
        if name == "linear":
            x, weight, *bias = operands
            return self._by(x, weight, *bias)
        if name == "einsum":
            return self._einsum(*tree_iter(operands))
        if name == "grouped_mm":
            return self._grouped(*operands)
        *bias, left, right = operands
        if self._casts(right):
            return self._by(left, right, *bias, transposed=True)
        if bias or right.ndim < 2:
            return None if bias else self._by(right, left)
        found = self._by(right.mT, left)
        return None if found is None else found.mT

    def _by(self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> Tensor | None:
        """Return x Wᵀ + b with the casts, x (..., tokens, in), W (..., out, in); transposed: (..., in, out).

        Of several matrices each is cast by itself, with its part of x.
        """
        casts = self._casts(weight)
        if weight.ndim < 2 or casts is None or (weight.ndim > 2 and x.ndim < 2):
            return None
        matrix = weight.mT if transposed else weight
        if matrix.ndim == 2 and (bias is None or bias.ndim == 1):
            return self._once(casts, x, matrix, bias)
        batch = torch.broadcast_shapes(x.shape[:-2], matrix.shape[:-2])  # type: ignore[no-untyped-call]
        xs = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        matrices = matrix.expand(*batch, *matrix.shape[-2:]).reshape(-1, *matrix.shape[-2:])
        if not len(xs):
            return None
        each = [self._once(casts, one, other) for one, other in zip(xs, matrices, strict=True)]
        found = torch.stack(each).reshape(*batch, *each[0].shape)
        return found if bias is None else found + bias.to(found.dtype)

    def _once(self, casts: ProductCasts, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        self._uses[id(casts)] += 1
        return casts.product(x, matrix, bias, str(self._uses[id(casts)]))

    def _grouped(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor | None:
        """Multiply the rows of each group, which end where ``ends`` says, by the group's matrix (in, out)."""
        casts = self._casts(weight)
        if casts is None or ends is None or x.ndim != 2 or weight.ndim != 3:
            return None
        lengths = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        *groups, rest = torch.split_with_sizes(x, [*lengths, len(x) - sum(lengths)])
        parts = [self._once(casts, rows, matrix.mT) for rows, matrix in zip(groups, weight, strict=True)]
        return torch.cat([*parts, parts[0].new_zeros(len(rest), weight.shape[-1])])

    def _einsum(self, equation: str, *operands: Tensor) -> Tensor | None:
        """Make the sum of two operands the product of two (batches of) matrices."""
        sides = re.fullmatch("([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation.replace(" ", ""))
        if sides is None or len(operands) != 2 or any(len({*side}) < len(side) for side in sides.groups()):
            return None
        (x, of_x), (weight, of_weight) = zip(operands, sides.groups(), strict=False)
        if self._casts(x):
            (x, of_x), (weight, of_weight) = (weight, of_weight), (x, of_x)
        out, casts = sides[3], self._casts(weight)
        shared, summed = ([c for c in of_x if c in of_weight and (c in out) is kept] for kept in (True, False))
        rows, columns = ([c for c in own if c not in other] for own, other in ((of_x, of_weight), (of_weight, of_x)))
        if not summed or not {*rows, *columns} <= {*out} or casts is None:
            return None
        sizes = dict(zip(of_x, x.shape, strict=True)) | dict(zip(of_weight, weight.shape, strict=True))
        batch, over = [sizes[c] for c in shared], math.prod(sizes[c] for c in summed)
        left = torch.permute(x, [of_x.index(c) for c in shared + rows + summed])
        left = left.reshape(*batch, math.prod(sizes[c] for c in rows), over)
        right = torch.permute(weight, [of_weight.index(c) for c in shared + columns + summed])
        right = right.reshape(*batch, math.prod(sizes[c] for c in columns), over)
        self._known[id(right)] = right, casts
        found = self._by(left, right)
        letters = shared + rows + columns
        if found is None:
            return None
        return torch.permute(found.reshape([sizes[c] for c in letters]), [letters.index(c) for c in out])


_attention = FunctionType(
    # Its first line would hand it over to the mode again, which could not see the products within.
    functional.multi_head_attention_forward.__code__,
    vars(functional) | {"has_torch_function": lambda operands: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
"""torch's own attention, of which a mode sees the products."""
