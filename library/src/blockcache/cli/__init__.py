"""The command line: how a verb is run, and how it ends. Imports nothing heavy before it can say what went wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Sequence

INTERRUPTED = 130  # exit code
STARTED = time.monotonic()


def main(argv: Sequence[str] | None = None) -> None:
    """Run a verb. Errors end as one line and exit code 2, an interrupt with 130.

    Args:
        argv: The words behind `blockcache`; those of this process without it.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    try:
        from blockcache.cli.verbs import cli

        cli.main([item for item in arguments if item != "--debug"], prog_name="blockcache", standalone_mode=False)
        sys.stdout.flush()  # a full disk shows here, not when Python ends
    except BrokenPipeError:
        _drop_output()
    except SystemExit:
        if not type(sys.stdout).__name__.endswith("PacifyFlushWrapper"):
            raise
        # the reader of a pipe, such as `head`, went away, for which click puts this around the output and ends with 1
        _drop_output()
        sys.exit(0)
    except KeyboardInterrupt:
        _end("interrupted", INTERRUPTED)
    except Exception as error:
        if debug:
            raise
        _fail(error)


def _fail(error: Exception) -> None:
    """One line that says what went wrong. What is asked here is asked by name: click itself may be missing."""
    from blockcache.errors import BlockcacheError

    kind = type(error)
    message = f"{kind.__name__}: {error} (this should not happen; run again with --debug)"
    if isinstance(error, BlockcacheError):
        message = str(error)
    elif kind.__module__.startswith("click"):
        if kind.__name__ == "Abort":
            _end("interrupted", INTERRUPTED)
        message = error.format_message() if hasattr(error, "format_message") else str(error)
    elif isinstance(error, ModuleNotFoundError) and error.name == "click":
        message = "the command line needs click, which is not installed; docs/start.md says how to install it"
    elif isinstance(error, MemoryError) or "can't allocate memory" in str(error):  # torch has no class for it
        message = "this machine has not enough memory for that; ask for less"
    elif (
        isinstance(error, OSError) and error.filename is None and error.strerror
    ):  # of standard output, such as a full disk
        _drop_output()
        message = f"the output cannot be written: {error.strerror}"
    _end(f"error: {' '.join(message.split())}", 2)


def _end(line: str, code: int) -> None:
    print(line, file=sys.stderr)
    sys.exit(code)


def _drop_output() -> None:
    """What is still buffered for standard output goes nowhere: Python would complain of it when it ends."""
    with contextlib.suppress(OSError, ValueError):  # of an output that is no file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.__stdout__.fileno())  # type: ignore[union-attr]
