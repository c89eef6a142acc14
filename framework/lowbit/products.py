"""Casts for modules that multiply by their parameters directly, without linear layers: experts, attention, Conv1D."""

import math
import re
import sys
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

from ..errors import RunNotice, warn
from ..state import Transient
from .linear import BitLinear, make_bit_linear, run_between_graphs
from .recipes import Recipe

SUFFIX = "_casts"  # the module with the casts of a parameter has the parameter's name with this suffix
MATRIX_PRESERVING = frozenset([
    *("__getitem__", "__get__", "chunk", "index_select", "narrow", "select", "split", "split_with_sizes", "unbind"),
    *("adjoint", "movedim", "permute", "swapaxes", "t", "transpose", "expand", "flatten", "reshape", "squeeze"),
    *("unsqueeze", "view", "view_as", "bfloat16", "clone", "contiguous", "detach", "double", "float", "half", "to"),
    *("type", "type_as", "tensor_split"),
])  # fmt: skip
"""Functions that return a matrix, or some of several matrices, unchanged except for shape and dtype."""
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
"""Products that are cast, with their operands in order. Calls with other arguments, such as ``alpha``, are not cast."""


class ReportedFunctions(Transient):
    """The names of functions that a notice has already reported."""

    def __init__(self) -> None:
        self.names: set[str] = set()


class ParameterCasts(BitLinear):
    """The casts of the products by one parameter, which belongs to the parent module: this module has no weight.

    Counters of casts and the training state treat it like a low-bit layer.
    """

    reported: ReportedFunctions

    def extra_repr(self) -> str:
        """Return the recipe's name; there is no shape, since each product determines the orientation of the matrix."""
        return f"recipe={self.recipe.name!r}"


class CastingModule(nn.Module):
    """Base class of modules whose matrix products with their own parameters are cast to low precision.

    In the forward pass, the products of ``OPERANDS`` are cast if one operand is such a parameter, a part of it such as
    ``w[expert]``, or a view. Several matrices in a parameter are cast separately, in blocks along the summed dimension.
    Any other operation on these parameters is not cast and causes one warning.
    """

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Return the output of the original forward pass, with cast products."""
        run = _run_between_graphs if "torch._dynamo" in sys.modules else _run
        return run(self, inputs, options)


def _run(module: CastingModule, inputs: Sequence[Any], options: dict[str, Any]) -> Any:
    with CastingMode(module):
        return super(CastingModule, module).forward(*inputs, **options)


_run_between_graphs = run_between_graphs(_run)


@cache
def casting_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class with cast products for a module of class ``plain``; it has the same name."""
    names = {"__module__": plain.__module__, "__qualname__": plain.__qualname__, "__doc__": plain.__doc__}
    return type(plain.__name__, (CastingModule, plain), names)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a module, without that of :func:`casting_class`."""
    return type(module).__mro__[2] if isinstance(module, CastingModule) else type(module)


def matrix_of(module: nn.Module, key: str) -> nn.Parameter:
    """Return the parameter ``key`` of a module, or the weight of its child with that name."""
    child = module._modules.get(key)
    return module.get_parameter(key if child is None else f"{key}.weight")


def convert_products(module: nn.Module, key: str, recipe: Recipe, generator: torch.Generator) -> None:
    """Convert a module in place, so that it casts its products by one of its parameters."""
    if not isinstance(module, CastingModule):
        # The object stays the same, so optimizers, ties and hooks keep their references to it.
        module.__class__ = casting_class(type(module))  # type: ignore[arg-type]
    layer = nn.Linear(1, 1, bias=False, device="meta")  # on this device, its initialisation draws no random numbers
    # Without elements: only the device of the weight is read, for the buffers.
    layer.weight = nn.Parameter(matrix_of(module, key).detach().new_empty(0, 0))
    make_bit_linear(layer, recipe, generator, may_split=False)
    layer.register_parameter("weight", None)
    layer.__class__ = ParameterCasts
    assert isinstance(layer, ParameterCasts)
    layer.reported = ReportedFunctions()
    module.add_module(key + SUFFIX, layer.train(module.training))


def casts_of_parameters(module: nn.Module) -> dict[str, ParameterCasts]:
    """Return the casts of a module's products, by child name."""
    return {name: child for name, child in module.named_children() if isinstance(child, ParameterCasts)}


def restore_products(module: CastingModule) -> None:
    """Restore the module's original class, which multiplies in full precision."""
    for name in casts_of_parameters(module):
        delattr(module, name)
    module.__class__ = original_class(module)  # type: ignore[assignment]


class CastingMode(TorchFunctionMode):
    """Context manager that casts the products by a module's parameters (``with CastingMode(module):``)."""

    def __init__(self, module: CastingModule) -> None:
        super().__init__()
        casts_by_key = {
            name.removesuffix(SUFFIX): casts
            for name, casts in casts_of_parameters(module).items()
            if casts.recipe.casts
        }
        self._names = {id(casts): f"{key!r} of {type(module).__name__}" for key, casts in casts_by_key.items()}
        pairs = [(matrix_of(module, key), casts) for key, casts in casts_by_key.items()]
        # By id(), which is unique while the value keeps a reference to the tensor.
        self._matrices: dict[int, tuple[Tensor, ParameterCasts]] = {id(pair[0]): pair for pair in pairs}
        self._uses: Counter[int] = Counter()

    def __torch_function__(
        self, function: Any, types: Any, arguments: Sequence[Any] = (), options: dict[str, Any] | None = None
    ) -> Any:
        options, name = options or {}, getattr(function, "__name__", "")
        if function is functional.multi_head_attention_forward:
            with self:
                return _attention(*arguments, **options)
        used = [casts for leaf in tree_iter((arguments, options)) if (casts := self._casts(leaf))]
        if not used:
            return function(*arguments, **options)
        product = self._product(name, arguments, options) if len(used) == 1 else None
        if product is not None:
            return product
        result = function(*arguments, **options)
        parts = [leaf for leaf in tree_iter(result) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        if name in MATRIX_PRESERVING and self._casts(arguments[0]):
            self._matrices |= {id(part): (part, used[0]) for part in parts}
        elif parts and name not in used[0].reported.names:
            used[0].reported.names.add(name)
            warn(
                f"{self._names[id(used[0])]} is used by {name}, which is not cast; products that are cast: "
                f"{', '.join(OPERANDS)}.",
                RunNotice,
                stacklevel=2,
            )
        return result

    def _casts(self, operand: Any) -> ParameterCasts | None:
        return self._matrices[id(operand)][1] if id(operand) in self._matrices else None

    def _product(self, name: str, arguments: Sequence[Any], options: dict[str, Any]) -> Tensor | None:
        """Return the cast product in place of a function's result; ``None`` if it cannot be cast."""
        name = name.strip("_").removesuffix("_fallback")  # __matmul__, torch._grouped_mm, and the one of transformers
        order = OPERANDS.get(name, ())
        named = {key: value for key, value in options.items() if value is not None}
        if not order or not named.keys() <= {*order} or len(arguments) + len(named) > len(order):
            return None
        operands = [*arguments, *(named[key] for key in order if key in named)]
        if name == "linear":
            x, weight, *bias = operands
            return self._product_by(x, weight, *bias)
        if name == "einsum":
            return self._einsum(*tree_iter(operands))
        if name == "grouped_mm":
            return self._grouped(*operands)
        *bias, left, right = operands
        if self._casts(right):
            return self._product_by(left, right, *bias, transposed=True)
        if bias or right.ndim < 2:
            return None if bias else self._product_by(right, left)
        product = self._product_by(right.mT, left)  # W·X = (Xᵀ·Wᵀ)ᵀ
        return None if product is None else product.mT

    def _product_by(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False
    ) -> Tensor | None:
        """Return x Wᵀ + b with the casts, x (..., tokens, in), W (..., out, in); transposed: (..., in, out).

        Several matrices are cast separately, each with its part of x.
        """
        casts = self._casts(weight)
        if weight.ndim < 2 or casts is None or (weight.ndim > 2 and x.ndim < 2):
            return None
        matrix = weight.mT if transposed else weight
        if matrix.ndim == 2 and (bias is None or bias.ndim == 1):
            return self._single_product(casts, x, matrix, bias)
        batch = torch.broadcast_shapes(x.shape[:-2], matrix.shape[:-2])  # type: ignore[no-untyped-call]
        xs = x.expand(*batch, *x.shape[-2:]).reshape(-1, *x.shape[-2:])
        matrices = matrix.expand(*batch, *matrix.shape[-2:]).reshape(-1, *matrix.shape[-2:])
        if not len(xs):
            return None
        products = [self._single_product(casts, part, factor) for part, factor in zip(xs, matrices, strict=True)]
        stacked = torch.stack(products).reshape(*batch, *products[0].shape)
        return stacked if bias is None else stacked + bias.to(stacked.dtype)

    def _single_product(self, casts: ParameterCasts, x: Tensor, matrix: Tensor, bias: Tensor | None = None) -> Tensor:
        self._uses[id(casts)] += 1
        return casts.product(x, matrix, bias, str(self._uses[id(casts)]))

    def _grouped(self, x: Tensor, weight: Tensor, ends: Tensor | None = None) -> Tensor | None:
        """Multiply the rows of each group, up to its entry of ``ends``, by the group's matrix (in, out)."""
        casts = self._casts(weight)
        if casts is None or ends is None or x.ndim != 2 or weight.ndim != 3:
            return None
        # y[rows of group k] = x[rows of group k] · W[k], x (tokens, in), W (groups, in, out); further rows: 0.
        lengths = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
        *groups, rest = torch.split_with_sizes(x, [*lengths, len(x) - sum(lengths)])
        parts = [self._single_product(casts, rows, matrix.mT) for rows, matrix in zip(groups, weight, strict=True)]
        return torch.cat([*parts, parts[0].new_zeros(len(rest), weight.shape[-1])])

    def _einsum(self, equation: str, *operands: Tensor) -> Tensor | None:
        """Compute an einsum of two operands as a product of two (batches of) matrices."""
        sides = re.fullmatch("([a-zA-Z]+),([a-zA-Z]+)->([a-zA-Z]+)", equation.replace(" ", ""))
        if sides is None or len(operands) != 2 or any(len({*side}) < len(side) for side in sides.groups()):
            return None
        (x, x_letters), (weight, weight_letters) = zip(operands, sides.groups(), strict=False)
        if self._casts(x):
            (x, x_letters), (weight, weight_letters) = (weight, weight_letters), (x, x_letters)
        out, casts = sides[3], self._casts(weight)
        # out[shared, rows, columns] = Σ over summed of x[shared, rows, summed] · weight[shared, columns, summed]
        shared, summed = (
            [c for c in x_letters if c in weight_letters and (c in out) is in_output] for in_output in (True, False)
        )
        rows, columns = (
            [c for c in letters if c not in others]
            for letters, others in ((x_letters, weight_letters), (weight_letters, x_letters))
        )
        if not summed or not {*rows, *columns} <= {*out} or casts is None:
            return None
        sizes = dict(zip(x_letters, x.shape, strict=True)) | dict(zip(weight_letters, weight.shape, strict=True))
        batch, sum_length = [sizes[c] for c in shared], math.prod(sizes[c] for c in summed)
        left = torch.permute(x, [x_letters.index(c) for c in shared + rows + summed])
        left = left.reshape(*batch, math.prod(sizes[c] for c in rows), sum_length)
        right = torch.permute(weight, [weight_letters.index(c) for c in shared + columns + summed])
        right = right.reshape(*batch, math.prod(sizes[c] for c in columns), sum_length)
        self._matrices[id(right)] = right, casts
        product = self._product_by(left, right)
        product_letters = shared + rows + columns
        if product is None:
            return None
        return torch.permute(
            product.reshape([sizes[c] for c in product_letters]), [product_letters.index(c) for c in out]
        )


_attention = FunctionType(
    # The first line of the original function calls the mode again, which would then not see the products inside.
    functional.multi_head_attention_forward.__code__,
    vars(functional) | {"has_torch_function": lambda operands: False},
    argdefs=functional.multi_head_attention_forward.__defaults__,
)
"""torch's attention function, changed so that a ``TorchFunctionMode`` sees its products."""
