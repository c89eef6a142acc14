"""Modes of modules in a training step."""

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd


def module_modes(model: nn.Module) -> dict[str, int]:
    """Return the numbers of modules in eval mode and of dropout layers.

    >>> model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2).eval(), nn.Dropout())
    >>> module_modes(model)
    {'model_in_eval': 0, 'eval_mode_count': 1, 'batchnorm_eval_count': 1, 'dropout_count': 1}
    """
    modules = list(model.modules())
    in_eval = [module for module in modules if not module.training]
    return {
        "model_in_eval": int(not model.training),
        "eval_mode_count": len(in_eval) if model.training else 0,
        "batchnorm_eval_count": sum(isinstance(module, _BatchNorm) for module in in_eval),
        "dropout_count": sum(isinstance(module, _DropoutNd) and module.p > 0 for module in modules),
    }
