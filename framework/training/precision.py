"""Mixed precision: autocast around losses and evaluations, and the scaling of float16 losses."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Literal, ParamSpec, TypeVar

import torch
from torch.amp import GradScaler

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Precision:
    """What forward passes compute in: the parameters' own precision (``None``), or a lower one where that is safe."""

    dtype: torch.dtype | None
    device_type: str

    @classmethod
    def of(cls, amp: Literal["none", "bf16", "fp16"], device: torch.device) -> "Precision":
        """Return the precision that the option ``amp`` asks for."""
        return cls(DTYPES.get(amp), device.type)

    def autocast(self, function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
        """Return the function under autocast, or itself where there is none."""
        if self.dtype is None:
            return function

        @wraps(function)
        def cast(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
            with torch.autocast(self.device_type, self.dtype):
                return function(*args, **kwargs)

        return cast

    def scaler(self) -> GradScaler | None:
        """Return a new scaler for float16, whose small gradients are zero otherwise; no other precision needs one."""
        return GradScaler(self.device_type) if self.dtype is torch.float16 else None


def twin(scaler: GradScaler | None) -> GradScaler | None:
    """Return a scaler of the same scale that stands between two steps, wherever the given one is in its own."""
    if scaler is None or not scaler.is_enabled():
        return scaler
    fresh = GradScaler(scaler._device)
    fresh.load_state_dict(scaler.state_dict())
    return fresh
