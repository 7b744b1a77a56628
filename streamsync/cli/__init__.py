"""The `streamsync` command: errors become one line and exit code 2."""

from __future__ import annotations

import importlib.util
import logging
import sys
import traceback
from typing import TYPE_CHECKING

from streamsync.errors import MissingExtraError, StreamsyncError

if TYPE_CHECKING:
    from collections.abc import Sequence

_log = logging.getLogger("streamsync")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line (the process's own by default) and returns its exit code.

    0 is success; 2 a `StreamsyncError`, said in one line on stderr (with its traceback under
    `--debug`), or bad usage; 1 what the command itself calls a failure.
    """
    try:
        for dependency in ("typer", "rich"):
            if importlib.util.find_spec(dependency) is None:
                raise MissingExtraError("the streamsync command", "cli")
        from streamsync.cli.app import app

        app(args=arguments)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    except StreamsyncError as error:
        if _log.isEnabledFor(logging.DEBUG):
            traceback.print_exc()
        print(f"streamsync: {error}", file=sys.stderr)
        return 2
    return 0
