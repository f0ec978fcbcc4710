"""The transport parameter by which both sides agree to speak the extension (docs/wire.md §2).

An unknown frame type closes a QUIC connection (RFC 9000 §12.4), so nothing may be sent before this parameter was seen.
Each endpoint states what it accepts as a receiver; a sender stays within the peer's values and its own.
"""

from __future__ import annotations

from dataclasses import dataclass

from quic_pfec.wire import varint
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError
from quic_pfec.wire.limits import (
    MAX_INITIAL_CREDIT,
    MAX_SYMBOL_SIZE,
    MAX_TRANSFERS,
    MAX_WINDOW,
    MIN_SYMBOL_SIZE,
    Limits,
)

__all__ = ["PARAMETER_ID", "SCHEME_LATE", "SCHEME_RLC", "VERSION", "PfecParameter", "find_parameter", "parse_parameter"]

PARAMETER_ID = 0x3A18E740
"""Experimental and unregistered."""
VERSION = 1
SCHEME_RLC = 1 << 0
"""Scheme bit 0: random linear code of fixed degree over GF(2^8) (docs/wire.md §5)."""
SCHEME_LATE = 1 << 1
"""Scheme bit 1: hand-offs may ask for late repair (docs/wire.md §8). Endpoints that do not know it ignore it."""

_DEFAULT = Limits()


@dataclass(frozen=True, slots=True)
class PfecParameter:
    """What an endpoint accepts as a receiver. Sizes in bytes, window and credit in symbols."""

    version: int = VERSION
    schemes: int = SCHEME_RLC
    max_symbol_size: int = _DEFAULT.max_symbol_size
    max_window: int = _DEFAULT.max_window
    max_degree: int = _DEFAULT.max_degree
    max_transfers: int = _DEFAULT.max_transfers
    initial_credit: int = _DEFAULT.initial_credit

    @classmethod
    def from_limits(cls, limits: Limits, *, late: bool = False) -> PfecParameter:
        """The parameter that announces `limits`; `late`: hand-offs may ask for late repair."""
        return cls(
            schemes=SCHEME_RLC | (SCHEME_LATE if late else 0),
            max_symbol_size=limits.max_symbol_size,
            max_window=limits.max_window,
            max_degree=limits.max_degree,
            max_transfers=limits.max_transfers,
            initial_credit=limits.initial_credit,
        )

    @property
    def takes_late(self) -> bool:
        """Whether a hand-off may ask for late repair."""
        return bool(self.schemes & SCHEME_LATE)

    def capped(self, limits: Limits) -> PfecParameter:
        """What a sender with `limits` may use towards the peer that announced this parameter.

        Transfers and credit stand as announced: they are the peer's memory, and PFEC_ACK counts on from that credit.
        """
        window = min(self.max_window, limits.max_window)
        return PfecParameter(
            schemes=self.schemes & (SCHEME_RLC | SCHEME_LATE),
            max_symbol_size=min(self.max_symbol_size, limits.max_symbol_size),
            max_window=window,
            max_degree=min(self.max_degree, limits.max_degree, window),
            max_transfers=self.max_transfers,
            initial_credit=self.initial_credit,
        )

    def serialize(self) -> bytes:
        """The parameter's value: seven varints. Raises `LocalError` when a field is outside its legal range."""
        problem = _problem(self)
        if self.version != VERSION or problem is not None:
            raise LocalError(problem or f"version {self.version} is not written")
        return b"".join(
            varint.encode(value)
            for value in (
                self.version,
                self.schemes,
                self.max_symbol_size,
                self.max_window,
                self.max_degree,
                self.max_transfers,
                self.initial_credit,
            )
        )


def parse_parameter(data: bytes) -> PfecParameter | None:
    """Read the value of the parameter; None when the extension stays off.

    Off means another version (whose layout is then not looked at) or no scheme in common. Raises `PeerError`
    TRANSPORT_PARAMETER_ERROR when the value is truncated, has trailing bytes, or holds a number out of range.
    """
    try:
        version, pos = varint.decode(data, 0)
        if version != VERSION:
            return None
        values = []
        for _ in range(6):
            value, pos = varint.decode(data, pos)
            values.append(value)
    except PeerError as error:
        raise _invalid("truncated") from error
    if pos != len(data):
        raise _invalid("trailing bytes")
    parameter = PfecParameter(version, *values)
    problem = _problem(parameter)
    if problem is not None:
        raise _invalid(problem)
    return parameter if parameter.schemes & SCHEME_RLC else None


def find_parameter(block: bytes) -> bytes | None:
    """The value of our parameter in a block of transport parameters (RFC 9000 §18); None when it is absent.

    Exists because a dictionary of parameters hides duplicates. Raises `PeerError` TRANSPORT_PARAMETER_ERROR when ours
    occurs twice (RFC 9000 §7.4) or the block is truncated.
    """
    found: bytes | None = None
    pos = 0
    while pos < len(block):
        try:
            identifier, pos = varint.decode(block, pos)
            length, pos = varint.decode(block, pos)
        except PeerError as error:
            raise _invalid("truncated") from error
        if length > len(block) - pos:
            raise _invalid("truncated")
        if identifier == PARAMETER_ID:
            if found is not None:
                raise _invalid("duplicated")
            found = block[pos : pos + length]
        pos += length
    return found


def _problem(parameter: PfecParameter) -> str | None:
    for name, value, low, high in (
        ("schemes", parameter.schemes, 0, varint.MAX),
        ("max symbol size", parameter.max_symbol_size, MIN_SYMBOL_SIZE, MAX_SYMBOL_SIZE),
        ("max window", parameter.max_window, 1, MAX_WINDOW),
        ("max degree", parameter.max_degree, 1, parameter.max_window),
        ("max transfers", parameter.max_transfers, 0, MAX_TRANSFERS),
        ("initial credit", parameter.initial_credit, 1, MAX_INITIAL_CREDIT),
    ):
        if not low <= value <= high:
            return f"{name} must be {low} to {high}, not {value}"
    return None


def _invalid(problem: str) -> PeerError:
    return PeerError(ErrorCode.TRANSPORT_PARAMETER_ERROR, f"transport parameter pfec: {problem}")
