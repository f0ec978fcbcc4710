"""Connections that do not come about say why, and what to do."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from aioquic.quic.packet import QuicErrorCode

from quic_pfec.cli.cert import make_certificate
from quic_pfec.client import connect, send_kv
from quic_pfec.quic.handshake import failure, unanswered

from .handoff_world import arrays, certificate, connecting, serving

pytestmark = pytest.mark.sockets


async def refused(*arguments: object, **options: object) -> str:
    """What `connect` says when it fails: one line."""
    with pytest.raises(ConnectionError) as raised:
        async with connect(*arguments, **options):  # type: ignore[arg-type]
            pytest.fail("connected")
    assert "\n" not in str(raised.value)
    return str(raised.value)


async def test_an_untrusted_certificate_says_which_file_to_pass(tmp_path: Path) -> None:
    other, _ = make_certificate(tmp_path)
    async with serving() as server:
        for ca_certs in (None, str(other)):
            said = await refused("localhost", server.port, ca_certs=ca_certs)
            assert "not trusted; pass the cert.pem that it was started with as ca_certs= (--ca-certs)" in said


async def test_a_certificate_for_another_name_says_how_to_name_it() -> None:
    async with serving() as server:
        said = await refused("127.0.0.1", server.port, ca_certs=certificate()[0], server_name="edge-b")
    assert "edge-b" in said
    assert "server_name= (--server-name)" in said


@pytest.mark.parametrize("given", ["none", "another"])
async def test_a_server_that_wants_a_client_certificate_says_so(given: str, tmp_path: Path) -> None:
    cert, key = make_certificate(tmp_path)
    options = {} if given == "none" else {"client_certificate": (str(cert), str(key))}
    async with serving(client_ca=certificate()[0]) as server:
        with pytest.raises(ConnectionError) as raised:
            async with connecting(server, **options) as conn:
                await send_kv(conn, arrays(1, 16), 5.0)
    said = "pass yours as client_certificate=" if given == "none" else "its --client-ca must have signed it"
    assert said in str(raised.value)


async def test_a_port_where_nothing_listens_is_found_out_long_before_the_timeout() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    said = await refused("127.0.0.1", port, timeout_s=100.0)  # the test's own limit is far below that
    assert said == unanswered("127.0.0.1", port, "(the host says nothing listens there)")
    assert "firewall" in said


async def test_a_host_that_says_nothing_is_given_up_at_the_timeout() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        assert await refused("127.0.0.1", port, timeout_s=0.3) == unanswered("127.0.0.1", port, "within 0.3 s")


async def test_a_name_that_nobody_has() -> None:
    assert "there is no host 'no.such.host.invalid'" in await refused("no.such.host.invalid")


def test_the_remedy_fits_the_alert() -> None:
    def said(alert: int, reason: str = "", ours: bool = True) -> str:
        return failure(QuicErrorCode.CRYPTO_ERROR + alert, reason, ours=ours)

    assert "make a new one" in said(42, "certificate has expired")
    assert "make a new one" in said(45)
    assert "not trusted" in said(48)
    assert "another protocol" in said(120)
    assert "try again later" in failure(QuicErrorCode.CONNECTION_REFUSED, "", ours=False)
    assert failure(0x1, "internal error", ours=True) == "internal error (0x1)"
    assert failure(0x1, "", ours=True) == "no reason given (0x1)"
