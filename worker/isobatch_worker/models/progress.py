"""Shows long work on a terminal as a bar, elsewhere as a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TextIO

Progress = Callable[[int, int], None]
"""(done, total), in any one unit."""
ShowProgress = Callable[[str], AbstractContextManager[Progress]]
"""What is being done -> its progress, shown until the block is left."""

_QUIET_SECONDS = 1.0
_LINE_SECONDS = 5.0


def silent(_done: int, _total: int) -> None:
    """A `Progress` that shows nothing."""


@contextmanager
def show_progress(
    what: str, *, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[Progress]:
    """A callback that shows how far `what` is, on stderr. Work that is never reported stays unseen.

    On a terminal that is a bar, gone when the work is done. Elsewhere work of less than a second
    prints nothing; longer work prints a line then, every five seconds, and at its end.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        with _bar(what, stream) as progress:
            yield progress
    else:
        yield _lines(what, stream, clock)


@contextmanager
def _bar(what: str, stream: TextIO) -> Iterator[Progress]:
    from rich.console import Console  # 50 ms, and only a person at a terminal needs it
    from rich.progress import Progress as Bar

    bar = Bar(console=Console(file=stream), transient=True)
    task = bar.add_task(what)

    def show(done: int, total: int) -> None:
        bar.start()  # does nothing when it runs already
        bar.update(task, completed=done, total=total)

    try:
        yield show
    finally:
        bar.stop()


def _lines(what: str, stream: TextIO, clock: Callable[[], float]) -> Progress:
    due = clock() + _QUIET_SECONDS
    has_shown = False

    def show(done: int, total: int) -> None:
        nonlocal due, has_shown
        now = clock()
        if now < due and not (has_shown and done >= total):
            return
        due, has_shown = now + _LINE_SECONDS, done < total
        stream.write(f"{what}: {100 * done // max(total, 1)} %\n")
        stream.flush()

    return show
