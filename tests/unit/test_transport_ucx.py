"""What is particular to ucx: one worker and one loop a process, and what UCX says of itself."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading

import pytest
import uvloop

from streamsync.errors import ConfigError, MissingExtraError, TransportError
from streamsync.transports import ucx_library
from streamsync.transports.base import Offer
from streamsync.transports.ucx import WINDOW, UcxReceiveLink, UcxTransport
from streamsync.transports.ucx_library import describe, is_installed
from tests.transport_rig import expected, filled, fingerprint, rig

needs_ucxx = pytest.mark.skipif(not is_installed(), reason="needs ucxx")


async def test_without_ucxx_the_extra_is_named_at_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ucx_library, "is_installed", lambda: False)
    ucx_library.load_ucxx.cache_clear()
    transport = UcxTransport()
    with pytest.raises(MissingExtraError, match=r"streamsync\[ucx\]"):
        await transport.start()
    await transport.close()


@needs_ucxx
async def test_a_second_loop_is_refused_and_one_after_the_other_works() -> None:
    refusal: list[BaseException] = []

    def other_thread() -> None:
        async def start() -> None:
            with pytest.raises(ConfigError, match="one event loop per process") as caught:
                await UcxTransport().start()
            refusal.append(caught.value)

        uvloop.run(start())

    transport = UcxTransport()
    await transport.start()
    thread = threading.Thread(target=other_thread)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert refusal
    said = await asyncio.to_thread(describe)
    assert "tcp" in said
    assert "RDMA" in said
    await transport.close()
    await transport.start()
    await transport.close()


@needs_ucxx
async def test_the_window_bounds_what_is_under_way_and_every_lease_comes_back() -> None:
    nbytes = 200_000  # above the rendezvous threshold: nothing leaves before it is asked for
    async with rig("ucx", nbytes * 4) as ends:
        send_link, receive_link, _ = await ends.link()
        sent = 0

        async def give() -> None:
            nonlocal sent
            for seed in range(10):
                lease = await filled(ends.source_account, nbytes, seed)
                await send_link.send(lease)
                lease.release()
                sent += 1
            await send_link.flush()

        giving = asyncio.ensure_future(give())
        await asyncio.sleep(0.2)
        assert sent == WINDOW
        for seed in range(10):
            own = await receive_link.receive(await ends.sink_account.acquire(nbytes), nbytes)
            assert fingerprint(own) == expected(nbytes, seed)
            own.release()
        async with asyncio.timeout(20):
            await giving


@needs_ucxx
async def test_what_was_sent_whole_still_arrives_after_a_farewell() -> None:
    async with rig("ucx", 1000) as ends:
        send_link, receive_link, _ = await ends.link()
        for seed in range(3):
            lease = await filled(ends.source_account, 1000, seed)
            await send_link.send(lease)
            lease.release()
        await send_link.flush()
        await send_link.abort()
        assert isinstance(receive_link, UcxReceiveLink)
        assert receive_link._gone is not None
        async with asyncio.timeout(20):
            await asyncio.wait([receive_link._gone])
        for seed in range(3):
            own = await receive_link.receive(await ends.sink_account.acquire(1000), 1000)
            assert fingerprint(own) == expected(1000, seed)
            own.release()


@needs_ucxx
async def test_an_address_that_is_none_is_a_transport_error() -> None:
    async with rig("ucx", 1000) as ends:
        for address, token in [(b"junk", bytes(8)), (b"", bytes(8)), (b"", bytes(3))]:
            with pytest.raises(TransportError, match="not one of ucx"):
                await ends.sink.connect(Offer(address, token))
        damaged = bytearray(ends.sink.address())
        damaged[40] ^= 1
        with pytest.raises(TransportError, match="not one of ucx"):
            await ends.sink.connect(Offer(bytes(damaged), bytes(8)))


@needs_ucxx
def test_a_process_that_forgets_to_close_still_exits() -> None:
    program = (
        "import uvloop\n"
        "from streamsync.transports.ucx import UcxTransport\n"
        "async def main():\n"
        "    await UcxTransport().start()\n"
        "uvloop.run(main())\n"
        "print('end', flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert done.stdout == "end\n"
    assert done.returncode == 0, done.stderr
