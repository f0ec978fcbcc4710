"""Places, memory and kept caches: counted, bounded, given back exactly once."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quic_pfec.kv import assemble
from quic_pfec.kv.prepared import prepare_arrays
from quic_pfec.quic import admission
from quic_pfec.quic.admission import Admissions, HandleStore
from quic_pfec.wire.errors import AppCode, Refusal
from quic_pfec.wire.limits import Limits
from quic_pfec.wire.manifest import QUANTISED, Manifest

from .handoff_world import prepared

KV = prepared(2, 32)
NBYTES = int(KV.layout.unit_sizes().sum())


def manifest() -> Manifest:
    return KV.manifest(KV.layout.symbol_size(), "mask")


def test_places_are_counted_and_given_back_once() -> None:
    admissions = Admissions(max_transfers=2)
    first, second = admissions.admit(manifest()), admissions.admit(manifest())
    assert first.handle != second.handle
    assert first.handle > 0
    assert (admissions.active, admissions.bytes) == (2, 2 * NBYTES)
    with pytest.raises(Refusal) as raised:
        admissions.admit(manifest())
    assert raised.value.code is AppCode.BUSY
    assert admissions.refused == 1
    first.release()
    first.release()
    assert (admissions.active, admissions.bytes) == (1, NBYTES)
    admissions.admit(manifest()).release()
    second.release()
    assert (admissions.active, admissions.bytes) == (0, 0)


def test_memory_is_limited_before_places_are_used_up() -> None:
    admissions = Admissions(max_transfers=9, max_bytes=NBYTES * 3 // 2)
    admissions.admit(manifest())
    with pytest.raises(Refusal) as raised:
        admissions.admit(manifest())
    assert raised.value.code is AppCode.BUSY


def test_what_can_never_fit_is_too_large_and_not_busy() -> None:
    with pytest.raises(Refusal) as raised:
        Admissions(max_bytes=NBYTES - 1).admit(manifest())
    assert raised.value.code is AppCode.TOO_LARGE


def test_a_wider_destination_counts_as_what_it_takes() -> None:
    admissions = Admissions()
    admissions.admit(manifest(), "fp32")
    assert admissions.bytes == 2 * NBYTES  # the wire has bf16


def test_a_quantised_cache_counts_as_what_it_becomes() -> None:
    elements = 2 * 2 * 40 * 8
    rows = [(np.ones((2, 40, 8), np.float32),) * 2]
    for wire_dtype in QUANTISED:
        kv = prepare_arrays(rows, dtype="fp32", model="test", wire_dtype=wire_dtype)  # type: ignore[arg-type]
        asked = kv.manifest(kv.layout.symbol_size(), "mask")
        for dtype, size, held in ((None, 4, "fp32"), ("bf16", 2, "bf16")):
            nbytes = elements * size + (kv.nbytes if wire_dtype == "progressive" else 0)
            admissions = Admissions(max_bytes=nbytes)
            assert admissions.admit(asked, dtype).assembler.dtype == held
            assert admissions.bytes == nbytes
            with pytest.raises(Refusal) as raised:
                Admissions(max_bytes=nbytes - 1).admit(asked, dtype)
            assert raised.value.code is AppCode.TOO_LARGE


def test_the_default_limit_of_memory_is_that_of_the_limits() -> None:
    assert Admissions().max_bytes == Limits().max_server_bytes


def test_running_out_of_memory_is_a_refusal_and_counts_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> assemble.Assembler:
        raise MemoryError

    monkeypatch.setattr(admission, "Assembler", fail)
    admissions = Admissions()
    with pytest.raises(Refusal) as raised:
        admissions.admit(manifest())
    assert raised.value.code is AppCode.BUSY
    assert (admissions.active, admissions.bytes) == (0, 0)


def test_a_later_turn_takes_a_place_and_no_memory() -> None:
    admissions = Admissions(max_transfers=1, max_bytes=NBYTES)
    release = admissions.enter()
    assert (admissions.active, admissions.bytes) == (1, 0)
    with pytest.raises(Refusal):
        admissions.admit(manifest())
    release()
    release()
    assert admissions.active == 0


def test_handles_expire_and_using_one_renews_it() -> None:
    store: HandleStore[str] = HandleStore(ttl_s=10, max_bytes=100)
    store.put(1, "one", 10, now=0.0)
    assert store.get(1, now=9.0) == "one"
    assert store.get(1, now=18.0) == "one"
    with pytest.raises(Refusal, match="unknown or has expired") as raised:
        store.get(1, now=28.0)
    assert raised.value.code is AppCode.UNKNOWN_HANDLE
    assert (len(store), store.bytes) == (0, 0)


def test_sweeping_frees_without_a_request() -> None:
    store: HandleStore[str] = HandleStore(ttl_s=10, max_bytes=100)
    store.put(1, "one", 10, now=0.0)
    store.sweep(9.9)
    assert len(store) == 1
    store.sweep(10.0)
    assert (len(store), store.bytes) == (0, 0)


def test_the_least_recently_used_handle_makes_room() -> None:
    store: HandleStore[str] = HandleStore(ttl_s=100, max_bytes=100)
    store.put(1, "one", 40, now=0.0)
    store.put(2, "two", 40, now=1.0)
    store.get(1, now=2.0)
    store.put(3, "three", 40, now=3.0)
    assert store.get(1, 4.0) == "one"
    assert store.get(3, 4.0) == "three"
    with pytest.raises(Refusal):
        store.get(2, 4.0)


def test_one_too_large_for_the_store_is_not_kept_and_replaces_its_older_self() -> None:
    store: HandleStore[str] = HandleStore(ttl_s=100, max_bytes=100)
    store.put(1, "small", 40, now=0.0)
    store.put(1, "large", 101, now=1.0)
    with pytest.raises(Refusal):
        store.get(1, 2.0)
    assert store.bytes == 0


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.integers(0, 8), st.booleans()), max_size=40))
def test_the_store_never_holds_more_than_its_cap(steps: list[tuple[int, int, int, bool]]) -> None:
    store: HandleStore[int] = HandleStore(ttl_s=10, max_bytes=100)
    sizes: dict[int, int] = {}
    now = 0.0
    for handle, nbytes, passed_s, put in steps:
        now += passed_s
        if put:
            store.put(handle, handle, nbytes, now)
            sizes[handle] = nbytes
        else:
            with contextlib.suppress(Refusal):
                assert store.get(handle, now) == handle
        assert 0 <= store.bytes <= 100
        assert store.bytes == sum(sizes[kept] for kept in store._kept)
    store.sweep(now + 10)
    assert (len(store), store.bytes) == (0, 0)
