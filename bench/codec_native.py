"""The C timing loops behind `bench.codec`: built with the C compiler at first use, called through ctypes.

They hold the sources of codec/ once more, apart from the product's extension: timing loops, a bare XOR and the eager
codec of the paper's class have no place in what is shipped.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import hashlib
import os
import subprocess
from enum import IntEnum
from pathlib import Path

ROOT = Path(__file__).parent.parent
FLAGS = ("-O3", "-std=c11", "-shared", "-fPIC")


class What(IntEnum):
    """What `Loops.kernel_ns` runs; the order of the enum in native/loops.c."""

    COPY = 0
    XOR = 1
    DOT = 2
    AXPYS = 3
    AXPY = 4
    ISAL = 5


class Event(ctypes.Structure):
    """One packet of a recorded stream."""

    _fields_ = tuple(
        (name, ctypes.c_uint32)
        for name in (
            "is_repair",
            "lost",
            "sid",
            "number",
            "first_sid",
            "degree",
            "head_span",
            "head_at",
            "tail_offset",
            "tail_span",
        )
    )


class Result(ctypes.Structure):
    """What `Loops.stream` measured."""

    _fields_ = (
        ("encode_ns", ctypes.c_double),
        ("decode_ns", ctypes.c_double),
        ("worst_ns", ctypes.c_double),
        ("wrong", ctypes.c_uint64),
        ("recovered", ctypes.c_uint64),
    )


def build() -> Path:
    """Compile the loops unless it was done for these sources; returns the shared library."""
    sources = [ROOT / "bench/native/loops.c", *sorted((ROOT / "codec").glob("*.c"))]
    sources = [path for path in sources if path.stem != "_codec"]
    compiler = os.environ.get("CC", "cc")
    digest = hashlib.sha256(repr((compiler, FLAGS)).encode())
    for path in [*sources, *sorted((ROOT / "codec").glob("*.h"))]:
        digest.update(path.read_bytes())
    library = ROOT / "build/bench" / f"loops-{digest.hexdigest()[:16]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run([compiler, *FLAGS, "-I", str(ROOT / "codec"), *map(str, sources), "-o", str(made)], check=True)
        made.replace(library)
    return library


class Loops:
    """The shared library; `isal` is None where libisal is not installed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(build()))
        self._library.level_name.restype = ctypes.c_char_p
        self._library.level_name.argtypes = [ctypes.c_size_t]
        self._library.prepare.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_uint64]
        self._library.kernel_ns.restype = ctypes.c_double
        self._library.kernel_ns.argtypes = [
            ctypes.c_int, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._library.prepared_coefficients.restype = ctypes.c_void_p
        self._library.output.restype = ctypes.c_void_p
        self._library.stream.argtypes = [
            ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p, ctypes.c_uint32, ctypes.c_size_t, ctypes.c_size_t,
            ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(Result),
        ]  # fmt: skip
        found = ctypes.util.find_library("isal")
        self.isal = ctypes.CDLL(found) if found else None
        self._tables = ctypes.create_string_buffer(32 * 1024)
        self.size = 0

    def prepare(self, sources: int, size: int, seed: int = 1) -> None:
        """Random symbols of `size` bytes for `kernel_ns`."""
        if self._library.prepare(sources, size, seed) != 0:
            raise MemoryError
        self.size = (size + 63) // 64 * 64
        if self.isal is not None:
            self.isal.ec_init_tables(sources, 1, ctypes.c_void_p(self._library.prepared_coefficients()), self._tables)

    def levels(self) -> dict[str, int]:
        """Levels this processor has, and their index."""
        names: dict[str, int] = {}
        index = 0
        while (name := self._library.level_name(index)) is not None:
            if name:
                names[name.decode()] = index
            index += 1
        return names

    def kernel_ns(self, what: What, level: int, sources: int, times: int) -> float:
        """Mean ns of one run."""
        isal = ctypes.cast(self.isal.ec_encode_data, ctypes.c_void_p) if self.isal is not None else None
        return float(self._library.kernel_ns(what, level, sources, times, isal, ctypes.addressof(self._tables)))

    def output(self) -> bytes:
        """What the last kernel wrote."""
        return ctypes.string_at(self._library.output(), self.size)

    def stream(
        self,
        events: ctypes.Array[Event],
        heads: bytes,
        symbols: int,
        size: int,
        level: int,
        *,
        eager: bool = False,
        took: ctypes.Array[ctypes.c_double] | None = None,
    ) -> Result:
        """Encode and decode a recorded stream; `took` keeps the shortest time of each decoder call in ns."""
        result = Result()
        where = None if took is None else ctypes.addressof(took)
        failed = self._library.stream(
            ctypes.addressof(events), len(events), heads, symbols, size, level, int(eager), where, result
        )
        if failed != 0:
            raise MemoryError
        if result.wrong:
            raise RuntimeError(f"{result.wrong} wrong symbols")
        return result
