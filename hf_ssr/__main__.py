"""`hf-ssr`, `python -m hf_ssr`, and so `accelerate launch -m hf_ssr`: Ctrl-C ends it in one line, whenever it comes."""

import os
import signal
import sys
from contextlib import suppress


def interrupted(*_) -> None:
    """
    The handler of the signal, where there is nothing to keep: an exception may get lost in an import or a callback, or
    be printed with a traceback. What a command wants to keep, it keeps under `terminal.handling`.
    """
    for file in filter(os.isatty, (1, 2)):
        os.write(file, b"\x1b[?25h")  # a progress bar has hidden the cursor
    with suppress(Exception):  # it may be what was interrupted
        sys.stdout.flush()
    os.write(2, b"\nhf-ssr: interrupted\n")
    os._exit(130)


def main() -> int:
    """The command. Returns the exit status."""
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupted)
    from .command.cli import main  # now, so that the handler is there before anything that takes time

    return main()


if __name__ == "__main__":
    raise SystemExit(main())
