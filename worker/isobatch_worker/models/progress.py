"""Shows long work on a terminal as a bar, elsewhere as a line every few seconds."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import Progress as Bar

Progress = Callable[[int, int], None]
"""(done, total), in any one unit."""

Step = Callable[[str], None]
"""(what is being done now); told as often as one likes."""

_LINE_SECONDS = 5.0


@contextmanager
def show_progress(what: str) -> Iterator[Progress]:
    """A callback that shows how far `what` is, on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console  # only for people

        with Bar(console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(what)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    last = [0.0]

    def line(done: int, total: int) -> None:
        now = time.monotonic()
        if done == total or now - last[0] >= _LINE_SECONDS:
            last[0] = now
            print(f"{what}: {100 * done // max(total, 1)} %", file=sys.stderr)  # noqa: T201

    yield line


@contextmanager
def show_steps() -> Iterator[Step]:
    """A callback for work of named steps: a spinner on a terminal, else lines, on stderr."""
    if sys.stderr.isatty():
        from rich.console import Console  # only for people

        with Console(stderr=True).status("starting") as status:
            yield status.update
        return
    said = [""]

    def line(what: str) -> None:
        if what != said[0]:
            said[0] = what
            print(what, file=sys.stderr, flush=True)  # noqa: T201  # as above

    yield line
