"""Messages of the transfer stream: the reliable half of a hand-off (docs/wire.md §7).

A transfer's bidirectional stream carries what must not be lost: the opening (manifest, token ids, generation request)
one way, the answer (acceptance, report, generated text) the other way; and the units themselves where the peer lacks
the extension. Each message is kind (i), length (i), body. `MessageReader` takes the stream in pieces of any size and
judges kind and length before it stores a byte of the body, so a peer can make it hold at most one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Literal

import msgspec
import numpy as np
import numpy.typing as npt

from quic_pfec.wire import varint
from quic_pfec.wire.errors import AppCode, LocalError, PeerError
from quic_pfec.wire.frames import AckStatus
from quic_pfec.wire.limits import MAX_UNITS, Limits

__all__ = [
    "STREAM_PREAMBLE", "STREAM_TYPE", "Accepted", "Decoding", "Done", "Failed", "Generate", "Kind", "Message",
    "MessageReader", "Open", "Refused", "Report", "Role", "Scores", "Start", "Text", "Tokens", "Unit",
    "encode_message", "one_line",
]  # fmt: skip

STREAM_TYPE = 0x3A18E740
"""First varint on a transfer stream; the transport parameter's number."""
STREAM_PREAMBLE = varint.encode(STREAM_TYPE)
"""What the sender writes before its first message."""

MAX_PROMPT = 1 << 16
MAX_PROMPT_TOKENS = 1 << 16
MAX_NEW_TOKENS = 1 << 16
MAX_SCORE_TOKENS = 4096
MAX_TEXT = 4096
MAX_REASON = 256
MAX_CREDENTIAL = 256
MAX_MODE = 16
MAX_PATCHES = 1024  # steps that DONE names; later ones count with the last
UNIT_ID_SIZE = 3
_TOKEN_SIZE = 4


class Kind(IntEnum):
    """Kinds below 16 come from the sender of the transfer, the others from its receiver."""

    OPEN = 1
    TOKENS = 2
    GENERATE = 3
    START = 4
    UNIT = 5
    ACCEPTED = 16
    REFUSED = 17
    REPORT = 18
    DECODING = 19
    TEXT = 20
    SCORES = 21
    DONE = 22
    FAILED = 23


class Role(StrEnum):
    """Which end of the transfer a reader works for."""

    SENDER = "sender"
    RECEIVER = "receiver"


_Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 62) - 1)]
_Signed = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=(1 << 62) - 1)]
_Token = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
# Both bounds also exclude NaN and the infinities.
_Clock = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
_Reason = Annotated[str, msgspec.Meta(max_length=MAX_REASON)]
_Credential = Annotated[str, msgspec.Meta(max_length=MAX_CREDENTIAL)]
_Step = Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS + 1)]
_Units = Annotated[int, msgspec.Meta(ge=1, le=MAX_UNITS)]
_Scores = Annotated[tuple[_Token, ...], msgspec.Meta(max_length=MAX_SCORE_TOKENS)]


class _Body(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A message whose body is a MessagePack array of its fields, in order."""


class Open(_Body, frozen=True):
    """First message: the transfer. `remaining_us` counts from the arrival of this message, as in MANIFEST.

    `manifest` is the encoded manifest, equal to the one in MANIFEST frames. `mode`: units come as symbols, in frames of
    the extension, or as UNIT messages on this stream. `token` is the credential, empty = none. `late_us` asks to take
    symbols for so long after the freeze; 0 = no, and then not written.
    """

    remaining_us: _Count
    manifest: bytes
    mode: Literal["symbols", "stream"]
    token: _Credential = ""
    late_us: _Count = 0

    def __repr__(self) -> str:
        hidden = f"token: {_hidden(self.token)}, late_us={self.late_us}"
        return f"Open(remaining_us={self.remaining_us}, manifest={self.manifest!r}, mode={self.mode!r}, {hidden})"


class Generate(_Body, frozen=True):
    """What to do with the cache: continue after the prompt.

    The prompt is `prompt_tokens`, or the text `prompt` for the receiver to tokenise where that is empty. `stream` asks
    for TEXT as tokens appear instead of at the end. `score_tokens` are ids along which the receiver returns its
    teacher-forced top-1 predictions in SCORES; empty = none. In the opening of a transfer `handle` is 0 and `token`
    empty; as the first message of a stream of its own, for a later turn, they say which cache and by what right.
    """

    prompt: Annotated[str, msgspec.Meta(max_length=MAX_PROMPT)] = ""
    prompt_tokens: Annotated[tuple[_Token, ...], msgspec.Meta(max_length=MAX_PROMPT_TOKENS)] = ()
    max_new_tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS)] = 0
    stream: bool = True
    score_tokens: _Scores = ()
    handle: _Count = 0
    token: _Credential = ""

    def __repr__(self) -> str:
        return (
            f"Generate(prompt={self.prompt!r}, prompt_tokens={self.prompt_tokens!r}, "
            f"max_new_tokens={self.max_new_tokens}, stream={self.stream}, score_tokens={self.score_tokens!r}, "
            f"handle={self.handle}, token: {_hidden(self.token)})"
        )


class Accepted(_Body, frozen=True):
    """The transfer is accepted; `handle` names the cache for later turns."""

    handle: _Count


class Refused(_Body, frozen=True):
    """The transfer is refused; `code` is one of AppCode, or a later addition."""

    code: _Count
    reason: _Reason


class Report(_Body, frozen=True):
    """What the receiver had when it froze. Bit i of byte j of a bitmap stands for id 8j + i.

    `frozen_early_us` is how long before its own deadline it froze, negative = after. `frozen_clock_s` is its monotonic
    clock then: comparable with DECODING, and with the sender's clock only on one host.
    """

    status: AckStatus
    frozen_early_us: _Signed
    frozen_clock_s: _Clock
    known: bytes
    """Symbols received or recovered, by sid."""
    complete: Annotated[bytes, msgspec.Meta(max_length=MAX_UNITS // 8)]
    """Units complete with a correct digest, by unit id."""
    corrupt: _Count
    """Units dropped because their digest was wrong."""
    recovered: bytes
    """Symbols known by decoding and not received since, by sid."""
    recovered_digest: _Count
    """Low 62 bits of xxh3_64 over these symbols in the order of their sids: the sender checks the code with it."""
    repairs_useful: _Count
    repairs_useless: _Count
    repairs_late: _Count


class Decoding(_Body, frozen=True):
    """The first decoding step has begun; the clock is that of REPORT.

    `missing_used` is what was done about missing rows where "recompute" was asked for: that, or "mask" where there was
    no time. In all other transfers it is empty and not written: readers of earlier releases refuse a third element.
    """

    started_after_freeze_us: _Count
    clock_s: _Clock
    missing_used: Annotated[str, msgspec.Meta(max_length=MAX_MODE)] = ""


class Text(_Body, frozen=True):
    """Generated text. `index` counts the new tokens from 0; `token` is -1 for text held back until the end."""

    text: Annotated[str, msgspec.Meta(max_length=MAX_TEXT)]
    token: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 32) - 1)]
    index: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS)]


class Scores(_Body, frozen=True):
    """Top-1 prediction at each position of GENERATE's `score_tokens`."""

    predictions: _Scores


class Done(_Body, frozen=True):
    """Generation ended: why ("length", "stop", ...) and after how many new tokens.

    `patched`: (step, units) of late repair, steps ascending; None where it was not granted, and then not written.
    """

    reason: Annotated[str, msgspec.Meta(max_length=64)]
    tokens: Annotated[int, msgspec.Meta(ge=0, le=MAX_NEW_TOKENS)]
    patched: Annotated[tuple[tuple[_Step, _Units], ...], msgspec.Meta(max_length=MAX_PATCHES)] | None = None


class Failed(_Body, frozen=True):
    """An accepted transfer cannot go on; `code` as in REFUSED."""

    code: _Count
    reason: _Reason


@dataclass(frozen=True, slots=True)
class Tokens:
    """The token ids from position 0 on, as little-endian 32-bit numbers."""

    data: bytes

    @classmethod
    def from_ids(cls, ids: Sequence[int] | npt.NDArray[np.integer]) -> Tokens:
        """Pack `ids`, each 0..2^32-1; raises `LocalError` otherwise."""
        values = np.asarray(ids)
        if values.size == 0:
            return cls(b"")
        if values.ndim != 1 or values.dtype.kind not in "iu" or values.min() < 0 or values.max() >= 1 << 32:
            raise LocalError("token ids are a sequence of ints of 32 bits")
        return cls(values.astype("<u4").tobytes())

    def array(self) -> npt.NDArray[np.uint32]:
        """The token ids, as a read-only view of `data`."""
        return np.frombuffer(self.data, dtype="<u4")


@dataclass(frozen=True, slots=True)
class Start:
    """The opening is complete: the receiver may judge it."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit, digest included; in mode "stream" only."""

    unit: int
    data: bytes | memoryview


Message = (
    Open | Tokens | Generate | Start | Unit
    | Accepted | Refused | Report | Decoding | Text | Scores | Done | Failed
)  # fmt: skip

_STRUCTS: dict[Kind, type[_Body]] = {
    Kind.OPEN: Open,
    Kind.GENERATE: Generate,
    Kind.ACCEPTED: Accepted,
    Kind.REFUSED: Refused,
    Kind.REPORT: Report,
    Kind.DECODING: Decoding,
    Kind.TEXT: Text,
    Kind.SCORES: Scores,
    Kind.DONE: Done,
    Kind.FAILED: Failed,
}
_KINDS = {body: kind for kind, body in _STRUCTS.items()}
_DECODERS = {kind: msgspec.msgpack.Decoder(body) for kind, body in _STRUCTS.items()}
_encoder = msgspec.msgpack.Encoder()

# The order of messages, as data: what may come first, and what each message changes.
# The answer has no fixed order but that of its end: its parts come from the network side and from the model side.
_FIRST = {
    Role.RECEIVER: frozenset({Kind.OPEN, Kind.GENERATE}),
    Role.SENDER: frozenset(kind for kind in Kind if kind >= Kind.ACCEPTED),
}
_OPENING = frozenset({Kind.TOKENS, Kind.GENERATE, Kind.START})
_NOTHING: frozenset[Kind] = frozenset()


class MessageReader:
    """Reads one direction of a transfer stream.

    `role` is the end that reads: a RECEIVER reads the stream type and the sender's messages, a SENDER the receiver's.
    A body is stored only when its kind is expected at this point and its length within the kind's limit, so memory is
    bounded by the largest message. Every fault is a `PeerError` with the application code MESSAGE_ERROR, after which
    the reader repeats it.
    """

    def __init__(self, limits: Limits, role: Role) -> None:
        self._limits = limits
        self._longest = _longest_bodies(limits)
        self._expected = _FIRST[role]
        self._needs_preamble = role is Role.RECEIVER
        self._needs_start = role is Role.RECEIVER
        self._mode: str = "symbols"
        self._varint = bytearray()
        self._kind: Kind | None = None
        self._length: int | None = None
        self._body = bytearray()
        self._error: PeerError | None = None

    @property
    def buffered(self) -> int:
        """Bytes of an unfinished message that the reader holds."""
        return len(self._varint) + len(self._body)

    def feed(self, data: bytes | memoryview) -> list[Message]:
        """The messages that `data`, the next piece of the stream, completes. Keeps no reference to `data`.

        Raises `PeerError`; messages completed by the same piece are then lost, the connection being closed anyway.
        """
        if self._error is not None:
            raise self._error
        try:
            return self._feed(memoryview(data))
        except PeerError as error:
            self._error = error
            raise

    def finish(self) -> None:
        """The stream has ended (FIN). Raises `PeerError` inside a message, or when the opening is not complete."""
        if self._error is not None:
            raise self._error
        if self._needs_preamble or self._kind is not None or self._varint:
            self._error = _fault("the stream ended inside a message")
        elif self._needs_start:
            self._error = _fault("the stream ended before START")
        if self._error is not None:
            raise self._error

    def _feed(self, data: memoryview) -> list[Message]:
        messages: list[Message] = []
        pos = 0
        while True:
            if self._kind is None or self._length is None:
                value, pos = self._read_varint(data, pos)
                if value is None:
                    return messages
                self._take_header(value)
                continue
            end = pos + self._length - len(self._body)
            if end > len(data):
                self._body += data[pos:]
                return messages
            body = data[pos:end]
            if self._body:
                self._body += body
                body = memoryview(self._body)
                self._body = bytearray()
            message = _parse(self._kind, body)
            self._judge(self._kind, message)
            messages.append(message)
            self._kind = self._length = None
            pos = end

    def _read_varint(self, data: memoryview, pos: int) -> tuple[int | None, int]:
        # A varint may be cut anywhere; at most 8 bytes wait here.
        while pos < len(data):
            self._varint.append(data[pos])
            pos += 1
            if len(self._varint) == 1 << (self._varint[0] >> 6):
                value, _ = varint.decode(bytes(self._varint), 0)
                self._varint.clear()
                return value, pos
        return None, pos

    def _take_header(self, value: int) -> None:
        if self._needs_preamble:
            if value != STREAM_TYPE:
                raise _fault(f"stream type 0x{value:x} instead of 0x{STREAM_TYPE:x}")
            self._needs_preamble = False
        elif self._kind is None:
            if value not in self._longest:
                raise _fault(f"unknown kind {value}")
            kind = Kind(value)
            if kind not in self._expected:
                raise _fault(f"{kind.name} out of order")
            self._kind = kind
        else:
            longest = self._longest[self._kind]
            if value > longest:
                raise _fault(f"{self._kind.name} of {value} bytes, at most {longest} are accepted")
            self._length = value

    def _judge(self, kind: Kind, message: Message) -> None:
        """Apply the limits that depend on configuration, and move on in the order of messages."""
        if isinstance(message, Open):
            if len(message.manifest) > self._limits.max_manifest_bytes:
                raise _fault("OPEN with a manifest above the limit")
            self._mode = message.mode
            self._expected = _OPENING
        elif kind is Kind.START:
            self._needs_start = False
            self._expected = frozenset({Kind.UNIT}) if self._mode == "stream" else _NOTHING
        elif kind is Kind.GENERATE and Kind.OPEN in self._expected:
            self._expected = frozenset({Kind.START})  # a later turn, on a stream of its own
        elif kind in (Kind.TOKENS, Kind.GENERATE, Kind.ACCEPTED):
            self._expected -= {kind}
        elif kind in (Kind.REFUSED, Kind.FAILED):
            self._expected = _NOTHING
        elif isinstance(message, Report) and (
            max(len(message.known), len(message.recovered)) > _bitmap_size(self._limits.max_symbols)
        ):
            raise _fault("REPORT with more symbols than a transfer may have")


def encode_message(message: Message) -> bytes:
    """The message with kind and length.

    The reason of REFUSED and FAILED is for people and passes through `one_line`, so that an error can always be told.
    Raises `LocalError` when a reader with any limits would call the message malformed.
    """
    if isinstance(message, Tokens):
        kind, parts = Kind.TOKENS, [message.data]
    elif isinstance(message, Start):
        kind, parts = Kind.START, []
    elif isinstance(message, Unit):
        if not 0 <= message.unit < MAX_UNITS:
            raise LocalError(f"unit {message.unit} does not fit 24 bits")
        kind, parts = Kind.UNIT, [message.unit.to_bytes(UNIT_ID_SIZE, "big"), bytes(message.data)]
    else:
        if isinstance(message, Refused | Failed):
            message = msgspec.structs.replace(message, reason=one_line(message.reason))
        kind, parts = _KINDS[type(message)], [_encoder.encode(_fields(message))]
    if kind is not Kind.UNIT:
        try:
            _parse(kind, memoryview(b"".join(parts)))
        except PeerError as error:
            raise LocalError(error.reason) from error
    length = sum(map(len, parts))
    return b"".join((varint.encode(kind), varint.encode(length), *parts))


def _fields(message: _Body) -> _Body | tuple[object, ...]:
    """Without a last field that says nothing, where readers of earlier releases refuse one."""
    fields = msgspec.structs.astuple(message)
    return fields[:-1] if isinstance(message, Open | Decoding | Done) and fields[-1] in (0, "", None) else message


def one_line(text: str, limit: int = MAX_REASON) -> str:
    """`text` made fit for a reason: one printable line of at most `limit` characters."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return line if len(line) <= limit else line[: limit - 1] + "…"


def _parse(kind: Kind, body: memoryview) -> Message:
    if kind is Kind.UNIT:
        if len(body) < UNIT_ID_SIZE:
            raise _fault("UNIT without a unit id")
        return Unit(int.from_bytes(body[:UNIT_ID_SIZE], "big"), bytes(body[UNIT_ID_SIZE:]))
    if kind is Kind.TOKENS:
        if len(body) % _TOKEN_SIZE:
            raise _fault(f"TOKENS of {len(body)} bytes, not a multiple of {_TOKEN_SIZE}")
        return Tokens(bytes(body))
    if kind is Kind.START:
        if body:
            raise _fault("START with a body")
        return Start()
    try:
        message: Message = _DECODERS[kind].decode(body)  # type: ignore[assignment]
    except msgspec.MsgspecError as error:
        raise _fault(f"{kind.name}: {error}") from error
    # Reasons reach logs and terminals.
    if isinstance(message, Refused | Failed | Done) and not message.reason.isprintable():
        raise _fault(f"{kind.name}: a reason that is not printable")
    if isinstance(message, Decoding) and not message.missing_used.isprintable():
        raise _fault("DECODING: a mode that is not printable")
    return message


def _longest_bodies(limits: Limits) -> dict[Kind, int]:
    """Bytes of the longest body of each kind: characters take up to 4, token ids up to 5, other fields less than 64."""
    rest = 64
    return {
        Kind.OPEN: limits.max_manifest_bytes + 4 * MAX_CREDENTIAL + rest,
        Kind.TOKENS: _TOKEN_SIZE * limits.max_tokens,
        Kind.GENERATE: 4 * (MAX_PROMPT + MAX_CREDENTIAL) + 5 * (MAX_PROMPT_TOKENS + MAX_SCORE_TOKENS) + rest,
        Kind.START: 0,
        Kind.UNIT: UNIT_ID_SIZE + limits.max_unit_bytes,
        Kind.ACCEPTED: rest,
        Kind.REFUSED: 4 * MAX_REASON + rest,
        Kind.REPORT: 2 * _bitmap_size(limits.max_symbols) + MAX_UNITS // 8 + 2 * rest,
        Kind.DECODING: 4 * MAX_MODE + rest,
        Kind.TEXT: 4 * MAX_TEXT + rest,
        Kind.SCORES: 5 * MAX_SCORE_TOKENS + rest,
        Kind.DONE: 4 * MAX_REASON + 11 * MAX_PATCHES + rest,
        Kind.FAILED: 4 * MAX_REASON + rest,
    }


def _hidden(token: str) -> str:
    # Messages end up in logs and tracebacks; a credential must not.
    return "given" if token else "none"


def _bitmap_size(bits: int) -> int:
    return (bits + 7) // 8


def _fault(reason: str) -> PeerError:
    return PeerError(AppCode.MESSAGE_ERROR, one_line(f"transfer stream: {reason}"), application=True)
