"""The transport parameter: bytes, negotiation, and what switches the extension off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.wire import varint
from quic_pfec.wire.errors import ErrorCode, LocalError, PeerError
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.parameter import PARAMETER_ID, PfecParameter, find_parameter, parse_parameter

DEFAULT = bytes.fromhex("01 01 4586 5000 40ff 04 5000")


@st.composite
def parameters(draw: st.DrawFn) -> PfecParameter:
    window = draw(st.integers(1, 16_384))
    return PfecParameter(
        schemes=draw(st.integers(0, varint.MAX)) | 1,
        max_symbol_size=draw(st.integers(64, 16_383)),
        max_window=window,
        max_degree=draw(st.integers(1, window)),
        max_transfers=draw(st.integers(0, 64)),
        initial_credit=draw(st.integers(1, 1 << 20)),
    )


def encoded(*values: int) -> bytes:
    return b"".join(map(varint.encode, values))


def test_default_bytes() -> None:
    assert PfecParameter().serialize() == DEFAULT
    assert PfecParameter.from_limits(Limits()) == PfecParameter()
    assert varint.encode(PARAMETER_ID).hex() == "ba18e740"
    assert (PARAMETER_ID - 27) % 31 != 0  # those are reserved for greasing, RFC 9000 §18.1


@settings(deadline=None, max_examples=100)
@given(parameters())
def test_round_trip(parameter: PfecParameter) -> None:
    assert parse_parameter(parameter.serialize()) == parameter


def test_from_limits_announces_every_limit() -> None:
    limits = Limits(max_symbol_size=100, max_window=200, max_degree=30, max_transfers=5, initial_credit=600)
    assert PfecParameter.from_limits(limits) == PfecParameter(1, 1, 100, 200, 30, 5, 600)


@settings(deadline=None, max_examples=100)
@given(parameters())
def test_capped_is_within_both(parameter: PfecParameter) -> None:
    own = Limits(max_symbol_size=1000, max_window=100, max_degree=48, max_symbols=5000)
    used = parameter.capped(own)
    assert parse_parameter(used.serialize()) == used
    for name in ("max_symbol_size", "max_window", "max_degree"):
        assert getattr(used, name) <= min(getattr(parameter, name), getattr(own, name))
    assert used.initial_credit == parameter.initial_credit
    assert used.max_transfers == parameter.max_transfers


@pytest.mark.parametrize(
    "data",
    [
        encoded(0, 1, 1414, 4096, 255, 4, 4096),
        encoded(2, 1, 1414, 4096, 255, 4, 4096),
        encoded(2),
        encoded(varint.MAX) + b"\xff",
        encoded(1, 0, 1414, 4096, 255, 4, 4096),
        encoded(1, 2, 1414, 4096, 255, 4, 4096),
    ],
)
def test_other_version_or_scheme_means_off(data: bytes) -> None:
    assert parse_parameter(data) is None


def test_unknown_schemes_beside_ours_are_ignored() -> None:
    parameter = parse_parameter(encoded(1, 13, 1414, 4096, 255, 4, 4096))
    assert parameter is not None
    assert parameter.capped(Limits()).schemes == 1


def test_late_repair_is_a_bit_that_says_nothing_to_those_who_do_not_know_it() -> None:
    announced = PfecParameter.from_limits(Limits(), late=True)
    assert announced.serialize() == bytes.fromhex("01 03 4586 5000 40ff 04 5000")
    assert announced.takes_late
    assert announced.capped(Limits()).takes_late
    assert not PfecParameter().takes_late


@pytest.mark.parametrize(
    "parameter",
    [
        PfecParameter(version=2),
        PfecParameter(max_symbol_size=63),
        PfecParameter(max_degree=5000),
        PfecParameter(schemes=-1),
        PfecParameter(initial_credit=0),
    ],
)
def test_illegal_parameters_are_not_written(parameter: PfecParameter) -> None:
    with pytest.raises(LocalError):
        parameter.serialize()


def test_another_version_is_named() -> None:
    with pytest.raises(LocalError, match="version 2"):
        PfecParameter(version=2).serialize()


def test_found_among_others() -> None:
    mine = encoded(PARAMETER_ID, len(DEFAULT)) + DEFAULT
    other = encoded(4, 1) + b"\x05"
    assert find_parameter(b"") is None
    assert find_parameter(other) is None
    assert find_parameter(other + mine + other + other) == DEFAULT
    # The same number in its 8-byte form is the same parameter.
    assert find_parameter(varint.encode_fixed(PARAMETER_ID, 8) + encoded(0)) == b""


@settings(deadline=None, max_examples=300)
@given(st.binary(max_size=40) | st.binary(max_size=30).map(lambda tail: DEFAULT[:3] + tail))
def test_any_bytes_raise_only_peer_errors(data: bytes) -> None:
    for function in (parse_parameter, find_parameter):
        try:
            function(data)
        except PeerError as error:
            fault = (error.code, error.application)
        else:
            fault = (ErrorCode.TRANSPORT_PARAMETER_ERROR, False)
        assert fault == (ErrorCode.TRANSPORT_PARAMETER_ERROR, False)
