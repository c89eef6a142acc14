"""The update that Adam has just made, rebuilt from the optimizer's state and the settings of its step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from loopscope.hooks import OptimizerGroup
from loopscope.state import whole
from torch import Tensor


@dataclass(frozen=True)
class Settings:
    """What one parameter group gave to one step of Adam; ``decoupled``: its weight decay is AdamW's."""

    names: Sequence[str]
    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    amsgrad: bool
    maximize: bool

    @classmethod
    def of(cls, group: OptimizerGroup) -> "Settings":
        """Read the group of a :class:`torch.optim.Adam`."""
        options = group.options
        beta1, beta2 = map(float, options["betas"])
        return cls(
            names=list(group.names),
            lr=group.lr,
            beta1=beta1,
            beta2=beta2,
            eps=float(options["eps"]),
            weight_decay=group.weight_decay,
            decoupled=bool(options["decoupled_weight_decay"]),
            amsgrad=bool(options["amsgrad"]),
            maximize=bool(options["maximize"]),
        )


@dataclass(frozen=True)
class Update:
    """The last step of some parameters, flat: m̂, √v̂, −η·m̂/(√v̂+ε), −ηλθ₋ (None: no decoupled decay) and θ₋."""

    moment: Tensor
    root: Tensor
    adaptive: Tensor
    decay: Tensor | None
    before: Tensor

    @property
    def total(self) -> Tensor:
        """Δθ, the change of the parameters."""
        return self.adaptive if self.decay is None else self.adaptive + self.decay


@torch.no_grad()
def flat(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of one device, the whole of each if it is sharded, in one dimension and in float32 or wider."""
    joined = torch.cat([whole(tensor.detach()).flatten() for tensor in tensors])
    return joined.to(torch.promote_types(joined.dtype, torch.float32))


@torch.no_grad()
def adam_update(parameters: Sequence[Tensor], states: Sequence[Mapping[str, Tensor]], settings: Settings) -> Update:
    """Return the update that Adam has just made, from parameters of one group and device and their states after it.

    The parameters before the step are θ₋ = (θ + η·m̂/(√v̂+ε)) / (1 − ηλ) with decoupled decay (arXiv 1711.05101), and
    θ + η·m̂/(√v̂+ε) without. With amsgrad v is the running maximum of the second moments (arXiv 1904.09237); as in
    torch, the maximum is taken before the bias correction.
    """
    before = flat(parameters)
    steps = torch.stack([whole(state["step"]).double() for state in states])
    sizes = [each.numel() for each in parameters]
    corrections = ((1 - beta**steps).to(before) for beta in (settings.beta1, settings.beta2))
    first, second = (torch.cat([one.expand(n) for one, n in zip(each, sizes, strict=True)]) for each in corrections)
    squares = "max_exp_avg_sq" if settings.amsgrad else "exp_avg_sq"
    moment = flat([state["exp_avg"] for state in states]).div_(first)
    root = flat([state[squares] for state in states]).sqrt_().div_(second.sqrt_())
    adaptive = torch.div(moment, root + settings.eps).mul_(-settings.lr)
    before.sub_(adaptive)
    shrinkage = settings.lr * settings.weight_decay
    if not (settings.decoupled and shrinkage):
        return Update(moment, root, adaptive, None, before)
    before.div_(1 - shrinkage)
    return Update(moment, root, adaptive, -shrinkage * before, before)
