"""`python -m streamsync` is the `streamsync` command."""

from __future__ import annotations

import sys

from streamsync.cli import main

if __name__ == "__main__":
    sys.exit(main())
