"""The passes through the model that are running, which determine the taps that are called."""

from enum import Enum


class Pass(Enum):
    """A pass through the model; each tap is called in one kind of pass."""

    OWN = "a pass of the training step"
    OTHER = "a pass of a hook, an evaluation or an optimizer's closure, in which no tap is called"


OWN, OTHER = Pass.OWN, Pass.OTHER  # until Python 3.12, each look-up of a member calls a Python function


class RunningPasses:
    """The kinds of the passes that are running, the innermost last; outside of all passes the next one is the run's.

    As a context manager, which may be nested, it enters a pass of kind ``OTHER``. It is entered at every hook call,
    where the cost of a generator-based context manager is noticeable.
    """

    def __init__(self) -> None:
        # A stack, not the previous kind in each context: autograd has one thread per device, so with several devices
        # functions of taps may overlap and leave their contexts in another order than they entered them.
        self.kinds = [OWN]
        self.have_called_taps = False
        """Whether a callback of a tap on a module was called yet in a pass of the training step."""

    def __enter__(self) -> None:
        self.kinds.append(OTHER)

    def __exit__(self, *error: object) -> None:
        self.kinds.pop()
