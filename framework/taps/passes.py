"""The passes through the model that are running, which determine whether taps are called."""


class RunningPasses:
    """The running passes in which no tap is called: those of a hook, an evaluation or an optimizer's closure.

    As a context manager, which may be nested, it enters such a pass. It is entered at every hook call, where the cost
    of a generator-based context manager is noticeable.
    """

    def __init__(self) -> None:
        # A list, whose changes are atomic: autograd has one thread per device, so with several devices functions of
        # taps may overlap and leave their contexts in another order than they entered them.
        self.others: list[None] = []
        self.have_called_taps = False
        """Whether a callback of a tap on a module was called yet in a pass of the training step."""

    def __enter__(self) -> None:
        self.others.append(None)

    def __exit__(self, *error: object) -> None:
        self.others.pop()
