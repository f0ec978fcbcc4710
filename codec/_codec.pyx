# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
"""The GF(2^8) streaming code: Python's view of codec/.

This module validates, owns the memory and guards it: sizes, limits and every header field are checked here before C code
runs, views of a slot keep the object that owns it alive, and an object that works without the interpreter lock
refuses a second thread. All arithmetic is in the C files beside it. Contracts of the public names: quic_pfec/_codec.pyi.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy

import os


cdef extern from "gf256.h" nogil:
    ctypedef struct gf256_kernels:
        const char *name
        bint (*supported)()
        void (*axpy)(uint8_t *y, const uint8_t *x, uint8_t c, size_t n)
        void (*dot)(uint8_t *y, const uint8_t **x, const uint8_t *c, size_t k, size_t n)
        void (*scal)(uint8_t *y, uint8_t c, size_t n)
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
    size_t decoder_poll(decoder *d, const uint32_t *first, size_t n_first, size_t max_symbols, uint32_t *out)
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


# ---- encoder -----------------------------------------------------------------------------------------------------------


@cython.final
cdef class Encoder:
    # Every method holds the interpreter lock from beginning to end, so calls from several threads follow each other.
    cdef arena symbols
    cdef arena output
    cdef uint32_t *sids
    cdef uint8_t *coefficients
    cdef const uint8_t **operands
    cdef Py_ssize_t exports
    cdef readonly size_t symbol_size
    cdef readonly uint32_t capacity
    cdef readonly uint32_t count
    cdef bint reserved

    def __cinit__(self, symbol_size, capacity):
        self.symbol_size = integer(symbol_size, "symbol_size", 1, MAX_SYMBOL_SIZE)
        self.capacity = <uint32_t>integer(capacity, "capacity", 1, PFEC_MAX_CAPACITY)
        self.sids = <uint32_t *>calloc(PFEC_MAX_SPAN, sizeof(uint32_t))
        self.coefficients = <uint8_t *>calloc(PFEC_MAX_SPAN, sizeof(uint8_t))
        self.operands = <const uint8_t **>calloc(PFEC_MAX_SPAN, sizeof(uint8_t *))
        if (arena_init(&self.symbols, self.symbol_size, self.capacity) != 0
                or arena_init(&self.output, self.symbol_size, 1) != 0
                or self.sids == NULL or self.coefficients == NULL or self.operands == NULL):
            raise MemoryError

    def __dealloc__(self):
        arena_free(&self.symbols)
        arena_free(&self.output)
        free(self.sids)
        free(self.coefficients)
        free(self.operands)

    def __reduce__(self):
        raise TypeError("an Encoder cannot be pickled")

    cdef int check_room(self) except -1:
        if self.count == self.capacity:
            raise ValueError(f"all {self.capacity} symbols are taken")
        return 0

    def push(self, data):
        cdef Py_buffer view
        acquire(&view, data, self.symbol_size)
        try:
            if self.reserved:
                raise ValueError("a reserved slot waits for commit()")
            self.check_room()
            memcpy(arena_slot(&self.symbols, self.count), view.buf, self.symbol_size)
        finally:
            PyBuffer_Release(&view)
        self.count += 1
        return self.count - 1

    def reserve(self):
        self.check_room()
        self.reserved = True
        return slot_view(self, &self.exports, arena_slot(&self.symbols, self.count), self.symbol_size, True)

    def commit(self):
        if not self.reserved:
            raise ValueError("no slot is reserved")
        self.reserved = False
        self.count += 1
        return self.count - 1

    def symbol(self, sid):
        cdef uint64_t index = field(sid, "sid")
        if index >= self.count:
            raise KeyError(sid)
        return slot_view(self, &self.exports, arena_slot(&self.symbols, index), self.symbol_size, False)

    def repair(self, transfer_id, repair_number, first_sid, degree, head_span, bytes head, tail_offset, tail_span):
        cdef repair_header h
        cdef size_t i, n
        fill_header(&h, transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        check_header(&h, h.degree, PFEC_MAX_SPAN, self.count)
        n = repair_expand(&h, self.sids, self.coefficients)
        for i in range(n):
            self.operands[i] = arena_slot(&self.symbols, self.sids[i])
        gf256.dot(self.output.base, self.operands, self.coefficients, n, self.output.stride)
        return PyBytes_FromStringAndSize(<char *>self.output.base, <Py_ssize_t>self.symbol_size)


# ---- decoder -----------------------------------------------------------------------------------------------------------


@cython.final
cdef class Decoder:
    cdef decoder d
    cdef Py_ssize_t exports
    cdef bint busy  # poll() works without the interpreter lock; set and tested only with it

    def __cinit__(self, symbol_size, capacity, *, max_unknown=512, max_degree=255, max_span=4096, row_ops_per_repair=1024):
        cdef decoder_limits limits
        cdef size_t size = integer(symbol_size, "symbol_size", 1, MAX_SYMBOL_SIZE)
        cdef uint32_t slots = <uint32_t>integer(capacity, "capacity", 1, PFEC_MAX_CAPACITY)
        limits.max_unknown = <uint32_t>integer(max_unknown, "max_unknown", 1, PFEC_MAX_UNKNOWN)
        limits.max_degree = <uint32_t>integer(max_degree, "max_degree", 1, PFEC_MAX_SPAN)
        limits.max_span = <uint32_t>integer(max_span, "max_span", 1, PFEC_MAX_SPAN)
        limits.row_ops_per_repair = <uint32_t>integer(row_ops_per_repair, "row_ops_per_repair", 0, 0x7FFFFFFF)
        if decoder_init(&self.d, &limits, size, slots) != 0:
            raise MemoryError

    def __dealloc__(self):
        decoder_free(&self.d)

    def __reduce__(self):
        raise TypeError("a Decoder cannot be pickled")

    cdef inline int enter(self) except -1:
        if self.busy:
            raise RuntimeError("the decoder is in use by another thread")
        return 0

    cdef uint32_t sid(self, value) except? 0xFFFFFFFF:
        """A SID of this decoder. Also the entry of the methods that take one."""
        cdef uint64_t number = field(value, "sid")
        self.enter()
        if number >= self.d.capacity:
            raise ValueError(f"sid {number} is not below the capacity {self.d.capacity}")
        return <uint32_t>number

    def source(self, sid, data):
        cdef Py_buffer view
        acquire(&view, data, self.d.symbol_size)
        try:
            return decoder_source(&self.d, self.sid(sid), <const uint8_t *>view.buf)
        finally:
            PyBuffer_Release(&view)

    def repair(self, transfer_id, repair_number, first_sid, degree, head_span, bytes head, tail_offset, tail_span, data):
        cdef repair_header h
        cdef Py_buffer view
        fill_header(&h, transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        acquire(&view, data, self.d.symbol_size)
        try:
            self.enter()
            check_header(&h, self.d.limits.max_degree, self.d.limits.max_span, self.d.capacity)
            return decoder_repair(&self.d, &h, <const uint8_t *>view.buf)
        finally:
            PyBuffer_Release(&view)

    def poll(self, max_symbols, order=None):
        cdef size_t wanted = integer(max_symbols, "max_symbols", 0, 0xFFFFFFFF)
        cdef size_t n_first = 0, found, i
        cdef uint32_t *first = NULL
        cdef uint32_t *out = NULL
        self.enter()
        if self.d.pending == 0 or wanted == 0:
            return []
        try:
            if order is not None:
                sids = list(order)
                n_first = len(sids)
                first = <uint32_t *>calloc(n_first + 1, sizeof(uint32_t))
                if first == NULL:
                    raise MemoryError
                for i in range(n_first):
                    first[i] = <uint32_t>integer(sids[i], "sid", 0, 0xFFFFFFFF)
            self.enter()  # reading `order` may have run other code
            wanted = min(wanted, <size_t>self.d.pending)
            out = <uint32_t *>calloc(wanted + 1, sizeof(uint32_t))
            if out == NULL:
                raise MemoryError
            self.busy = True
            with nogil:
                found = decoder_poll(&self.d, first, n_first, wanted, out)
            self.busy = False
            return [out[i] for i in range(found)]
        finally:
            free(first)
            free(out)

    def symbol(self, sid):
        cdef uint32_t index = self.sid(sid)
        if not self.d.flags[index] & SID_KNOWN:
            raise KeyError(sid)
        return slot_view(self, &self.exports, arena_slot(&self.d.symbols, index), self.d.symbol_size, False)

    def known(self, sid):
        return (self.d.flags[self.sid(sid)] & SID_KNOWN) != 0

    def received(self, sid):
        return (self.d.flags[self.sid(sid)] & SID_RECEIVED) != 0

    def known_ranges(self, max_ranges):
        cdef uint64_t left = integer(max_ranges, "max_ranges", 0, 0xFFFFFFFF)
        cdef uint32_t start, stop
        self.enter()
        ranges = []
        stop = self.d.prefix
        while left > 0 and decoder_known_run(&self.d, stop, &start, &stop):
            ranges.append((start, stop))
            left -= 1
        return ranges

    def known_bitmap(self):
        cdef Py_ssize_t j, size
        cdef uint8_t *out
        self.enter()
        size = (<Py_ssize_t>self.d.capacity + 7) // 8
        bitmap = PyBytes_FromStringAndSize(NULL, size)
        out = <uint8_t *>PyBytes_AS_STRING(bitmap)
        for j in range(size):
            out[j] = <uint8_t>(self.d.known[j >> 3] >> (8 * (j & 7)))
        return bitmap

    def grow(self, capacity):
        cdef uint32_t slots = <uint32_t>integer(capacity, "capacity", 1, PFEC_MAX_CAPACITY)
        self.enter()
        if slots < self.d.capacity:
            raise ValueError(f"capacity {slots} is below the present {self.d.capacity}")
        if slots == self.d.capacity:
            return
        if self.exports != 0:
            raise ValueError(f"{self.exports} views of symbols are exported")
        if decoder_grow(&self.d, slots) != 0:
            raise MemoryError

    def counters(self):
        self.enter()
        return {
            "redundant": self.d.counters.redundant,
            "rejected": self.d.counters.rejected,
            "row_operations": self.d.counters.row_operations,
            "payload_macs": self.d.counters.payload_macs,
            "recovered": self.d.counters.recovered,
            "contradictions": self.d.counters.contradictions,
            "discarded": self.d.counters.discarded,
            "compactions": self.d.counters.compactions,
        }

    @property
    def symbol_size(self):
        return self.d.symbol_size

    @property
    def capacity(self):
        self.enter()
        return self.d.capacity

    @property
    def pending(self):
        self.enter()
        return self.d.pending

    @property
    def prefix(self):
        self.enter()
        return self.d.prefix

    @property
    def highest(self):
        self.enter()
        return self.d.highest

    @property
    def deficit(self):
        self.enter()
        return self.d.highest - self.d.known_count - self.d.rank

    @property
    def unknown_columns(self):
        self.enter()
        return self.d.columns

    @property
    def rank(self):
        self.enter()
        return self.d.rank


# ---- doors for the tests -----------------------------------------------------------------------------------------------


def _multiply(unsigned char a, unsigned char b):
    return gf256_mul[a][b]


def _inverse(unsigned char a):
    return gf256_inv[a]


cdef const gf256_kernels *tested_level(str name, size_t n) except NULL:
    cdef const gf256_kernels *level = find_level(name)
    if level == NULL:
        raise ValueError(f"no level {name!r}")
    if n % GF256_BLOCK != 0:
        raise ValueError(f"length {n} is not a multiple of {GF256_BLOCK}")
    return level


def _axpy(str level, unsigned char[::1] y, const unsigned char[::1] x, unsigned char c):
    if x.shape[0] != y.shape[0]:
        raise ValueError("lengths differ")
    cdef const gf256_kernels *kernels = tested_level(level, <size_t>y.shape[0])
    if y.shape[0] != 0:
        kernels.axpy(&y[0], &x[0], c, <size_t>y.shape[0])


def _scal(str level, unsigned char[::1] y, unsigned char c):
    cdef const gf256_kernels *kernels = tested_level(level, <size_t>y.shape[0])
    if y.shape[0] != 0:
        kernels.scal(&y[0], c, <size_t>y.shape[0])


def _dot(str level, unsigned char[::1] y, list sources, bytes coefficients):
    cdef const gf256_kernels *kernels = tested_level(level, <size_t>y.shape[0])
    cdef const unsigned char[::1] x
    cdef size_t i, k = len(sources)
    if k != <size_t>len(coefficients):
        raise ValueError("one coefficient a source")
    if y.shape[0] == 0:
        return
    cdef const uint8_t **operands = <const uint8_t **>calloc(k + 1, sizeof(uint8_t *))
    if operands == NULL:
        raise MemoryError
    try:
        for i in range(k):
            x = sources[i]  # `sources` keeps the buffer alive
            if x.shape[0] != y.shape[0]:
                raise ValueError("lengths differ")
            operands[i] = &x[0]
        kernels.dot(&y[0], operands, <const uint8_t *>PyBytes_AS_STRING(coefficients), k, <size_t>y.shape[0])
    finally:
        free(operands)
