"""The blocking client, against a server on an event loop of another thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

import quic_pfec
from quic_pfec import sync
from quic_pfec.cli.cert import make_certificate
from quic_pfec.kv.received import ReceivedKV
from quic_pfec.quic.admission import Admissions
from quic_pfec.quic.handler import Admission, Freeze, Reply
from quic_pfec.quic.outgoing import HandoffRefused
from quic_pfec.server import serve
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, Refusal
from quic_pfec.wire.manifest import Manifest

pytestmark = pytest.mark.sockets

PATIENCE_S = 20.0


class Echo:
    """Says the request's prompt back, word by word; keeps handle and arrays."""

    def __init__(self) -> None:
        self.token: str | None = "secret"
        self.admissions = Admissions()
        self.got: list[ReceivedKV] = []
        self.block = asyncio.Event()

    def admit(self, manifest: Manifest, remaining_s: float) -> Admission:
        return self.admissions.admit(manifest)

    def expect(self, admission: Admission, manifest: Manifest, request: messages.Generate | None) -> None:
        return None

    async def received(self, freeze: Freeze, request: messages.Generate | None, reply: Reply) -> None:
        self.got.append(freeze.finish())
        if request is not None:
            await self._say(request, reply)

    async def resumed(self, request: messages.Generate, reply: Reply) -> None:
        if request.handle not in {received.handle for received in self.got}:
            raise Refusal(AppCode.UNSUPPORTED, "no such handle")
        await self._say(request, reply)

    async def _say(self, request: messages.Generate, reply: Reply) -> None:
        for index, word in enumerate(request.prompt.split()):
            if word == "BLOCK":
                await self.block.wait()
            reply.text(word + " ", index, index)
        reply.done("stop", len(request.prompt.split()))


@pytest.fixture
async def server(tmp_path: Path) -> AsyncIterator[tuple[Echo, int, str]]:
    certificate, key = make_certificate(tmp_path)
    echo = Echo()
    async with await serve(port=0, certificate=str(certificate), private_key=str(key), handler=echo) as listener:
        yield echo, listener.port, str(certificate)


def arrays(seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [(rng.random((2, 40, 16), np.float32), rng.random((2, 40, 16), np.float32)) for _ in range(2)]


async def test_handoff_and_later_turn(server: tuple[Echo, int, str]) -> None:
    echo, port, ca = server
    cache = arrays(seed=1)

    def script() -> None:
        with sync.connect("127.0.0.1", port, ca_certs=ca, token="secret", rate="50Mbps") as conn:
            assert conn.extension == "on"
            conn.authorise()
            handoff = conn.send_kv(
                cache, PATIENCE_S, wire_dtype="fp32", then=quic_pfec.Generate("once upon a time", max_new_tokens=4)
            )
            assert handoff.report.confirmed
            assert handoff.report.j_block == pytest.approx(1.0)
            assert list(handoff.text) == ["once ", "upon ", "a ", "time "]
            assert handoff.report.finish_reason == "stop"
            assert list(handoff.text) == []
            assert conn.generate(handoff.report.handle, quic_pfec.Generate("there was")).whole() == "there was "
            refused = conn.generate(12345, quic_pfec.Generate("nothing"))
            with pytest.raises(HandoffRefused, match="no such handle"):
                refused.whole()
        with pytest.raises(ConnectionError, match="closed"):
            conn.send_kv(cache, 1.0)

    await asyncio.to_thread(script)
    for (keys, values), (sent_keys, sent_values) in zip(echo.got[0].kv.arrays.layers, cache, strict=True):
        np.testing.assert_array_equal(keys.view(np.float32), sent_keys)
        np.testing.assert_array_equal(values.view(np.float32), sent_values)


async def test_errors_reach_the_caller(server: tuple[Echo, int, str]) -> None:
    _, port, ca = server

    def script() -> None:
        with pytest.raises(ConnectionError):
            sync.connect("127.0.0.1", port, token="secret")  # nobody vouches for this certificate
        with pytest.raises(ValueError, match="rate"):
            sync.connect("127.0.0.1", port, ca_certs=ca, congestion_control="rate")
        with sync.connect("127.0.0.1", port, ca_certs=ca, token="guess") as conn:
            with pytest.raises(HandoffRefused, match="token"):
                conn.authorise()
            with pytest.raises(HandoffRefused, match="token is missing or wrong"):
                conn.send_kv(arrays(seed=2), PATIENCE_S)
            with pytest.raises(ValueError, match="deadline"):
                conn.send_kv(arrays(seed=2), -1.0)

    await asyncio.to_thread(script)
    assert not [thread for thread in threading.enumerate() if thread.name == "quic_pfec-sync"]


async def test_close_gives_up_what_is_under_way(server: tuple[Echo, int, str]) -> None:
    echo, port, ca = server
    failures: list[Exception] = []

    def script() -> None:
        conn = sync.connect("127.0.0.1", port, ca_certs=ca, token="secret")
        text = iter(conn.send_kv(arrays(3), PATIENCE_S, then=quic_pfec.Generate("first BLOCK last")).text)
        assert next(text) == "first "

        def read_on() -> None:
            try:
                next(text)
            except Exception as error:
                failures.append(error)

        reader = threading.Thread(target=read_on)
        reader.start()
        conn.close()
        conn.close()
        reader.join(PATIENCE_S)

    await asyncio.to_thread(script)
    assert len(failures) == 1
    assert isinstance(failures[0], ConnectionError)
    for _ in range(200):
        if echo.admissions.active == 0:
            break
        await asyncio.sleep(0.05)
    assert echo.admissions.active == 0
