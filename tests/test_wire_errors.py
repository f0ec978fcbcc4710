"""The numbers on the wire, and how errors read."""

from __future__ import annotations

import pytest

from quic_pfec.wire.errors import AppCode, ErrorCode, LocalError, PeerError, Refusal


def test_transport_codes_are_those_of_rfc_9000() -> None:
    assert {code.name: int(code) for code in ErrorCode} == {
        "FLOW_CONTROL_ERROR": 0x3,
        "STREAM_LIMIT_ERROR": 0x4,
        "FRAME_ENCODING_ERROR": 0x7,
        "TRANSPORT_PARAMETER_ERROR": 0x8,
        "PROTOCOL_VIOLATION": 0xA,
    }


def test_application_codes_are_stable() -> None:
    names = [
        "NO_ERROR",
        "KV_MANIFEST",
        "KV_INTEGRITY",
        "BUSY",
        "UNAUTHORIZED",
        "MODEL_MISMATCH",
        "TOKENS_MISMATCH",
        "DEADLINE",
        "TOO_LARGE",
        "UNSUPPORTED",
        "CANCELLED",
        "INTERNAL",
        "MESSAGE_ERROR",
        "UNKNOWN_HANDLE",
    ]
    assert [(code.name, int(code)) for code in AppCode] == [(name, 0x100 + i) for i, name in enumerate(names)]


def test_errors_read_as_one_line() -> None:
    assert str(PeerError(0xA, "no good", frame_type=5)) == "no good (transport error 0xa)"
    assert str(PeerError(0x101, "no good", application=True)) == "no good (application error 0x101)"
    assert str(Refusal(AppCode.BUSY, "four transfers run")) == "four transfers run (busy)"


def test_misuse_is_a_value_error() -> None:
    with pytest.raises(ValueError):
        raise LocalError("misuse")
