"""Declarations of commits: the parts of the training state that interventions may change lastingly."""

from enum import Enum
from typing import NamedTuple

from torch import Tensor

from ..errors import HookMisuseError


class StatePart(Enum):
    """A part of the training state that an intervention can declare in ``commits``."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"


class UndeclaredCommitError(HookMisuseError):
    """A hook committed a change that its class does not declare; ends the run for any ``--on-hook-error``."""


class Clipping(NamedTuple):
    """The joint norm of the gradients, and the factor that reduces it to a limit."""

    norm: Tensor
    factor: Tensor
