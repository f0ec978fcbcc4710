"""`serve()` for library users, and the LLM endpoint: `python -m quic_pfec.server`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from quic_pfec.kv.received import ReceivedKV
from quic_pfec.quantities import described, integer
from quic_pfec.quic.admission import Admissions
from quic_pfec.quic.configuration import check_token, configuration
from quic_pfec.quic.congestion import choose_congestion
from quic_pfec.quic.connection import EarlyBudget
from quic_pfec.quic.endpoint import Listener, listen
from quic_pfec.quic.handler import Admission, Freeze, Handler, Reply, StandBy, takes_late
from quic_pfec.quic.journal import Journal
from quic_pfec.quic.protocol import PfecProtocol
from quic_pfec.quic.route import LARGEST_MTU, datagram_size
from quic_pfec.wire import messages
from quic_pfec.wire.errors import AppCode, LocalError, Refusal
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import Manifest

logger = logging.getLogger("quic_pfec")

OnKV = Callable[[ReceivedKV], Any | Awaitable[Any]]


class CallbackHandler:
    """Gives every hand-off to a function, which may be a coroutine function. See `quic.incoming.Handler`."""

    def __init__(self, on_kv: OnKV, *, token: str | None = None, admissions: Admissions | None = None) -> None:
        self.token = token
        self.admissions = admissions or Admissions()
        self._on_kv = on_kv

    def admit(self, manifest: Manifest, remaining_s: float) -> Admission:
        return self.admissions.admit(manifest)

    def expect(self, admission: Admission, manifest: Manifest, request: messages.Generate | None) -> StandBy | None:
        return None

    async def received(self, freeze: Freeze, request: messages.Generate | None, reply: Reply) -> None:
        result = self._on_kv(freeze.finish())
        if inspect.isawaitable(result):
            await result
        if request is not None:
            reply.failed(AppCode.UNSUPPORTED, "this receiver does not generate")

    async def resumed(self, request: messages.Generate, reply: Reply) -> None:
        raise Refusal(AppCode.UNSUPPORTED, "this receiver does not generate")


async def serve(
    host: str = "127.0.0.1",
    port: int = 4433,
    *,
    certificate: str,
    private_key: str,
    on_kv: OnKV | None = None,
    handler: Handler | None = None,
    token: str | None = None,
    client_ca: str | None = None,
    congestion_control: str = "cubic",
    rate: str | float | None = None,
    lossy: bool = False,
    mtu: int = LARGEST_MTU,
    extension: bool = True,
    max_transfers: int = 8,
    max_bytes: int | None = None,
    max_connections: int = 256,
    limits: Limits | None = None,
    retry: bool = False,
    secrets_log: str | None = None,
    quic_log: str | None = None,
) -> Listener:
    """Takes hand-offs until the returned listener is closed (`listener.close()`, then `await listener.wait_closed()`).

    on_kv gets a `ReceivedKV` for each hand-off at its freeze; or handler decides everything (the LLM endpoint is one).
    certificate, private_key: PEM files, TLS 1.3 always. token: senders must present it. client_ca: PEM file; senders
    must present a certificate that it signed. max_transfers, max_bytes: hand-offs under way at once, and their memory;
    beyond it senders hear `busy`. congestion_control, rate, lossy, mtu: as in `connect`, for what
    this side sends. limits: see `Limits`. What became of each hand-off is logged to `quic_pfec.handoffs`.

    Raises ValueError for contradictory settings and files that are not what they should be, OSError if the address
    cannot be bound or a file cannot be read.
    """
    if (on_kv is None) == (handler is None):
        raise LocalError("give exactly one of on_kv (a function) and handler")
    if on_kv is not None and not callable(on_kv):
        raise LocalError(f"on_kv is a function that takes a ReceivedKV, not {described(on_kv)}")
    if handler is not None and token is not None:
        raise LocalError("a handler has a token of its own: give it there")
    integer("port", port, 0, 65535)
    integer("max_transfers", max_transfers, 1, 1 << 20)
    integer("max_connections", max_connections, 1, 1 << 20)
    if max_bytes is not None:
        integer("max_bytes", max_bytes, 1, 1 << 62)
    check_token(token)
    limits = limits or Limits()
    chosen: Handler
    if handler is not None:
        chosen = handler
    else:
        assert on_kv is not None
        admissions = Admissions(max_transfers, limits.max_server_bytes if max_bytes is None else max_bytes)
        chosen = CallbackHandler(on_kv, token=token, admissions=admissions)
    congestion = choose_congestion(congestion_control, rate, lossy)
    config = configuration(
        is_client=False,
        certificate=(certificate, private_key),
        client_ca=client_ca,
        congestion_control=congestion.aioquic_name,
        max_datagram_size=datagram_size(mtu),
        secrets_log=secrets_log,
        quic_log=quic_log,
    )
    early, journal = EarlyBudget(limits), Journal()
    return await listen(
        host,
        port,
        configuration=config,
        make_protocol=lambda quic: PfecProtocol(quic, handler=chosen, journal=journal),
        options={"limits": limits, "enabled": extension, "early": early, "late": takes_late(chosen)},
        congestion=congestion,
        max_connections=max_connections,
        retry=retry,
    )


if __name__ == "__main__":
    from quic_pfec.cli.serve import main

    main()
