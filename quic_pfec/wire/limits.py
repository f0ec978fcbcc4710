"""Every number that bounds what a peer can make us do, with its reason.

One frozen object is handed to each parser and to the transfer layer, so that no limit hides in the code that it
protects. What is announced to the peer (`parameter.PfecParameter`) is derived from it; negotiation only lowers values.
The module constants are limits of the format itself, which no configuration can raise.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from quic_pfec.wire.errors import LocalError

__all__ = [
    "MAX_ACK_RANGES",
    "MAX_FRAGMENTS",
    "MAX_INITIAL_CREDIT",
    "MAX_SID",
    "MAX_SYMBOL_SIZE",
    "MAX_TRANSFERS",
    "MAX_UNITS",
    "MAX_WINDOW",
    "MIN_SYMBOL_SIZE",
    "SPARE_FEEDBACK",
    "UNIT_HEADER_SIZE",
    "USELESS_REPAIRS",
    "Limits",
]

MIN_SYMBOL_SIZE = 64
"""Bytes. Below this the headers cost more than the payload."""
MAX_SYMBOL_SIZE = 16_383
"""Bytes. Largest Length that the 2-byte varint form holds, which SOURCE and REPAIR always use."""
UNIT_HEADER_SIZE = 4
"""Bytes that open every symbol: unit id (24 bits), fragment (8 bits)."""
MAX_WINDOW = 16_384
"""SIDs. Largest span of one REPAIR that can be negotiated."""
MAX_TRANSFERS = 64
"""Incoming transfers a connection can announce."""
MAX_INITIAL_CREDIT = 1 << 20
"""Symbols a receiver can announce before it has seen the manifest."""
MAX_SID = (1 << 30) - 1
"""Largest SID that the 4-byte varint form holds, which SOURCE and REPAIR always use."""
MAX_ACK_RANGES = 64
"""Ranges in one PFEC_ACK: a receiver must accept as many."""
MAX_UNITS = 1 << 24
"""Units in a transfer: the unit header has 24 bits."""
MAX_FRAGMENTS = 256
"""Fragments in a unit: the unit header has 8 bits."""
SPARE_FEEDBACK = 64
"""PFEC_ACKs of a transfer that are read beyond one for each packet sent: more is a flood, dropped and counted."""
USELESS_REPAIRS = 4_096
"""Repairs that cost row operations and brought nothing, beyond the useful ones: a lossless end phase of 4 RTTs at
1 Gbit/s stays below; more are dropped unread."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What this endpoint accepts. All defaults can be changed; contradictions raise `LocalError`.

    Sizes are bytes, ids and credits are symbols, times are microseconds. `max_degree` and `max_unknown` should both be
    64 where only the scalar kernel is available.
    """

    max_symbol_size: int = 1_414
    """What a SOURCE packet can carry when the UDP payload is 1,452 bytes (MTU 1,500, IPv4 or IPv6): 1,425 less 11."""
    max_window: int = 4_096
    """Span of one REPAIR. 1,786 packets are in flight at 1 Gbit/s x 20 ms, and span costs only a bitmap."""
    max_degree: int = 255
    """Ids combined in one REPAIR; payload work is linear in it. Senders use 48."""
    max_transfers: int = 4
    """Concurrent incoming transfers of a connection: each may hold a whole cache."""
    initial_credit: int = 4_096
    """Symbols accepted before the manifest: 47 ms at 1 Gbit/s, so that no deadline of a few RTTs stalls."""
    early_symbols_per_connection: int = 16_384
    """Symbols stored without a manifest, all transfers of a connection: 23 MB at 1,414 bytes."""
    early_symbols_per_server: int = 65_536
    """The same for all connections together: 93 MB. Beyond it early symbols are dropped, as if lost."""

    max_symbols: int = 1 << 20
    """Symbols in a transfer: 1.43 GB at 1,368 bytes. It binds before the byte limit; raise it for larger caches."""
    max_transfer_bytes: int = 2 << 30
    """Decoded bytes of one transfer."""
    max_connection_bytes: int = 2 << 30
    """Decoded bytes of all transfers of a connection that are not finished."""
    max_server_bytes: int = 8 << 30
    """Decoded bytes of all unfinished transfers of a server: four of the largest."""

    max_manifest_bytes: int = 65_536
    """Encoded manifest. Ours has about 150 bytes."""
    max_manifest_pieces: int = 64
    """Gaps remembered while a manifest arrives in fragments: as many as a manifest of full packets has."""
    manifest_timeout_us: int = 10_000_000
    """How long symbols, or a frozen transfer, wait for the manifest or the rest of the opening: many probe timeouts."""
    max_layers: int = 256
    """Twice the deepest models in use."""
    max_kv_heads: int = 256
    """KV heads of a layer: no grouping at all in the widest models."""
    max_head_dim: int = 1_024
    """Elements of one head: twice the largest in use."""
    max_tokens: int = 1 << 20
    """Absolute position one past the last row; also bounds TOKENS to 4 MiB."""

    min_deadline_us: int = 1_000
    """1 ms: below it no packet of a hand-off can arrive."""
    max_deadline_us: int = 600_000_000
    """600 s. A 7B cache over a 20-Mbit/s 5G link needs 79 s; beyond minutes a bulk copy is the better tool."""

    max_late_us: int = 10_000_000
    """10 s: how long after its freeze a receiver takes late symbols, and a sender sends them; 0 = never. Some hundred
    decode steps: what has not come by then has hardly any of the answer left to change."""
    max_late_bytes: int = 512 << 20
    """Arenas and decoded units kept after their freeze for late symbols, all transfers of a connection; what does not
    fit freezes as if nobody had asked. Three caches of 88 MB with their arenas."""

    max_ack_ranges: int = MAX_ACK_RANGES
    """Ranges we write in one PFEC_ACK. We always accept MAX_ACK_RANGES."""
    max_unknown: int = 512
    """Unresolved columns of a decoder: 87 us of elimination a repair, within the packet slot of 100 Mbit/s."""
    row_operations_per_repair: int = 1_024
    """Elimination work that one REPAIR earns, 16 us. Honest elimination of l losses needs about l^2 in all."""

    max_openings: int = 32
    """Transfer streams of a connection whose first message is not whole: each may hold one of 612 kB."""
    max_unit_bytes: int = 4 << 20
    """One unit on the transfer stream. 256 fragments of the largest symbol hold 4,193,024 bytes: no unit is larger."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) is not int or value < 0:
                raise LocalError(f"{field.name} must be a non-negative int, not {value!r}")
        _within("max_symbol_size", self.max_symbol_size, MIN_SYMBOL_SIZE, MAX_SYMBOL_SIZE)
        _within("max_window", self.max_window, 1, MAX_WINDOW)
        _within("max_degree", self.max_degree, 1, self.max_window)
        _within("max_transfers", self.max_transfers, 0, MAX_TRANSFERS)
        _within("max_symbols", self.max_symbols, 1, MAX_SID + 1)
        # A credit above the symbol cap would promise room for symbols that the parser then refuses.
        _within("initial_credit", self.initial_credit, 1, min(MAX_INITIAL_CREDIT, self.max_symbols))
        _within("early_symbols_per_connection", self.early_symbols_per_connection, 1, self.early_symbols_per_server)
        _within("max_transfer_bytes", self.max_transfer_bytes, 1, self.max_connection_bytes)
        _within("max_connection_bytes", self.max_connection_bytes, 1, self.max_server_bytes)
        _within("max_ack_ranges", self.max_ack_ranges, 1, MAX_ACK_RANGES)
        _within("max_deadline_us", self.max_deadline_us, self.min_deadline_us, (1 << 62) - 1)
        for name in (
            "max_manifest_bytes",
            "max_manifest_pieces",
            "manifest_timeout_us",
            "max_layers",
            "max_kv_heads",
            "max_head_dim",
            "max_tokens",
            "max_unknown",
            "row_operations_per_repair",
            "max_openings",
            "max_unit_bytes",
        ):
            _within(name, getattr(self, name), 1, (1 << 62) - 1)


def _within(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise LocalError(f"{name} must be {low} to {high}, not {value}")
