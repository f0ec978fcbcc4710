# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
"""The GF(2^8) streaming code: Python's view of codec/.

This module validates, owns the memory and guards it: sizes, limits and every header field are checked here before C code
runs, views of a slot keep the object that owns it alive, and an object that works without the interpreter lock
refuses a second thread. All arithmetic is in the C files beside it. Contracts of the public names: quic_pfec/_codec.pyi.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_SIMPLE,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_FillInfo,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memmove, memset

import os
import weakref


cdef extern from "gf256.h" nogil:
    ctypedef struct gf256_kernels:
        const char *name
        bint (*supported)() noexcept nogil
        void (*axpy)(uint8_t *y, const uint8_t *x, uint8_t c, size_t n) noexcept nogil
        void (*dot)(uint8_t *y, const uint8_t **x, const uint8_t *c, size_t k, size_t n) noexcept nogil
        void (*scal)(uint8_t *y, uint8_t c, size_t n) noexcept nogil
    const unsigned int GF256_BLOCK
    gf256_kernels gf256
    uint8_t gf256_mul[256][256]
    uint8_t gf256_inv[256]
    void gf256_init()
    const gf256_kernels *gf256_level(size_t index)

cdef extern from "coefficients.h" nogil:
    ctypedef struct repair_header:
        uint64_t transfer_id, repair_number, first_sid, degree, head_span, tail_offset, tail_span
        const uint8_t *head
        size_t head_bytes
    const unsigned int PFEC_MAX_SPAN, PFEC_MAX_SID
    const char *repair_header_check(const repair_header *header, uint64_t max_degree, uint64_t max_span, uint64_t end)
    size_t repair_expand(const repair_header *header, uint32_t *sids, uint8_t *coefficients)

cdef extern from "arena.h" nogil:
    ctypedef struct arena:
        uint8_t *base
        size_t stride
    int arena_init(arena *a, size_t slot_bytes, size_t slots)
    void arena_free(arena *a)
    void arena_ahead(arena *a, size_t index)
    void arena_back_run(arena *a, size_t first, size_t count)
    uint8_t *arena_slot(const arena *a, size_t index)

cdef extern from "decoder.h" nogil:
    const unsigned int PFEC_MAX_UNKNOWN, PFEC_MAX_CAPACITY
    int C_SOURCE_NEW "SOURCE_NEW", C_SOURCE_DUPLICATE "SOURCE_DUPLICATE", C_SOURCE_CONFLICT "SOURCE_CONFLICT"
    int C_SOURCE_REPLACED "SOURCE_REPLACED"
    int C_REPAIR_INNOVATIVE "REPAIR_INNOVATIVE", C_REPAIR_REDUNDANT "REPAIR_REDUNDANT"
    int C_REPAIR_TOO_COSTLY "REPAIR_TOO_COSTLY", C_REPAIR_CONTRADICTS "REPAIR_CONTRADICTS"
    int SID_KNOWN, SID_RECEIVED
    ctypedef struct decoder_limits:
        uint32_t max_unknown, max_degree, max_span, row_ops_per_repair
    ctypedef struct decoder_counters:
        uint64_t redundant, rejected, row_operations, payload_macs, recovered, contradictions, discarded, compactions
    ctypedef struct decoder:
        decoder_limits limits
        decoder_counters counters
        size_t symbol_size
        arena symbols
        uint32_t capacity
        uint8_t *flags
        uint64_t *known
        uint32_t known_count, prefix, highest, rank, pending, columns
    int decoder_init(decoder *d, const decoder_limits *limits, size_t symbol_size, uint32_t capacity)
    void decoder_free(decoder *d)
    int decoder_grow(decoder *d, uint32_t capacity)
    int decoder_source(decoder *d, uint32_t sid, const uint8_t *data)
    int decoder_repair(decoder *d, const repair_header *header, const uint8_t *data)
    size_t decoder_poll(decoder *d, const uint32_t *first, size_t n_first, size_t max_symbols, uint64_t max_macs,
                        uint32_t *out)
    int decoder_known_run(const decoder *d, uint32_t start_at, uint32_t *start, uint32_t *stop)


SOURCE_NEW = C_SOURCE_NEW
SOURCE_DUPLICATE = C_SOURCE_DUPLICATE
SOURCE_CONFLICT = C_SOURCE_CONFLICT
SOURCE_REPLACED = C_SOURCE_REPLACED
REPAIR_INNOVATIVE = C_REPAIR_INNOVATIVE
REPAIR_REDUNDANT = C_REPAIR_REDUNDANT
REPAIR_TOO_COSTLY = C_REPAIR_TOO_COSTLY
REPAIR_CONTRADICTS = C_REPAIR_CONTRADICTS

cdef enum:
    MAX_SYMBOL_SIZE = 65535
    MAX_BURST = 64
    UNIT_HEADER = 4  # bytes before the payload of a symbol: unit id (24 bits), fragment (8 bits), big endian
    MAX_FRAGMENTS = 256
    MAX_UNIT_BYTES = MAX_FRAGMENTS * MAX_SYMBOL_SIZE


# ---- levels ------------------------------------------------------------------------------------------------------------


cdef const gf256_kernels *find_level(str name):
    """The level of that name if this processor has it, else NULL."""
    cdef size_t i = 0
    while gf256_level(i) != NULL:
        if gf256_level(i).name.decode("ascii") == name and gf256_level(i).supported():
            return gf256_level(i)
        i += 1
    return NULL


def isa():
    return gf256.name.decode("ascii")


def isa_levels():
    levels = []
    cdef size_t i = 0
    while gf256_level(i) != NULL:
        if gf256_level(i).supported():
            levels.append(gf256_level(i).name.decode("ascii"))
        i += 1
    return levels


cdef int select_level() except -1:
    gf256_init()
    forced = os.environ.get("QUIC_PFEC_ISA", "")
    if forced:
        level = find_level(forced)
        if level == NULL:
            raise ImportError(f"QUIC_PFEC_ISA={forced!r} is not a level of this build and processor; "
                              f"it has {', '.join(isa_levels())}")
        global gf256
        memcpy(&gf256, level, sizeof(gf256))
    return 0


select_level()


# ---- arguments ---------------------------------------------------------------------------------------------------------


cdef uint64_t integer(value, str name, uint64_t low, uint64_t high) except? 0xFFFFFFFFFFFFFFFF:
    """`value` as an integer in low..high, or ValueError."""
    cdef uint64_t number
    try:
        number = value
    except OverflowError:
        raise ValueError(f"{name} is out of range") from None
    if number < low or number > high:
        raise ValueError(f"{name} must be in {low}..{high}, not {number}")
    return number


cdef inline uint64_t field(value, str name) except? 0xFFFFFFFFFFFFFFFF:
    """A header field; its limits are those of repair_header_check()."""
    return integer(value, name, 0, <uint64_t>1 << 62)


cdef int fill_header(repair_header *h, transfer_id, repair_number, first_sid, degree, head_span, bytes head, tail_offset,
                     tail_span) except -1:
    """The caller keeps `head` alive while it uses the header."""
    if head is None:
        raise TypeError("head must be bytes")
    h.transfer_id = field(transfer_id, "transfer_id")
    h.repair_number = field(repair_number, "repair_number")
    h.first_sid = field(first_sid, "first_sid")
    h.degree = field(degree, "degree")
    h.head_span = field(head_span, "head_span")
    h.tail_offset = field(tail_offset, "tail_offset")
    h.tail_span = field(tail_span, "tail_span")
    h.head = <const uint8_t *>PyBytes_AS_STRING(head)
    h.head_bytes = len(head)
    return 0


cdef int check_header(const repair_header *h, uint64_t max_degree, uint64_t max_span, uint64_t end) except -1:
    cdef const char *reason = repair_header_check(h, max_degree, max_span, end)
    if reason != NULL:
        raise ValueError(reason.decode("ascii"))
    return 0


cdef int acquire(Py_buffer *view, data, size_t symbol_size) except -1:
    """Take the buffer of `data`, exactly symbol_size bytes; the caller releases it."""
    PyObject_GetBuffer(data, view, PyBUF_SIMPLE)
    if <size_t>view.len != symbol_size:
        length = view.len
        PyBuffer_Release(view)
        raise ValueError(f"a symbol has {symbol_size} bytes, not {length}")
    return 0


cdef uint8_t *acquire_target(Py_buffer *view, out, offset, size_t symbol_size) except NULL:
    """Take the writable buffer `out`, with room for a symbol at `offset`; the caller releases it."""
    cdef uint64_t at = integer(offset, "offset", 0, <uint64_t>1 << 62)
    try:
        PyObject_GetBuffer(out, view, PyBUF_WRITABLE)
    except BufferError as error:
        raise ValueError(f"cannot be written to: {error}") from None
    if at > <uint64_t>view.len or <uint64_t>view.len - at < symbol_size:
        length = view.len
        PyBuffer_Release(view)
        raise ValueError(f"{length} bytes have no room for a symbol of {symbol_size} at {at}")
    return <uint8_t *>view.buf + at


@cython.final
@cython.no_gc
cdef class _Slot:
    """Exporter of one arena slot. Holds its owner, and counts the exports so that the arena does not move under one.

    Without garbage collection on purpose: the owner refers to no Python object, so no cycle can run through it, and
    a collector that cleared `owner` while a view is alive would free the memory under it.
    """

    cdef object owner
    cdef Py_ssize_t *exports
    cdef uint8_t *data
    cdef Py_ssize_t size
    cdef bint writable

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.data, self.size, not self.writable, flags)
        self.exports[0] += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports[0] -= 1


@cython.final
@cython.no_gc
cdef class _Run:
    """Exporter of consecutive slots for writing, [slots, symbol_size], without their padding. Otherwise as _Slot."""

    cdef object owner
    cdef Py_ssize_t *exports
    cdef uint8_t *data
    cdef Py_ssize_t shape[2]
    cdef Py_ssize_t strides[2]

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        if flags & PyBUF_STRIDES != PyBUF_STRIDES:
            raise BufferError("the slots of a run are apart: ask for strides")
        buffer.buf = self.data
        buffer.obj = self
        buffer.len = self.shape[0] * self.shape[1]
        buffer.itemsize = 1
        buffer.readonly = False
        buffer.ndim = 2
        buffer.format = NULL  # unsigned bytes
        buffer.shape = self.shape
        buffer.strides = self.strides
        buffer.suboffsets = NULL
        buffer.internal = NULL
        self.exports[0] += 1

    def __releasebuffer__(self, Py_buffer *buffer):
        self.exports[0] -= 1


cdef object slot_view(owner, Py_ssize_t *exports, uint8_t *data, size_t size, bint writable):
    cdef _Slot slot = _Slot.__new__(_Slot)
    slot.owner = owner
    slot.exports = exports
    slot.data = data
    slot.size = <Py_ssize_t>size
    slot.writable = writable
    return memoryview(slot)


# ---- coefficients ------------------------------------------------------------------------------------------------------


def expand(transfer_id, repair_number, first_sid, degree, head_span, bytes head, tail_offset, tail_span):
    cdef repair_header h
    cdef size_t i, n
    fill_header(&h, transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
    check_header(&h, h.degree, PFEC_MAX_SPAN, PFEC_MAX_SID)
    cdef uint32_t *sids = <uint32_t *>calloc(PFEC_MAX_SPAN, sizeof(uint32_t))
    cdef uint8_t *coefficients = <uint8_t *>calloc(PFEC_MAX_SPAN, sizeof(uint8_t))
    try:
        if sids == NULL or coefficients == NULL:
            raise MemoryError
        n = repair_expand(&h, sids, coefficients)
        return [(sids[i], coefficients[i]) for i in range(n)]
    finally:
        free(sids)
        free(coefficients)


include "units.pxi"
include "encoder.pxi"
include "decoder.pxi"
include "intake.pxi"
include "doors.pxi"
