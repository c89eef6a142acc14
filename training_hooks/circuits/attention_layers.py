"""The attention layers of a model: which modules they are, and the weights of their projections."""

from dataclasses import dataclass

import torch
from loopscope.errors import UnsuitableError, UsageError, shortened
from loopscope.state import unsharded
from torch import Tensor, nn

FUSED = ("qkv", "qkv_proj", "to_qkv", "wqkv", "w_qkv", "c_attn", "query_key_value")
"""Names of a projection to queries, keys and values at once."""
GROUPED = ("query_key_value",)
"""Those whose rows are, for each head of keys, its queries' heads, its keys, its values (GPT-NeoX, BLOOM, Falcon).

The rows of the others are all queries, then all keys, then all values."""
PAIRED = (("q_attn", "c_attn"), ("q_proj", "kv_proj"), ("to_q", "to_kv"), ("wq", "wkv"), ("q", "kv"))
"""Names of a projection to queries, and one to all keys, then all values."""
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
OUTPUT = (
    "out_proj", "o_proj", "out", "proj", "c_proj", "o", "wo", "w_o", "to_out", "to_out.0", "out_lin", "dense",
    "output.dense",
)  # fmt: skip


def matrix(projection: nn.Module) -> Tensor:
    """Return the weight of a linear layer, (out, in), whole; ``Conv1D`` of Hugging Face holds its transpose."""
    weight = unsharded(projection.get_parameter("weight"))
    return weight if isinstance(projection, nn.Linear) else weight.T


def is_projection(module: nn.Module) -> bool:
    """Tell whether a module is linear: an ``nn.Linear``, or a ``Conv1D`` of Hugging Face, known by its name."""
    return isinstance(module, nn.Linear) or any(kind.__name__ == "Conv1D" for kind in type(module).__mro__)


def fused_rows(total: int, queries: int, heads: int, *, grouped: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return which of the ``total`` rows of a fused projection are queries, keys and values, head after head.

    ``None`` if they do not divide into ``heads`` of ``queries`` rows in all, and fewer or equally many of keys.
    """
    head_dim, others = queries // heads, (total - queries) // 2
    if head_dim * heads != queries or queries + 2 * others != total or others < head_dim or others % head_dim:
        return None
    shared, rows = others // head_dim, torch.arange(total)
    if heads % shared:
        return None
    if not grouped:
        return rows[:queries], rows[queries : queries + others], rows[queries + others :]
    parts = rows.view(shared, -1, head_dim)
    return parts[:, :-2].flatten(), parts[:, -2].flatten(), parts[:, -1].flatten()


@dataclass(frozen=True)
class HeadWeights:
    """The projections of one layer by head; rows of queries, keys and values, columns of outputs belong to a head."""

    query: Tensor  # (heads, head_dim, width of the queries' input)
    key: Tensor  # (heads, head_dim, width of the keys' input); a head that shares its keys has a copy
    value: Tensor  # (heads, value_dim, width of the values' input)
    output: Tensor  # (heads, width of the output, value_dim)


@dataclass(frozen=True)
class AttentionLayer:
    """One module that attends: an ``nn.MultiheadAttention``, or one with linear projections."""

    module: nn.Module
    projections: tuple[nn.Module, ...] = ()
    """Queries, keys, values and output, or some of the three fused, and output; none for ``nn.MultiheadAttention``."""
    grouped: bool = False  # whether the name of a fused projection stands for rows by heads of keys

    @property
    def fused(self) -> nn.Module | None:
        """The projection to queries, keys and values at once."""
        return self.projections[0] if len(self.projections) == 2 else None

    def weights(self, heads: int, output: Tensor | None = None, value: Tensor | None = None) -> HeadWeights | None:
        """Return the weights by head, or ``None`` if their rows do not divide into so many heads.

        ``output`` is what a fused projection made of a sample, shape (tokens, rows), ``value`` the values of that
        sample, shape (heads, tokens, value_dim). If both are given, the rows of a fused projection are taken in the
        order which these values confirm, whatever its name; ``None`` if none does.
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
        """Return the matrices of queries, keys, values and output, each (out, in), whole."""
        module = self.module
        if isinstance(module, nn.MultiheadAttention):
            own, made = module._parameters, module.out_proj._parameters.get("weight")
            fused, apart = own.get("in_proj_weight"), [own.get(f"{each}_proj_weight") for each in "qkv"]
            present = [each for each in apart if each is not None]
            if made is None or (fused is None and len(present) < 3):  # computed from other parameters
                return None
            query, key, values = map(unsharded, present) if fused is None else unsharded(fused).chunk(3)
            return query, key, values, unsharded(made)
        if any(each._parameters.get("weight") is None for each in self.projections):
            return None
        *inputs, last = map(matrix, self.projections)
        if len(inputs) > 1:
            query, key, values = inputs if len(inputs) == 3 else (inputs[0], *inputs[1].chunk(2))
            return query, key, values, last
        for grouped in (self.grouped, not self.grouped):
            rows = fused_rows(len(inputs[0]), last.shape[1], heads, grouped=grouped)
            if rows is not None and (output is None or value is None or _made_of(value, output[:, rows[2]])):
                query, key, values = (inputs[0][part.to(last.device)] for part in rows)
                return query, key, values, last
        return None


def _made_of(value: Tensor, columns: Tensor) -> bool:
    """Tell whether values by head, (heads, tokens, value_dim), are these columns, (tokens, heads · value_dim)."""
    heads = columns.shape[1] // value.shape[-1]
    if heads * value.shape[-1] != columns.shape[1] or len(value) % max(1, heads) or value.shape[1] != len(columns):
        return False
    by_head = columns.view(len(columns), heads, -1).transpose(0, 1).repeat_interleave(len(value) // heads, dim=0)
    return torch.allclose(by_head.to(value.dtype), value)


def find_attention(model: nn.Module, projections: str = "") -> dict[str, AttentionLayer]:
    """Return the attention layers of a model by the name of their module.

    Args:
        model: every ``nn.MultiheadAttention`` in it is a layer, and every module whose submodules have the names of
            projections, case ignored.
        projections: the names to look for instead of the known ones: of queries, keys, values and output, or of the
            fused projection and output, with commas between them; a name may lead further down, as ``to_out.0`` does.

    Raises :class:`UnsuitableError` if there is no such module.
    """
    names = tuple(name.strip().lower() for name in projections.split(","))
    if projections and (len(names) not in (2, 4) or not all(names)):
        raise UsageError(
            f"attention.projections is {projections!r}; it must be four names (queries, keys, values, output) or two "
            "(fused, output), with commas between them."
        )
    choices = [names] if projections else []
    modules = dict(model.named_modules())
    if layers := {name: found for name, module in modules.items() if (found := _layer_of(module, choices))}:
        return layers
    raise UnsuitableError(
        f"Hook 'attention' finds nothing that it knows in {shortened(type(model).__name__, 40)}: no "
        "nn.MultiheadAttention, and no linear layers named like q_proj, k_proj, v_proj, o_proj or qkv, proj; name them "
        "with --hook-config attention.projections=QUERY,KEY,VALUE,OUTPUT (or FUSED,OUTPUT)."
    )


def _layer_of(module: nn.Module, choices: list[tuple[str, ...]]) -> AttentionLayer | None:
    """Return a module as a layer if its submodules have one of the choices of names, or of the known names."""
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
