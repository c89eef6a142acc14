"""What is printed while the screen is taken: kept, line by line, until it can be seen."""

import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from typing import IO

Keep = Callable[[IO[str], str], None]


class _KeptBytes(io.RawIOBase):
    """Hands what is written to ``keep``, as text, as long as it is held; afterwards to the stream it stands for."""

    def __init__(self, stream: IO[str], keep: Keep) -> None:
        self._stream = stream
        self._keep = keep
        self._owner = os.getpid()
        self.held = True

    def writable(self) -> bool:
        """Return true."""
        return True

    def write(self, data: "bytes | bytearray | memoryview") -> int:  # type: ignore[override]
        """Keep some text; in a forked process, whose memory nobody will read, write it."""
        text = bytes(data).decode("utf-8", "replace")
        if self.held and os.getpid() == self._owner:
            self._keep(self._stream, text)
        else:
            self._stream.write(text)
        return len(data)

    def fileno(self) -> int:
        """Return the number of the stream's file, for child processes."""
        return self._stream.fileno()


@contextmanager
def output_kept(keep: Keep) -> Iterator[None]:
    """Hand what Python prints on the terminal to ``keep(stream, text)`` while the body runs.

    Standard output or standard error that is no terminal is left alone. Who still holds the replacement afterwards
    writes to the terminal.
    """
    held: list[_KeptBytes] = []
    with ExitStack() as stack:
        for stream, redirect in ((sys.stdout, redirect_stdout), (sys.stderr, redirect_stderr)):
            if stream.isatty():
                held.append(_KeptBytes(stream, keep))
                wrapper = io.TextIOWrapper(held[-1], "utf-8", newline="\n", write_through=True)  # type: ignore[type-var]
                stack.enter_context(redirect(wrapper))
        try:
            yield
        finally:
            for file in held:
                file.held = False
