"""The attention layers of a model, and the weights of their projections by head."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from loopscope.errors import UnsuitableError, UsageError, shortened
from loopscope.option_words import hook_option_text
from loopscope.tensors import unsharded
from torch import Tensor, nn

from ..measures import SeriesBudget

MOST_HEADS = 256
"""Number of heads per layer for which patterns of heads are checked before a pass shows how many there are."""
FUSED = ("qkv", "qkv_proj", "to_qkv", "wqkv", "w_qkv", "c_attn", "query_key_value")
"""Names of a fused projection to queries, keys and values."""
GROUPED = ("query_key_value",)
"""Names of fused projections with rows grouped by key head: its queries, keys, values (GPT-NeoX, BLOOM, Falcon).

The rows of other fused projections are all queries, then all keys, then all values."""
PAIRED = (("q_attn", "c_attn"), ("q_proj", "kv_proj"), ("to_q", "to_kv"), ("wq", "wkv"), ("q", "kv"))
"""Names of a projection to queries, and of one to all keys, then all values."""
SEPARATE = (
    ("q_proj", "k_proj", "v_proj"),
    ("query", "key", "value"),
    ("q", "k", "v"),
    ("wq", "wk", "wv"),
    ("w_q", "w_k", "w_v"),
    ("to_q", "to_k", "to_v"),
    ("q_lin", "k_lin", "v_lin"),
    ("self.query", "self.key", "self.value"),
    ("self.query_proj", "self.key_proj", "self.value_proj"),
    ("attention.query", "attention.key", "attention.value"),
)
LATENT = (("q_b_proj", "kv_b_proj"), ("q_proj", "kv_b_proj"), ("wq_b", "wkv_b"), ("wq", "wkv_b"))
"""Names of the projections to the heads of multi-head latent attention (MLA, DeepSeek)."""
OUTPUT = (
    "out_proj", "o_proj", "out", "proj", "c_proj", "o", "wo", "w_o", "to_out", "to_out.0", "out_lin", "dense",
    "output.dense",
)  # fmt: skip


def matrix(projection: nn.Module) -> Tensor:
    """Return the unsharded weight of a linear layer, shape (out, in); ``Conv1D`` of Hugging Face has its transpose."""
    weight = unsharded(projection.get_parameter("weight"))
    return weight if isinstance(projection, nn.Linear) else weight.T


def is_projection(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.Linear`` or a ``Conv1D`` of Hugging Face."""
    # Compared by class name, so that transformers need not be installed.
    return isinstance(module, nn.Linear) or any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def fused_rows(total: int, queries: int, heads: int, *, grouped: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return the indices of queries, keys and values among the ``total`` rows of a fused projection, head by head.

    ``None`` if ``queries`` rows do not divide into ``heads``, or the others into key heads that ``heads`` can share.
    """
    head_dim, others = queries // heads, (total - queries) // 2  # ``others`` are the rows of keys, and of values
    if head_dim * heads != queries or queries + 2 * others != total or others < head_dim or others % head_dim:
        return None
    shared, rows = others // head_dim, torch.arange(total)
    if heads % shared:
        return None
    if not grouped:
        return rows[:queries], rows[queries : queries + others], rows[queries + others :]
    # (key heads, query heads per key head + 2, head_dim): the last two are the key and the value
    parts = rows.view(shared, -1, head_dim)
    return parts[:, :-2].flatten(), parts[:, -2].flatten(), parts[:, -1].flatten()


@dataclass(frozen=True)
class HeadWeights:
    """The projections of one layer by head: rows of query, key and value weights, columns of output weights."""

    query: Tensor  # (heads, head_dim, width of the queries' input)
    key: Tensor  # (heads, head_dim, width of the keys' input); shared keys are repeated per head
    value: Tensor  # (heads, value_dim, width of the values' input)
    output: Tensor  # (heads, width of the output, value_dim)


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module: an ``nn.MultiheadAttention``, or a module with linear projections."""

    module: nn.Module
    projections: tuple[nn.Module, ...] = ()
    """Queries, keys, values and output; the first three may be fused. Empty for ``nn.MultiheadAttention``."""
    grouped: bool = False  # whether the name of a fused projection implies rows grouped by key head

    @property
    def fused(self) -> nn.Module | None:
        """The fused projection to queries, keys and values."""
        return self.projections[0] if len(self.projections) == 2 else None

    def weights(self, heads: int, output: Tensor | None = None, value: Tensor | None = None) -> HeadWeights | None:
        """Return the weights by head, or ``None`` if their rows do not divide into this number of heads.

        ``output`` is the output of a fused projection for one sample, shape (tokens, rows), ``value`` the values of
        that sample, shape (heads, tokens, value_dim). If both are given, they determine the order of the fused rows
        instead of the name; the result is ``None`` if neither order agrees with them.
        """
        matrices = self._matrices(heads, output, value)
        if matrices is None:
            return None
        query, key, values, last = matrices
        head_dim, value_dim = len(query) // heads, last.shape[1] // heads
        shared = max(1, len(query) // max(1, len(key)))
        if heads % shared or (heads * head_dim, heads * value_dim) != (len(query), last.shape[1]):
            return None
        if (shared * len(key), shared * len(values)) != (len(query), last.shape[1]):
            return None
        return HeadWeights(
            query.reshape(heads, head_dim, -1),
            key.reshape(-1, head_dim, key.shape[1]).repeat_interleave(shared, dim=0),
            values.reshape(-1, value_dim, values.shape[1]).repeat_interleave(shared, dim=0),
            last.reshape(-1, heads, value_dim).transpose(0, 1),
        )

    def _matrices(self, heads: int, output: Tensor | None, value: Tensor | None) -> tuple[Tensor, ...] | None:
        """Return the unsharded matrices of queries, keys, values and output, each of shape (out, in)."""
        module = self.module
        if isinstance(module, nn.MultiheadAttention):
            # ``_parameters`` lacks weights that prune or weight_norm compute from other parameters.
            parameters, out_weight = module._parameters, module.out_proj._parameters.get("weight")
            fused, separate = (
                parameters.get("in_proj_weight"),
                [parameters.get(f"{part}_proj_weight") for part in "qkv"],
            )
            present = [weight for weight in separate if weight is not None]
            if out_weight is None or (fused is None and len(present) < 3):
                return None
            query, key, values = map(unsharded, present) if fused is None else unsharded(fused).chunk(3)
            return query, key, values, unsharded(out_weight)
        if any(projection._parameters.get("weight") is None for projection in self.projections):
            return None
        *inputs, last = map(matrix, self.projections)
        if len(inputs) > 1:
            query, key, values = inputs if len(inputs) == 3 else (inputs[0], *inputs[1].chunk(2))
            return query, key, values, last
        for grouped in (self.grouped, not self.grouped):
            rows = fused_rows(len(inputs[0]), last.shape[1], heads, grouped=grouped)
            if rows is not None and (output is None or value is None or _equal_columns(value, output[:, rows[2]])):
                query, key, values = (inputs[0][part.to(last.device)] for part in rows)
                return query, key, values, last
        return None


def _equal_columns(value: Tensor, columns: Tensor) -> bool:
    """Return whether values by head, (heads, tokens, value_dim), equal columns of (tokens, key heads · value_dim)."""
    heads = columns.shape[1] // value.shape[-1]
    if heads * value.shape[-1] != columns.shape[1] or len(value) % max(1, heads) or value.shape[1] != len(columns):
        return False
    by_head = columns.view(len(columns), heads, -1).transpose(0, 1).repeat_interleave(len(value) // heads, dim=0)
    return torch.allclose(by_head.to(value.dtype), value)


def find_attention(model: nn.Module, projections: str = "") -> dict[str, AttentionLayer]:
    """Return the attention layers of a model by module name.

    Args:
        model: its layers are every ``nn.MultiheadAttention``, and every module whose submodules have the names of
            projections, ignoring case.
        projections: comma-separated names instead of the known names: of queries, keys, values and output, or of the
            fused projection and output; a name may be a path, such as ``to_out.0``.

    Raises:
        UsageError: ``projections`` are neither four names nor two.
        UnsuitableError: no module is an attention layer.
    """
    names = tuple(name.strip().lower() for name in projections.split(","))
    if projections and (len(names) not in (2, 4) or not all(names)):
        raise UsageError(
            f"attention.projections is {projections!r}; it must be four comma-separated names (queries, keys, values, "
            "output) or two (fused, output)."
        )
    choices = [names] if projections else []
    modules = dict(model.named_modules())
    if layers := {name: layer for name, module in modules.items() if (layer := _layer_of(module, choices))}:
        return layers
    raise UnsuitableError(
        f"Hook 'attention' finds no attention layer in {shortened(type(model).__name__, 40)}: no "
        "nn.MultiheadAttention, and no linear layers named like q_proj, k_proj, v_proj, o_proj or qkv, proj; name them "
        f"with {hook_option_text('attention', projections='QUERY,KEY,VALUE,OUTPUT')} (or FUSED,OUTPUT)."
    )


def _layer_of(module: nn.Module, choices: list[tuple[str, ...]]) -> AttentionLayer | None:
    """Return the module as a layer if its submodules have one of ``choices`` of names, or by default known names."""
    if isinstance(module, nn.MultiheadAttention):
        return AttentionLayer(module)
    parts = module.named_modules(remove_duplicate=False)
    linear = {name.lower(): part for name, part in parts if is_projection(part)}
    if not choices:
        inputs = [names for names in (*SEPARATE, *PAIRED, *((name,) for name in FUSED)) if linear.keys() >= set(names)]
        choices = [(*names, output) for names in inputs for output in OUTPUT if output in linear]
    for names in choices:
        if linear.keys() >= set(names):
            return AttentionLayer(module, tuple(linear[name] for name in names), names[0] in GROUPED)
    return None


def check_head_names(budget: SeriesBudget, layers: Iterable[str]) -> None:
    """Raise :class:`UsageError` for a pattern that matches neither a layer nor a head (layer.head)."""
    if budget.patterns:
        names = [*layers]
        budget.check_names([*names, *(f"{name}.{head}" for name in names for head in range(MOST_HEADS))])


def is_attention(module: nn.Module) -> bool:
    """Return whether a module is an ``nn.MultiheadAttention``, or has linear layers with usual names of projections."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    linear = {name.lower() for name, part in module.named_modules(remove_duplicate=False) if is_projection(part)}
    return any(linear >= {*names} for names in (*SEPARATE, *PAIRED, *((name,) for name in FUSED), *LATENT))
