"""The attention layers of a model: which modules they are, and the weights of their projections."""

from dataclasses import dataclass

from loopscope.errors import UnsuitableError, UsageError
from loopscope.state import whole
from torch import Tensor, nn

FUSED = ("qkv", "qkv_proj", "to_qkv", "wqkv", "w_qkv", "c_attn")
"""Names of a projection whose rows are all queries, then all keys, then all values."""
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
)
OUTPUT = ("out_proj", "o_proj", "out", "proj", "c_proj", "o", "wo", "w_o", "to_out", "to_out.0", "out_lin", "dense")


@dataclass(frozen=True)
class HeadWeights:
    """The projections of one layer by head; rows of queries, keys and values, columns of outputs belong to a head."""

    query: Tensor
    """Shape (heads, head_dim, width of the queries' input)."""
    key: Tensor
    """Shape (heads, head_dim, width of the keys' input); a head that shares its keys has a copy."""
    value: Tensor
    """Shape (heads, value_dim, width of the values' input)."""
    output: Tensor
    """Shape (heads, width of the output, value_dim)."""


@dataclass(frozen=True)
class AttentionLayer:
    """One module that attends: an ``nn.MultiheadAttention``, or one with projections that are ``nn.Linear``."""

    module: nn.Module
    projections: tuple[nn.Linear, ...] = ()
    """Queries, keys, values and output, or all three fused and output; empty for ``nn.MultiheadAttention``."""

    def weights(self, heads: int) -> HeadWeights | None:
        """Return the weights by head, or ``None`` if their rows do not divide into so many heads."""
        query, key, value, output = self._matrices()
        head_dim = len(query) // heads
        if head_dim * heads != len(query) or len(key) % head_dim or heads % (len(key) // head_dim):
            return None
        shared = heads // (len(key) // head_dim)
        value_dim = output.shape[1] // heads
        if value_dim * heads != output.shape[1] or len(value) * shared != output.shape[1]:
            return None
        return HeadWeights(
            query.reshape(heads, head_dim, -1),
            key.reshape(-1, head_dim, key.shape[1]).repeat_interleave(shared, dim=0),
            value.reshape(-1, value_dim, value.shape[1]).repeat_interleave(shared, dim=0),
            output.reshape(-1, heads, value_dim).transpose(0, 1),
        )

    def _matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the matrices of queries, keys, values and output, each (out, in), whole."""
        if isinstance(self.module, nn.MultiheadAttention):
            module = self.module
            output = whole(module.out_proj.weight)
            if module.in_proj_weight is None:
                query, key, value = map(whole, (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight))
                return query, key, value, output
            return *_three(whole(module.in_proj_weight), output), output
        *inputs, last = (whole(projection.weight) for projection in self.projections)
        query, key, value = inputs if len(inputs) == 3 else _three(inputs[0], last)
        return query, key, value, last


def _three(fused: Tensor, output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Split fused rows; with fewer heads for keys and values than for queries, the output tells how many are which."""
    queries = output.shape[1]
    others = (len(fused) - queries) // 2
    return fused[:queries], fused[queries : queries + others], fused[queries + others :]


def find_attention(model: nn.Module, projections: str = "") -> dict[str, AttentionLayer]:
    """Return the attention layers of a model by the name of their module.

    Args:
        model: every ``nn.MultiheadAttention`` in it is a layer, and every module whose submodules have the names of
            projections, case ignored.
        projections: the names to look for instead of the known ones: of queries, keys, values and output, or of the
            fused projection and output, with commas between them; a name may lead further down, as ``to_out.0`` does.

    Raises:
        UnsuitableError: there is no such module.
    """
    choices = [_named(projections)] if projections else []
    layers: dict[str, AttentionLayer] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention):
            layers[name] = AttentionLayer(module)
        elif found := _projections_of(module, choices):
            layers[name] = AttentionLayer(module, found)
    if layers:
        return layers
    kinds = ", ".join(f"{name} ({type(module).__name__})" for name, module in model.named_modules() if name)
    sought = projections or "one of " + ", ".join("/".join(names) for names in (*SEPARATE, FUSED))
    raise UnsuitableError(
        "Hook 'attention' needs an nn.MultiheadAttention, or a module with nn.Linear submodules for queries, keys, "
        f"values and output ({sought}); the model has {kinds or type(model).__name__}. Name the submodules with "
        "--hook-config attention.projections=QUERY,KEY,VALUE,OUTPUT (or FUSED,OUTPUT)."
    )


def _named(projections: str) -> tuple[str, ...]:
    names = tuple(name.strip().lower() for name in projections.split(","))
    if len(names) not in (2, 4) or not all(names):
        raise UsageError(
            f"attention.projections is {projections!r}; it must be four names (queries, keys, values, output) or two "
            "(fused, output), with commas between them."
        )
    return names


def _projections_of(module: nn.Module, choices: list[tuple[str, ...]]) -> tuple[nn.Linear, ...]:
    """Return the projections of a module whose submodules have one of the choices of names, or of the known names."""
    linear = {
        name.lower(): part for name, part in module.named_modules(remove_duplicate=False) if isinstance(part, nn.Linear)
    }
    if not choices:
        inputs = [names for names in (*SEPARATE, *((name,) for name in FUSED)) if linear.keys() >= set(names)]
        choices = [(*names, output) for names in inputs for output in OUTPUT if output in linear]
    for names in choices:
        if linear.keys() >= set(names):
            return tuple(linear[name] for name in names)
    return ()
