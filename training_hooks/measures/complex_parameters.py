"""A check for hooks whose mathematics is that of real parameters."""

from loopscope.errors import UnsuitableError
from loopscope.hooks import RunInfo
from loopscope.tensors import trainable


def refuse_complex(hook: str, run: RunInfo) -> None:
    """Raise :class:`UnsuitableError` if a trained parameter is complex."""
    name = next((name for name, parameter in trainable(run.model).items() if parameter.is_complex()), None)
    if name is not None:
        raise UnsuitableError(
            f"Hook {hook!r} measures real parameters, but parameter {name!r} is complex; leave the hook out, or store "
            "the real and imaginary parts as a real parameter, as with torch.view_as_real."
        )
