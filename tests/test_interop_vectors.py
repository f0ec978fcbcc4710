"""The published wire vectors are still what this implementation writes, reads and codes with."""

from __future__ import annotations

import json

import pytest

from interop import make_vectors
from quic_pfec.fec import codec, coefficients
from quic_pfec.kv.assemble import Assembler
from quic_pfec.kv.layout import LayerShape, Layout
from quic_pfec.wire import frames
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import WIRE_DTYPES

PUBLISHED = json.loads(make_vectors.PATH.read_text())
PARSERS = {
    "source": frames.parse_source,
    "repair": frames.parse_repair,
    "ack": frames.parse_pfec_ack,
    "manifest": frames.parse_manifest,
}


def test_the_published_vectors_are_what_is_written_now() -> None:
    assert make_vectors.vectors() == PUBLISHED


@pytest.mark.parametrize("name", sorted(PUBLISHED["frames"]))
def test_published_bytes_parse_to_the_frame(name: str) -> None:
    data = bytes.fromhex(PUBLISHED["frames"][name]["bytes"])
    frame, used = PARSERS[name.partition("_")[0]](data, frames.FRAME_TYPE_SIZE, Limits())  # type: ignore[operator]
    assert used == len(data)
    assert frame.body() == make_vectors.all_frames()[name].body()


@pytest.mark.parametrize("wire_dtype", sorted(PUBLISHED["units"]))
def test_published_units_become_the_published_cache(wire_dtype: str) -> None:
    layout = Layout((LayerShape(2, 5),) * 2, 3, block_tokens=2, wire_dtype=wire_dtype)
    published = PUBLISHED["units"][wire_dtype]
    assembler = Assembler(layout, "fp32")
    assert len(published["units"]) == layout.unit_count
    for unit, data in published["units"].items():
        assert assembler.write_unit(int(unit), bytes.fromhex(data))
    for pair, parts in zip(assembler.finish("zero").arrays.layers, published["layers"], strict=True):
        assert [part.astype(">u4").tobytes().hex() for part in pair] == parts


def test_every_wire_dtype_is_published() -> None:
    assert set(PUBLISHED["units"]) == set(WIRE_DTYPES)


@pytest.mark.parametrize("expand", [coefficients.expand, codec.expand], ids=["twin", "native"])
def test_published_coefficients(expand) -> None:  # type: ignore[no-untyped-def]
    for header, published in zip(make_vectors.headers(), PUBLISHED["coefficients"], strict=True):
        terms = expand(*make_vectors._fields(header))
        assert [list(term) for term in terms] == published["terms"]
    # docs/wire.md's own examples
    assert PUBLISHED["coefficients"][0]["terms"] == [[0, 28], [2, 84], [4, 45], [7, 197]]
