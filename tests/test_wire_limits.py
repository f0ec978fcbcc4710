"""Limits refuse contradictions."""

from __future__ import annotations

import dataclasses

import pytest

from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import MAX_FRAGMENTS, MAX_SYMBOL_SIZE, UNIT_HEADER_SIZE, Limits


@pytest.mark.parametrize(
    "changes",
    [
        {"max_symbol_size": 63},
        {"max_symbol_size": 16_384},
        {"max_window": 0},
        {"max_window": 16_385},
        {"max_degree": 0},
        {"max_degree": 65, "max_window": 64},
        {"max_transfers": 65},
        {"max_symbols": 0},
        {"max_symbols": (1 << 30) + 1},
        {"initial_credit": 0},
        {"initial_credit": (1 << 20) + 1, "max_symbols": 1 << 21},
        {"initial_credit": 4096, "max_symbols": 4095},
        {"early_symbols_per_connection": 70_000},
        {"max_transfer_bytes": 3 << 30},
        {"max_connection_bytes": 9 << 30},
        {"max_ack_ranges": 65},
        {"max_ack_ranges": 0},
        {"max_deadline_us": 999},
        {"max_manifest_bytes": 0},
        {"max_layers": 0},
        {"max_kv_heads": 0},
        {"max_head_dim": 0},
        {"max_tokens": 0},
        {"max_unknown": 0},
        {"row_operations_per_repair": 0},
        {"max_openings": 0},
        {"max_unit_bytes": 0},
        {"min_deadline_us": -1},
        {"max_window": 4096.0},
        {"max_transfers": True},
        {"max_tokens": None},
    ],
)
def test_contradictions_raise(changes: dict[str, object]) -> None:
    with pytest.raises(LocalError):
        Limits(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_degree": 64, "max_unknown": 64},
        {"max_transfers": 0},
        {"max_symbol_size": 64, "max_window": 1, "max_degree": 1, "initial_credit": 1},
        {"max_symbol_size": 16_383, "max_window": 16_384, "max_degree": 16_384},
        {"max_symbols": 1 << 30, "initial_credit": 1 << 20},
    ],
)
def test_legal_values_stand(changes: dict[str, int]) -> None:
    limits = Limits(**changes)
    assert all(getattr(limits, name) == value for name, value in changes.items())


def test_limits_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Limits().max_window = 1  # type: ignore[misc]


def test_largest_unit_fits_the_stream_limit() -> None:
    assert Limits().max_unit_bytes >= MAX_FRAGMENTS * (MAX_SYMBOL_SIZE - UNIT_HEADER_SIZE)
