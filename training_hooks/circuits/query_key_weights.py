"""The weights that produce the queries and keys of attention layers, and their scaling by head."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from loopscope.errors import UnsuitableError, listed
from loopscope.hooks import AttentionCall
from loopscope.tensors import replicated_like
from torch import Tensor, nn

from .attention_layers import FUSED, GROUPED, LATENT, PAIRED, SEPARATE, is_projection

TOLERANCE = 0.02
"""Relative spread of ‖query‖/‖projection‖ over tokens and heads at which both still count as proportional, for bf16."""
NORM = re.compile(
    r"(q|k|qk|query|key)_?(norm|layer_?norm|ln|rms_?norm)|(norm|ln|layer_?norm|rms_?norm)_?(q|k|qk|query|key)",
    re.IGNORECASE,
)
"""Names of modules that normalise queries or keys after their projection."""


@dataclass(frozen=True)
class ScaledRows:
    """Rows of one projection that are multiplied by a power of a head's factor."""

    projection: str
    """Name of the projection in the attention module; empty for the parameters of an ``nn.MultiheadAttention``."""
    rows: Tensor
    """Indices of each head's outputs of the projection, shape (heads, rows)."""
    power: float
    subject: str
    """``"query"`` or ``"key"``: what the rows produce."""
    places: tuple[int, int | None] = (0, None)
    """The first dimension of the query or key that these rows produce, and the one after the last."""


@dataclass(frozen=True)
class QueryKeyLayer:
    """One attention module whose queries and keys can be scaled.

    Args:
        name: name of the module in the model.
        module: the module.
        kind: ``multihead`` (``nn.MultiheadAttention``), ``latent`` (MLA), ``separate``, ``paired`` or ``fused``.
        projections: names in the module of the projections to queries and keys, or of the fused one.
    """

    name: str
    module: nn.Module
    kind: str
    projections: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, module: nn.Module) -> "QueryKeyLayer | None":
        """Return the layer, or ``None`` for a module without known projections."""
        if isinstance(module, nn.MultiheadAttention):
            return cls(name, module, "multihead")
        linear = {part.lower(): part for part, child in module.named_modules() if is_projection(child)}
        choices: Iterator[tuple[str, Sequence[str]]] = (
            (kind, names)
            for kind, table in (
                ("latent", LATENT),
                ("separate", [names[:2] for names in SEPARATE]),
                ("paired", PAIRED),
                ("fused", [(fused,) for fused in FUSED]),
            )
            for names in table
        )
        for kind, names in choices:
            if linear.keys() >= set(names):
                return cls(name, module, kind, tuple(linear[part] for part in names))
        return None

    def check(self, hook: str) -> None:
        """Raise :class:`UnsuitableError` if scaling the weights would not scale the scores."""
        norms = [part for part, _ in self.module.named_modules() if NORM.fullmatch(part.rpartition(".")[2])]
        if norms:
            raise UnsuitableError(
                f"Hook {hook!r} scales the weights of queries and keys, but {self.name} normalises both afterwards "
                f"({listed(norms, 2)}: QK-norm), so scaling has no effect; leave the hook out: QK-norm bounds the "
                "logits."
            )
        computed = [name for name in self.weight_names() if name not in dict(self.module.named_parameters())]
        if computed:
            raise UnsuitableError(
                f"Hook {hook!r} cannot scale {self.name}.{computed[0]}, which is computed from other parameters."
            )

    def weight_names(self) -> list[str]:
        """Return the names in the module of the weights of queries and keys."""
        if self.kind != "multihead":
            return [f"{part}.weight" for part in self.projections]
        fused = self.module._parameters.get("in_proj_weight") is not None
        return ["in_proj_weight"] if fused else ["q_proj_weight", "k_proj_weight"]

    def is_inside(self, other: "QueryKeyLayer") -> bool:
        """Return whether this layer's module is inside of another one's."""
        return not other.name or self.name.startswith(f"{other.name}.")

    def weights(self) -> list[int]:
        """Return the identities of the weights of queries and keys."""
        return [id(self.module.get_parameter(name)) for name in self.weight_names()]

    @property
    def trains(self) -> bool:
        """Whether any weight of queries and keys is trained."""
        return any(self.module.get_parameter(name).requires_grad for name in self.weight_names())

    def scalings(self, call: AttentionCall, hook: str) -> list[ScaledRows]:
        """Return what multiplies the scores of head h by γ_h, in the order of rows that agrees with a call.

        Raises:
            UnsuitableError: the queries or keys of the call are not the outputs of the projections.
        """
        if call.query is None or call.key is None:
            raise self._unknown(hook, "its scores are not a product of queries and keys that can be read")
        heads, width = call.query.shape[1], call.query.shape[3]
        if self.kind == "multihead":
            return self._of_multihead(heads, width)
        outputs = {
            part: output
            for weight, output in call.projections
            for part in self.projections
            if self.module.get_submodule(part)._parameters.get("weight") is weight
        }
        if missing := [part for part in self.projections if part not in outputs]:
            raise self._unknown(hook, f"{missing[0]} is not a plain product with its weight")
        sizes = {part: output.shape[-1] for part, output in outputs.items()}
        for plan in self._candidates(heads, width, sizes):
            if all(_agrees(outputs[part.projection], part, call) for part in plan):
                return plan
        raise self._unknown(
            hook,
            "its queries and keys are not proportional to the outputs of its projections, as with a norm of both "
            "(QK-norm) or another order of rows",
        )

    def _unknown(self, hook: str, reason: str) -> UnsuitableError:
        return UnsuitableError(f"Hook {hook!r} cannot scale the logits of {self.name}: {reason}; leave the hook out.")

    def _candidates(self, heads: int, width: int, sizes: Mapping[str, int]) -> Iterator[list[ScaledRows]]:
        """Yield the possible orders of rows, the most likely one first."""
        first, last = self.projections[0], self.projections[-1]
        if self.kind == "latent":
            yield from self._of_latent(heads, width, sizes)
            return
        if self.kind == "fused":
            total, order = sizes[first], (True, False) if first.rpartition(".")[2].lower() in GROUPED else (False, True)
            others = (total - heads * width) // 2
            if others <= 0 or others % width or heads % (others // width):
                return
            for grouped in order:
                query, key = fused_query_rows(total, heads, width, others // width, grouped=grouped)
                yield self._shared(first, query, first, key)
            return
        if sizes[first] != heads * width:
            return
        query = torch.arange(heads * width).view(heads, width)
        if self.kind == "separate":
            yield self._shared(first, query, last, torch.arange(sizes[last]).view(-1, width))
        else:
            shared = sizes[last] // 2 // width
            yield self._shared(first, query, last, torch.arange(shared * width).view(-1, width))
            yield self._shared(first, query, last, torch.arange(2 * shared * width).view(shared, 2, width)[:, 0])

    def _shared(self, query_part: str, query: Tensor, key_part: str, key: Tensor) -> list[ScaledRows]:
        """Return the scaling of queries and keys; keys that several heads share stay as they are."""
        if len(key) < len(query):
            return [ScaledRows(query_part, query, 1.0, "query")]
        return [ScaledRows(query_part, query, 0.5, "query"), ScaledRows(key_part, key, 0.5, "key")]

    def _of_latent(self, heads: int, width: int, sizes: Mapping[str, int]) -> Iterator[list[ScaledRows]]:
        # (q_nope, q_rope)·(k_nope, k_rope), where all heads share k_rope: γ^½ for q_nope and k_nope, γ for q_rope.
        plain = getattr(self.module, "qk_nope_head_dim", None)
        query, key = self.projections
        if not isinstance(plain, int) or not 0 < plain <= width or sizes[query] != heads * width:
            return
        if sizes[key] % heads or sizes[key] // heads <= plain:
            return
        of_query = torch.arange(sizes[query]).view(heads, width)
        of_key = torch.arange(sizes[key]).view(heads, -1)[:, :plain]
        yield [
            ScaledRows(query, of_query[:, :plain], 0.5, "query", (0, plain)),
            ScaledRows(query, of_query[:, plain:], 1.0, "query", (plain, None)),
            ScaledRows(key, of_key, 0.5, "key", (0, plain)),
        ]

    def _of_multihead(self, heads: int, width: int) -> list[ScaledRows]:
        rows = torch.arange(heads * width).view(heads, width)
        if self.module._parameters.get("in_proj_weight") is not None:
            return [ScaledRows("in", rows, 0.5, "query"), ScaledRows("in", rows + heads * width, 0.5, "key")]
        return [ScaledRows("q", rows, 0.5, "query"), ScaledRows("k", rows, 0.5, "key")]

    def parameters(self, projection: str) -> Iterator[tuple[str, int, int]]:
        """Yield the parameters of a projection: name in the model, dimension of its outputs, first output."""
        prefix = f"{self.name}." if self.name else ""
        if self.kind == "multihead":
            yield from ((prefix + name, dim, first) for name, dim, first in self._multihead_parameters(projection))
            return
        module = self.module.get_submodule(projection)
        yield f"{prefix}{projection}.weight", 0 if isinstance(module, nn.Linear) else 1, 0
        if module._parameters.get("bias") is not None:
            yield f"{prefix}{projection}.bias", 0, 0

    def _multihead_parameters(self, projection: str) -> Iterator[tuple[str, int, int]]:
        assert isinstance(self.module, nn.MultiheadAttention)
        parameters, width = self.module._parameters, self.module.embed_dim
        first = width if projection == "k" else 0
        if projection == "in":
            yield "in_proj_weight", 0, 0
        else:
            yield f"{projection}_proj_weight", 0, 0
        if parameters.get("in_proj_bias") is not None:
            yield "in_proj_bias", 0, first
        if projection != "q" and parameters.get("bias_k") is not None:
            yield "bias_k", 2, -width if projection == "in" else 0

    def scaled(self, model: nn.Module, scalings: Iterable[ScaledRows], factors: Tensor) -> dict[str, Tensor]:
        """Return the parameters with the scores of every head multiplied by its factor, by name; shape (heads,)."""
        vectors: dict[str, tuple[int, Tensor]] = {}
        parameters = dict(model.named_parameters())
        for scaling in scalings:
            values = factors.double().pow(scaling.power)[:, None].expand(scaling.rows.shape)
            for name, dim, first in self.parameters(scaling.projection):
                owner = parameters[name]
                if name not in vectors:
                    vectors[name] = dim, torch.ones(owner.shape[dim], dtype=torch.float64)
                places = scaling.rows + first
                inside = (places >= 0) & (places < owner.shape[dim])
                vectors[name][1][places[inside]] *= values[inside]
        return {name: multiplied(parameters[name], dim, vector) for name, (dim, vector) in vectors.items()}


def multiplied(parameter: Tensor, dim: int, vector: Tensor) -> Tensor:
    """Return a parameter, which may be a DTensor, times a vector along one dimension, in the parameter's dtype."""
    wide = torch.promote_types(parameter.dtype, torch.float32)
    shape = [-1 if place == dim else 1 for place in range(parameter.ndim)]
    factor = replicated_like(vector.view(shape).to(parameter.device, wide), parameter)
    with torch.no_grad():
        product: Tensor = parameter.detach().to(wide) * factor
        return product.to(parameter.dtype)


def fused_query_rows(total: int, heads: int, width: int, shared: int, *, grouped: bool) -> tuple[Tensor, Tensor]:
    """Return the rows of queries, (heads, width), and of keys, (key heads, width), of a fused projection."""
    rows = torch.arange(total)
    if not grouped:
        queries, keys = rows[: heads * width], rows[heads * width : (heads + shared) * width]
        return queries.view(heads, width), keys.view(shared, width)
    parts = rows.view(shared, -1, width)  # for each key head: its queries, its key, its value
    return parts[:, :-2].reshape(heads, width), parts[:, -2]


def _agrees(output: Tensor, scaling: ScaledRows, call: AttentionCall) -> bool:
    """Return whether the norms of a call's queries or keys are proportional to those of the outputs, token by token.

    Rotary positions keep norms, and a scale changes all norms alike; a norm of the queries does not.
    """
    tensor = call.query if scaling.subject == "query" else call.key
    assert tensor is not None
    heads = tensor.shape[1]
    if heads % len(scaling.rows):
        return False
    actual = _relative_norms(tensor[..., slice(*scaling.places)]).transpose(1, 2).reshape(-1, heads)
    expected = _relative_norms(output.flatten(0, -2)[:, scaling.rows.to(output.device)])
    expected = expected.repeat_interleave(heads // len(scaling.rows), dim=1)
    if actual.shape != expected.shape:
        return False
    known = expected > 1e-3 * expected.max()
    ratios = (actual / expected)[known]
    return bool(((ratios - ratios.mean()).abs() <= TOLERANCE * ratios.mean()).all()) if len(ratios) else True


def _relative_norms(tensor: Tensor) -> Tensor:
    """Return the norms over the last dimension, divided by the largest magnitude, so that no square overflows."""
    tensor = tensor.float()
    norms: Tensor = torch.linalg.vector_norm(tensor / tensor.abs().amax().clamp(min=torch.finfo().tiny), dim=-1)
    return norms
