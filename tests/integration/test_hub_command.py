from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

import pytest

COMMAND = (sys.executable, "-m", "streamsync", "hub")
ENVIRONMENT = os.environ | {"STREAMSYNC_SECRET": "a secret for this test"}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_hub_listens_until_it_is_told_to_stop(number: signal.Signals) -> None:
    with subprocess.Popen(COMMAND, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True) as hub:
        try:
            assert hub.stdout is not None
            line = hub.stdout.readline()
            port = int(line.rsplit(":", 1)[1])
            socket.create_connection(("127.0.0.1", port), timeout=10).close()
            hub.send_signal(number)
            assert hub.wait(timeout=20) == 0
        finally:
            hub.kill()


def test_port_in_use_is_one_line_and_exit_code_2() -> None:
    """Case 39: a port taken between probe and bind."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = subprocess.run(
            [*COMMAND, "--port", port], env=ENVIRONMENT, capture_output=True, text=True, check=False
        )
    assert done.returncode == 2
    assert port in done.stderr
    assert done.stderr.startswith("streamsync: ")
    assert done.stderr.count("\n") == 1
