"""Sealing and opening of runs of 1-RTT packets with symbols; used by `fast_send` and `fast_receive`.

`encrypt` and `decrypt` are those of an AESGCM of `cryptography`, `iv` its 12 bytes, `mask` encrypts blocks of 16 bytes
with the header protection key (AES-ECB). ChaCha20 is left to aioquic. Arguments out of range are a ValueError.
"""

from collections.abc import Callable, Sequence
from typing import Any, final

from quic_pfec.quic.extension import Symbol

_Seal = Callable[[bytes, Any, bytes], bytes]
_Mask = Callable[[bytes], bytes]

def seal(
    encrypt: _Seal,
    iv: bytes,
    mask: _Mask,
    plain: bytes | bytearray | memoryview,
    stride: int,
    lengths: Sequence[int],
    cid: bytes,
    first_byte: int,
    number: int,
    wire: bytearray | memoryview,
    position: int,
    /,
) -> list[int]:
    """Short-header packets with the numbers `number`, `number` + 1 ..., 2 bytes each, one for each of `lengths`.

    Packet i gets as payload the lengths[i] >= 2 bytes of `plain` from i * stride + 3 + len(cid) on. The packets stand
    one behind the other in `wire` from `position` on; returns their sizes. `first_byte` is the unprotected one.
    """

def sent_packets(
    cls: type[Any], number: int, sizes: list[int], tokens: list[Any], handler: Callable[..., None], now: float, /
) -> list[Any]:
    """Instances of `cls`, a `QuicSentPacket`, one a size; `handler` gets the fate and the token, where there is one."""

@final
class PacketWindow:
    """The last `size` packet numbers, as aioquic's `QuicPacketNumberWindow`: what lies below counts as received.

    size: a power of two, 64 to 2^20.
    """

    def __init__(self, size: int, /) -> None: ...
    def __len__(self) -> int: ...
    def add(self, number: int, /) -> None: ...
    def __contains__(self, number: int, /) -> bool: ...

@final
class Opener:
    """Opens the datagrams of one connection and parses those that hold nothing but SOURCE, REPAIR and PADDING.

    The limits are those of `wire.limits.Limits`; it accepts exactly the frames that `wire.frames` accepts.
    """

    groups: dict[int, list[Symbol]]
    """By transfer id, what the last `open` found, in the order of arrival."""
    numbers: list[tuple[int, int]]
    """Packet numbers that it accepted, as [start, stop) in the order of arrival."""
    largest: int
    """The largest of them, -1 for none; `spin` is its spin bit."""
    spin: bool
    expected: int
    """The next packet number expected (RFC 9000 appendix A.3)."""
    duplicates: int

    def __init__(self, max_symbols: int, max_symbol_size: int, max_degree: int, max_window: int, /) -> None: ...
    def load(self, datagrams: Sequence[bytes | memoryview], cid: bytes, mask: _Mask, /) -> None:
        """The batch to be opened, all for connection id `cid`: whatever is for another is refused by `open`."""
    def open(
        self, start: int, decrypt: _Seal, iv: bytes, key_phase: int, window: PacketWindow, expected: int, /
    ) -> int:
        """Opens the batch from `start` on, up to a datagram that is not for it; returns that one's index, or the end.

        Nothing has changed for the refused one, which may be forged, of another key, or hold other frames.
        """
    def release(self) -> None:
        """Forgets batch and results."""
    def parse(self, payload: bytes, /) -> list[tuple[int, Symbol]] | None:
        """(transfer id, frame) of a decrypted payload; None where `open` would refuse it."""
