"""Reports of exceptions that user code raises: one sentence instead of a traceback."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import format_exception

from ..checkpoints import StoppedError
from ..console import printable
from ..errors import LoopscopeError, user_code_lines, with_lines


@contextmanager
def user_errors(*, full_traceback: bool) -> Iterator[None]:
    """Report an exception of user code in one sentence with the user's lines, after the full traceback if requested.

    An exception that did not pass through user code is raised unchanged, since it may be a bug in loopscope.
    """
    try:
        yield
    except Exception as error:
        is_ours = isinstance(error, LoopscopeError)
        if not is_ours and not user_code_lines(error):
            raise
        if full_traceback and not isinstance(error, StoppedError):
            sys.stderr.write("\n".join(map(printable, "".join(format_exception(error)).split("\n"))))
        if is_ours:
            raise
        hint = "" if full_traceback else " --traceback shows the full traceback."
        raise LoopscopeError(f"Code of the experiment raised {with_lines(error)}.{hint}") from error
