"""quic_pfec.preparation: what is taken for a cache, and what is refused before anybody waits for it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import quic_pfec
from quic_pfec import client
from quic_pfec.kv.layout import Layout
from quic_pfec.preparation import prepare

from .handoff_world import arrays


def test_the_public_name_is_the_function() -> None:
    assert quic_pfec.prepare is client.prepare is prepare


def test_auto_is_for_send_kv() -> None:
    with pytest.raises(ValueError, match="give it and the cache itself to send_kv"):
        prepare(arrays(1, 16), wire_dtype="auto")


def test_a_function_chooses_by_the_geometry() -> None:
    asked: list[Layout] = []

    def choose(layout: Layout) -> str:
        asked.append(layout)
        return "int8"

    assert prepare(arrays(2, 40), wire_dtype=choose).layout.wire_dtype == "int8"
    assert [(layout.wire_dtype, layout.tokens, len(layout.layers)) for layout in asked] == [("bf16", 40, 2)]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"first_token": "1"}, "first_token is the position"),
        ({"first_token": 99}, "the cache has 16 tokens"),
        ({"model": 5}, "model is a text"),
        ({"rope": 5}, "rope is a text"),
        ({"wire_dtype": lambda _: "int3"}, "wire_dtype must be one of"),
    ],
)
def test_mistakes_name_what_was_expected(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prepare(arrays(1, 16), **wrong)


def test_bf16_bits_and_fp16_arrays_are_taken() -> None:
    half = [(k.astype(np.float16), v.astype(np.float16)) for k, v in arrays(1, 16)]
    assert prepare(half, wire_dtype="fp16").layout.wire_dtype == "fp16"
    with pytest.raises(ValueError, match="float64"):
        prepare([(k.astype(np.float64), v.astype(np.float64)) for k, v in arrays(1, 16)])
