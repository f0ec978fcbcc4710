"""The error families of the project, and the numbers a peer sees.

Three reactions exist and must not be mixed up: misuse of our own API is the caller's bug (`LocalError`), a fault of the
peer closes the connection (`PeerError`), and a transfer that is well formed but unwelcome is refused while the
connection stays (`Refusal`). Parsers raise only `PeerError`; it becomes a QUIC close in exactly one place, in `quic/`.
"""

from __future__ import annotations

from enum import IntEnum

__all__ = ["AppCode", "ErrorCode", "LocalError", "PeerError", "Refusal"]


class ErrorCode(IntEnum):
    """Transport error codes used by the extension (RFC 9000 §20.1); sent in CONNECTION_CLOSE of type 0x1c."""

    FLOW_CONTROL_ERROR = 0x3
    STREAM_LIMIT_ERROR = 0x4
    FRAME_ENCODING_ERROR = 0x7
    TRANSPORT_PARAMETER_ERROR = 0x8
    PROTOCOL_VIOLATION = 0xA


class AppCode(IntEnum):
    """Application error codes: in STOP_SENDING, RESET_STREAM, CONNECTION_CLOSE of type 0x1d, REFUSED and FAILED.

    They start at 0x100 so that they cannot be mistaken for a transport code or for the small codes of HTTP/0.9 tools.
    """

    NO_ERROR = 0x100
    """Orderly end."""
    KV_MANIFEST = 0x101
    """The manifest is malformed, inconsistent, above a limit, or its copies differ."""
    KV_INTEGRITY = 0x102
    """Repairs contradict the symbols they claim to combine, more than once."""
    BUSY = 0x103
    """The receiver's limit on transfers or memory is reached; try again later."""
    UNAUTHORIZED = 0x104
    """The token is missing or wrong."""
    MODEL_MISMATCH = 0x105
    """The cache belongs to a different model than the receiver runs."""
    TOKENS_MISMATCH = 0x106
    """The token ids do not hash to the manifest's value, or do not continue the handle that is extended."""
    DEADLINE = 0x107
    """The deadline has passed, or lies outside the receiver's limits."""
    TOO_LARGE = 0x108
    """The transfer is well formed but larger than the receiver has room for."""
    UNSUPPORTED = 0x109
    """The request is well formed but asks for something that the receiver does not do."""
    CANCELLED = 0x10A
    """One side gave the transfer up."""
    INTERNAL = 0x10B
    """The endpoint failed for a reason of its own."""
    MESSAGE_ERROR = 0x10C
    """A message of the transfer stream is malformed, too long, unknown or out of order."""
    UNKNOWN_HANDLE = 0x10D
    """The handle of a later turn or of an increment's base was never given, or has expired."""


class LocalError(ValueError):
    """Misuse of our own API: a value that cannot be put on the wire, or a configuration that contradicts itself."""


class PeerError(Exception):
    """The peer broke the protocol: close the connection with `code`.

    `application` chooses the kind of close (0x1d instead of 0x1c). `frame_type` is the type of the offending frame
    where there is one, for the Frame Type field of CONNECTION_CLOSE (RFC 9000 §19.19). `reason` is one printable line.
    """

    def __init__(self, code: int, reason: str, *, application: bool = False, frame_type: int | None = None) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason
        self.application = application
        self.frame_type = frame_type

    def __str__(self) -> str:
        kind = "application error" if self.application else "transport error"
        return f"{self.reason} ({kind} 0x{self.code:x})"


class Refusal(Exception):
    """One transfer is refused with an application code; the connection and its other transfers stay."""

    def __init__(self, code: AppCode, reason: str) -> None:
        super().__init__(code, reason)
        self.code = code
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.reason} ({self.code.name.lower()})"
