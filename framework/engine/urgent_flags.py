"""Flags by which hooks ask for the immediate delivery of their metrics, read without waiting for an accelerator."""

from torch import Event, Tensor


class UrgentFlags:
    """The flags of the current visit, and copies of those that an accelerator computed for the previous one.

    The host runs ahead of an accelerator; reading a flag at once would make it wait at every step. A flag is therefore
    copied to the host asynchronously, and read one visit later, which is the same visit in every run. A flag that
    waits while a checkpoint is taken is lost by a resume; its metrics are then delivered with the next flush.
    """

    def __init__(self) -> None:
        self._is_urgent = False
        self._copies: list[tuple[Tensor, Event | None]] = []
        self._new_copies: list[tuple[Tensor, Event | None]] = []
        self.are_waiting = False
        """Whether there is any flag to take."""

    def add(self, flag: bool | Tensor) -> None:
        """Add a flag of the current visit: a bool, or a tensor with one element."""
        if isinstance(flag, Tensor) and flag.device.type != "cpu":
            self._new_copies.append(_copied_to_host(flag))
            self.are_waiting = True
        elif flag:
            self._is_urgent = self.are_waiting = True

    def take(self) -> bool:
        """Return whether a flag on the host, or an accelerator's flag of an earlier visit, is set; clear these."""
        is_urgent = self._is_urgent
        for copy, event in self._copies:
            if event is not None:
                event.synchronize()
            is_urgent = is_urgent or bool(copy)
        self._is_urgent, self._copies, self._new_copies = False, self._new_copies, []
        self.are_waiting = bool(self._copies)
        return is_urgent

    def clear(self) -> None:
        """Forget all flags, after a delivery of all metrics."""
        self._is_urgent, self._copies, self._new_copies = False, [], []
        self.are_waiting = False


def _copied_to_host(flag: Tensor) -> tuple[Tensor, Event | None]:
    """Start a copy to the host, and return it with the event that ends it; ``None`` if it is complete."""
    try:
        event = Event(device=flag.device)
    except (RuntimeError, TypeError):  # a backend without events
        return flag.cpu(), None
    copy = flag.to("cpu", non_blocking=True)
    event.record()
    return copy, event
