"""Deadline-aware hand-off of an LLM's KV cache between machines, over lossy links, as an extension of QUIC.

    async with quic_pfec.connect("edge-b", 4433, ca_certs="ca.pem", rate="50Mbps") as conn:
        kv = quic_pfec.prepare(cache, tokens=input_ids)
        report = await quic_pfec.send_kv(conn, kv, deadline=0.35, then=quic_pfec.Generate("The answer is"))
        async for text in report.text: ...

The public names are those of `__all__`, here and in the modules they come from; `quic_pfec.sync` is the same without
asyncio. Names are loaded when they are first used (PEP 562), so that `import quic_pfec` costs nothing and a receiver
that only wants numpy arrays never loads torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quic_pfec.client import Connection, Generate, connect, prepare, send_kv
    from quic_pfec.kv.prepared import PreparedKV
    from quic_pfec.kv.profile import Profile
    from quic_pfec.kv.received import ReceivedKV
    from quic_pfec.quic.outgoing import HandoffRefused
    from quic_pfec.report import KVReport
    from quic_pfec.server import serve

    __version__: str

__all__ = [
    "Connection",
    "Generate",
    "HandoffRefused",
    "KVReport",
    "PreparedKV",
    "Profile",
    "ReceivedKV",
    "__version__",
    "connect",
    "prepare",
    "send_kv",
    "serve",
]

_HOMES = {
    "Connection": "quic_pfec.client",
    "Generate": "quic_pfec.client",
    "HandoffRefused": "quic_pfec.quic.outgoing",
    "KVReport": "quic_pfec.report",
    "PreparedKV": "quic_pfec.kv.prepared",
    "Profile": "quic_pfec.kv.profile",
    "ReceivedKV": "quic_pfec.kv.received",
    "connect": "quic_pfec.client",
    "prepare": "quic_pfec.client",
    "send_kv": "quic_pfec.client",
    "serve": "quic_pfec.server",
}


def __getattr__(name: str) -> Any:
    value: Any
    if name == "__version__":
        from importlib.metadata import version

        value = version("quic-pfec")
    elif name in _HOMES:
        from importlib import import_module

        value = getattr(import_module(_HOMES[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
