"""The twin's own parts: damage that checksums miss. Its loop is tested beside the one in C, in test_link_emulator."""

from __future__ import annotations

import pytest

from quic_pfec.link.twin import damage

from .test_link_emulator import checksum_fits, udp


@pytest.mark.parametrize("version", [4, 6])
@pytest.mark.parametrize("length", [1, 2, 7, 1_000])
def test_every_damage_of_a_datagram_fits_its_checksum(version: int, length: int) -> None:
    packet = udp(bytes(i * 31 % 251 for i in range(length)), version)
    assert checksum_fits(packet)
    payload = len(packet) - length
    for offset in range(0, len(packet), 3):
        for mask in (1, 0x80, 0xFF):
            damaged = damage(packet, offset, mask)
            changed = [i for i, (a, b) in enumerate(zip(packet, damaged, strict=True)) if a != b]
            assert checksum_fits(damaged)
            assert payload + offset % length in changed
            assert all(i >= payload - 2 for i in changed)


def test_a_checksum_never_becomes_zero() -> None:
    """Zero would mean that there is none."""
    packet = next(p for n in range(1 << 16) if (p := udp(n.to_bytes(2, "big") + b"ab"))[26:28] == b"\x00\x01")
    for mask in range(1, 256):
        assert damage(packet, 1, mask)[26:28] != b"\x00\x00"
        assert checksum_fits(damage(packet, 1, mask))


def test_no_checksum_stays_none() -> None:
    packet = bytearray(udp(b"payload"))
    packet[26:28] = b"\x00\x00"
    damaged = damage(bytes(packet), 3, 0x10)
    assert damaged[26:28] == b"\x00\x00"
    assert damaged[31] == packet[31] ^ 0x10


@pytest.mark.parametrize(
    "packet",
    [
        b"\x45" + bytes(10),
        udp(b"data", protocol=6),
        udp(b"data")[:6] + b"\x20\x00" + udp(b"data")[8:],  # a fragment
        udp(b""),
        b"\x41" + udp(b"data")[1:],  # a header length that cannot be
    ],
    ids=["short", "tcp", "fragment", "empty", "header"],
)
def test_anything_else_is_damaged_where_it_is(packet: bytes) -> None:
    for offset in range(len(packet)):
        damaged = damage(packet, offset, 0x55)
        assert [i for i in range(len(packet)) if packet[i] != damaged[i]] == [offset]
