"""The callback that attaches hooks to the Trainer of Hugging Face or Lightning that it is given to."""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Self, Unpack
from weakref import WeakSet

from ..errors import require, unknown
from ..state import Transient
from .attach import attach
from .attach_options import AttachArguments
from .lightning_loop import LightningLoop
from .scope import AttachedScope

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_Base: Any = Transient
"""Of any type for type checkers, so that both libraries accept the callback."""


class Callback(_Base):  # type: ignore[misc]
    """Attaches hooks to a Trainer: ``Trainer(..., callbacks=[loopscope.Callback(with_hooks="health")])``.

    It is for Hugging Face's Trainer and for Lightning's, and takes the options of :func:`.attach`. The run is that of
    ``attach(trainer, ...)``, also bit for bit.
    """

    scope: AttachedScope | None = None
    """The scope of the newest run; ``None`` before Hugging Face's Trainer is complete, or Lightning's fit begins."""

    def __new__(cls, **options: Unpack[AttachArguments]) -> Self:
        """Create an object that is also a callback of Lightning, if that was imported, as the script's Trainer was.

        Lightning requires its own class. Hugging Face's Trainer only calls the methods.
        """
        bases = tuple(sys.modules[name].Callback for name in PACKAGES if name in sys.modules)
        kind = type(cls.__name__, (cls, *bases), {"__module__": cls.__module__}) if bases else cls
        created: Self = super().__new__(kind)
        return created

    def __init__(self, **options: Unpack[AttachArguments]) -> None:
        """Keep the options of :func:`.attach`.

        Raises:
            UsageError: for an unknown option.
        """
        for name in options:
            if name not in AttachArguments.__annotations__:
                raise unknown("argument of Callback:", name, AttachArguments.__annotations__)
        self._options = options
        self._trainers: WeakSet[Any] = WeakSet()

    def on_init_end(self, *events: Any, **parts: Any) -> None:
        """Attach to the Trainer of Hugging Face that has been created."""
        trainer = self._calling_trainer()
        self._trainers.add(trainer)
        self.scope = attach(trainer, **self._options)

    def on_train_begin(self, *events: Any, **parts: Any) -> None:
        """Refuse a training of Hugging Face's Trainer that was complete before it got this callback.

        Raises:
            UsageError: without :meth:`on_init_end`.
        """
        require(
            self._calling_trainer() in self._trainers,
            "loopscope.Callback was added to a Trainer that existed; give it to Trainer(callbacks=[...]), or call "
            "loopscope.attach(trainer).",
        )

    def _calling_trainer(self) -> Any:
        """Return the Trainer of Hugging Face that calls this callback, which its events do not name."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            handler = getattr(frame.f_locals.get("self"), "callback_handler", None)
            if handler is not None and any(item is self for item in handler.callbacks):
                break
            frame = frame.f_back
        assert frame is not None
        return frame.f_locals["self"]

    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        """Attach to Lightning's Trainer as its first fit begins; the hooks follow its further fits themselves."""
        if stage == "fit" and not any(isinstance(item, LightningLoop) for item in trainer.callbacks):
            self.scope = attach(trainer, **self._options)

    def on_train_end(self, *events: Any, **parts: Any) -> None:
        """Do nothing: an event of both libraries, with different arguments."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        """Return a method without effect for every other event of Hugging Face's Trainer."""
        if not name.startswith("on_"):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return _do_nothing


def _do_nothing(*events: Any, **parts: Any) -> None:
    """Take an event."""
