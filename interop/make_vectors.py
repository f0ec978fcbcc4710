"""Writes interop/vectors.json: wire bytes that every implementation of docs/wire.md must read and write."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy as np

from quic_pfec.fec.coefficients import expand
from quic_pfec.fec.rfc8681 import coefficients
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.prepared import prepare_arrays
from quic_pfec.wire import frames, varint
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import WIRE_DTYPES
from quic_pfec.wire.parameter import PARAMETER_ID, PfecParameter

PATH = Path(__file__).parent / "vectors.json"
RFC8681_PATH = Path(__file__).parent / "rfc8681.json"
SYMBOL = bytes(range(64))


def headers() -> list[frames.RepairHeader]:
    """Coding sets: tail alone, head alone, head before a gap and a tail, dense."""
    return [
        frames.RepairHeader(0, 0, 0, 4, 0, b"", 0, 8),
        frames.RepairHeader(0, 1, 40, 3, 5, bytes([0b11101]), 0, 0),
        frames.RepairHeader(4, 7, 1000, 6, 19, bytes.fromhex("190004"), 101, 178),
        frames.RepairHeader(8, 2**32 - 1, 70_000, 64, 0, b"", 0, 40),
        frames.RepairHeader(2**30 + 4, 3, 5, 48, 9, bytes.fromhex("0101"), 0, 300),
    ]


def all_frames() -> dict[str, Any]:
    """One frame of each kind and more of the kinds with variants, by name."""
    made: dict[str, Any] = {
        "source": frames.SourceFrame(0, 0, SYMBOL),
        "source_late": frames.SourceFrame(4, 123_456, SYMBOL),
        "ack_empty": frames.PfecAckFrame(0, 0, frames.AckStatus.RUNNING, 0, 0, 0, 4096, 350_000, 0, ()),
        "ack_ranges": frames.PfecAckFrame(
            4, 9, frames.AckStatus.FROZEN, 100, 60, 7, 8640, 0, 1234, ((103, 110), (112, 113), (120, 160))
        ),
        "manifest": frames.ManifestFrame(0, 150, 0, 349_000, bytes(range(150))),
        "manifest_part": frames.ManifestFrame(4, 3000, 1024, 1, bytes(256)),
    }
    made |= {f"repair_{index}": frames.RepairFrame(header, SYMBOL) for index, header in enumerate(headers())}
    return made


TYPES = {"source": frames.SOURCE, "repair": frames.REPAIR, "ack": frames.PFEC_ACK, "manifest": frames.MANIFEST}


def plain(frame: Any) -> dict[str, Any]:
    """The fields of a frame or header as JSON values, bytes in hexadecimal."""

    def value(item: Any) -> Any:
        if isinstance(item, bytes):
            return item.hex()
        if isinstance(item, tuple):
            return [value(part) for part in item]
        return plain(item) if is_dataclass(item) else int(item)

    return {field.name: value(getattr(frame, field.name)) for field in fields(frame)}


def cache() -> list[tuple[Any, Any]]:
    """Two layers of two heads, three rows of five: small values, large ones, a channel that is constant, zeros."""
    rows = np.arange(2 * 2 * 3 * 5, dtype=np.float32).reshape(2, 2, 3, 5)
    keys, values = (rows * 37 % 101 - 50) / 16, (rows * 53 % 97 - 48) / 64
    keys[..., 1], keys[..., 2], values[:, 1, 1] = 100.25, keys[..., 2] * 1024, 0
    return [(keys[0], values[0]), (keys[1] * -3, values[1] * 1e-6)]


def units() -> dict[str, Any]:
    """Each unit of `cache()` in each wire dtype with digest, and its keys and values, bits of fp32, that come of it."""
    made: dict[str, Any] = {}
    for wire_dtype in WIRE_DTYPES:
        pairs, dtype = cache(), "fp32"
        if wire_dtype == "fp16":
            pairs, dtype = [(keys.astype(np.float16), values.astype(np.float16)) for keys, values in pairs], "fp16"
        kv = prepare_arrays(pairs, dtype=dtype, model="m", wire_dtype=wire_dtype, order="fifo", block_tokens=2)
        assembler = Assembler(kv.layout, "fp32")
        sent = [kv.unit_at(position) for position in range(kv.layout.unit_count)]
        for unit, data in sent:
            assembler.write_unit(unit, data)
        layers = assembler.finish("mask").arrays.layers
        made[wire_dtype] = {
            "units": {str(unit): data.hex() for unit, data in sent},
            "layers": [[part.astype(">u4").tobytes().hex() for part in pair] for pair in layers],
        }
    return made


def vectors() -> dict[str, Any]:
    """Everything, as plain values."""
    value = PfecParameter.from_limits(Limits()).serialize()
    return {
        "transport_parameter": {"id": f"{PARAMETER_ID:#x}", "value": value.hex()},
        "frames": {
            name: {
                "fields": plain(frame),
                "bytes": (varint.encode(TYPES[name.partition("_")[0]]) + frame.body()).hex(),
            }
            for name, frame in all_frames().items()
        },
        "coefficients": [
            {"header": plain(h), "terms": [list(term) for term in expand(*_fields(h))]} for h in headers()
        ],
        "units": units(),
    }


def rfc8681_vectors() -> list[dict[str, Any]]:
    """Coefficients of the RFC 8681 cross-check, which the wire never carries."""
    cases = ((1, 20, 15, 8), (1, 20, 7, 8), (0, 20, 15, 8), (65_535, 32, 3, 8), (1, 20, 7, 1), (77, 48, 0, 8))
    return [
        {"repair_key": key, "window": window, "dt": dt, "m": m, "coefficients": coefficients(key, window, dt, m)}
        for key, window, dt, m in cases
    ]


def _fields(h: frames.RepairHeader) -> tuple[int, int, int, int, int, bytes, int, int]:
    return (
        h.transfer_id, h.repair_number, h.first_sid, h.degree, h.head_span, h.head, h.tail_offset, h.tail_span,
    )  # fmt: skip


if __name__ == "__main__":
    PATH.write_text(json.dumps(vectors(), indent=1) + "\n")
    RFC8681_PATH.write_text(json.dumps(rfc8681_vectors()) + "\n")
    print(PATH.name, RFC8681_PATH.name, "written")
