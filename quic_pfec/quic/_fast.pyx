# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
"""Runs of 1-RTT packets with symbols: sealed for sending, opened and parsed on arrival, without an object per frame.

The AEAD and AES come from `cryptography`, called once a packet and once a batch; what surrounds them in a QUIC packet
(RFC 9001 section 5) is a few bytes of arithmetic that Python does slowly. Whatever here is not certain to be an
ordinary packet of symbols is left alone: aioquic then judges it. Contracts of the public names: _fast.pyi.
"""

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.memoryview cimport PyMemoryView_FromObject
from cpython.sequence cimport PySequence_GetSlice
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcmp, memcpy, memset

from cryptography.exceptions import InvalidTag

cdef enum:
    NONCE = 12
    TAG = 16
    SAMPLE = 16
    NUMBER = 2          # bytes of a packet number, as aioquic writes them
    NUMBER_MAX = 4      # the sample starts as if the number had this many (RFC 9001 section 5.4.2)
    MAX_CID = 20
    MIN_SYMBOL = 64     # wire/limits.py

cdef uint64_t MAX_VARINT = (<uint64_t>1 << 62) - 1
cdef uint8_t[4] SOURCE = [0x8f, 0xda, 0x91, 0xab]    # the types as every sender of ours writes them, in 4 bytes
cdef uint8_t[4] REPAIR = [0x91, 0xe8, 0xe7, 0x83]


@cython.final
@cython.no_gc
cdef class _Window:
    """A stretch of memory that somebody else owns, readable through the buffer protocol while it is set."""

    cdef const uint8_t *data
    cdef Py_ssize_t size

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        PyBuffer_FillInfo(buffer, self, <void *>self.data, self.size, 1, flags)


cdef int nonce_of(uint8_t *out, bytes iv, uint64_t number) except -1:
    """RFC 9001 section 5.3: the number, in network order, on the right-hand end of the IV."""
    cdef const uint8_t *base = <const uint8_t *>PyBytes_AS_STRING(iv)
    cdef int i
    if PyBytes_GET_SIZE(iv) != NONCE:
        raise ValueError("an IV has 12 bytes")
    memcpy(out, base, NONCE)
    for i in range(8):
        out[NONCE - 1 - i] ^= <uint8_t>(number >> (8 * i))
    return 0


# ---- sending ----------------------------------------------------------------------------------------------------------


def seal(encrypt, bytes iv, mask, plain, size_t stride, lengths, bytes cid, int first_byte, number, wire, size_t position):
    cdef Py_buffer source, target
    cdef Py_ssize_t n = len(lengths), i
    cdef size_t header = 1 + PyBytes_GET_SIZE(cid) + NUMBER, start = position, size, length
    cdef uint64_t packet = number
    cdef uint8_t *out
    cdef uint8_t *masks
    cdef uint8_t *samples
    cdef uint8_t[NONCE] nonce
    cdef uint8_t[1 + MAX_CID + NUMBER] head
    cdef _Window window = _Window.__new__(_Window)
    cdef bytes sealed, gathered, masked
    cdef list sizes = []
    if PyBytes_GET_SIZE(cid) > MAX_CID:
        raise ValueError("a connection id has at most 20 bytes")
    if packet + n > MAX_VARINT:
        raise ValueError("packet numbers end at 2^62 - 1")
    if n == 0:
        return sizes
    PyObject_GetBuffer(plain, &source, PyBUF_SIMPLE)
    try:
        PyObject_GetBuffer(wire, &target, PyBUF_WRITABLE)
        try:
            if <size_t>source.len < stride * n or stride < header:
                raise ValueError("the frames do not lie within their buffer")
            gathered = PyBytes_FromStringAndSize(NULL, SAMPLE * n)
            samples = <uint8_t *>PyBytes_AS_STRING(gathered)
            head[0] = <uint8_t>first_byte
            memcpy(head + 1, PyBytes_AS_STRING(cid), PyBytes_GET_SIZE(cid))
            for i in range(n):
                length = lengths[i]
                size = header + length + TAG
                # Two bytes of frames at least, or there is nothing to sample.
                if length < NUMBER_MAX - NUMBER or header + length > stride or position + size > <size_t>target.len:
                    raise ValueError("a frame does not fit its packet, or a packet the buffer")
                head[header - 2] = <uint8_t>(packet >> 8)
                head[header - 1] = <uint8_t>packet
                nonce_of(nonce, iv, packet)
                window.data = <const uint8_t *>source.buf + i * stride + header
                window.size = length
                sealed = encrypt(
                    PyBytes_FromStringAndSize(<char *>nonce, NONCE),
                    window,
                    PyBytes_FromStringAndSize(<char *>head, header),
                )
                if <size_t>PyBytes_GET_SIZE(sealed) != length + TAG:
                    raise ValueError("this is not an AEAD with a tag of 16 bytes")
                out = <uint8_t *>target.buf + position
                memcpy(out, head, header)
                memcpy(out + header, PyBytes_AS_STRING(sealed), length + TAG)
                memcpy(samples + SAMPLE * i, out + header - NUMBER + NUMBER_MAX, SAMPLE)
                sizes.append(size)
                position += size
                packet += 1
            masked = mask(gathered)
            if PyBytes_GET_SIZE(masked) != SAMPLE * n:
                raise ValueError("a mask for each sample")
            masks = <uint8_t *>PyBytes_AS_STRING(masked)
            out = <uint8_t *>target.buf + start
            for i in range(n):
                out[0] ^= masks[0] & 0x1f
                out[header - 2] ^= masks[1]
                out[header - 1] ^= masks[2]
                masks += SAMPLE
                out += <size_t>sizes[i]
        finally:
            window.data, window.size = NULL, 0
            PyBuffer_Release(&target)
    finally:
        PyBuffer_Release(&source)
    return sizes


def sent_packets(cls, number, sizes, tokens, handler, double now):
    cdef list packets = []
    cdef Py_ssize_t i
    cdef object token
    when = now
    for i in range(len(sizes)):
        packet = cls.__new__(cls)
        packet.packet_number = number
        packet.sent_bytes = sizes[i]
        packet.sent_time = when
        token = tokens[i]
        packet.delivery_handlers = [] if token is None else [(handler, (token,))]
        packets.append(packet)
        number += 1
    return packets


# ---- numbers received -------------------------------------------------------------------------------------------------


@cython.final
cdef class PacketWindow:
    cdef int64_t lower, size
    cdef uint64_t *bits

    def __cinit__(self, Py_ssize_t size):
        if size < 64 or size > 1 << 20 or size & (size - 1):
            raise ValueError(f"a window has a power of two of packets, 64 to 2^20, not {size}")
        self.size = size
        self.bits = <uint64_t *>calloc(size // 64, sizeof(uint64_t))
        if self.bits == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self.bits)

    def __len__(self):
        return self.size

    cdef bint has(self, int64_t number) noexcept:
        cdef int64_t slot = number & (self.size - 1)
        if number < self.lower:
            return True
        return number < self.lower + self.size and self.bits[slot >> 6] >> (slot & 63) & 1

    cdef void put(self, int64_t number) noexcept:
        cdef int64_t lower = number - self.size + 1, slot
        if number < self.lower:
            return
        if lower >= self.lower + self.size:
            memset(self.bits, 0, self.size // 8)
            self.lower = lower
        while self.lower < lower:
            slot = self.lower & (self.size - 1)
            self.bits[slot >> 6] &= ~(<uint64_t>1 << (slot & 63))
            self.lower += 1
        slot = number & (self.size - 1)
        self.bits[slot >> 6] |= <uint64_t>1 << (slot & 63)

    def add(self, number):
        self.put(number)

    def __contains__(self, number):
        return self.has(number)


# ---- receiving --------------------------------------------------------------------------------------------------------


cdef struct cursor:
    const uint8_t *at
    const uint8_t *end


cdef inline bint varint(cursor *c, uint64_t *value) noexcept:
    """RFC 9000 section 16, any width; False when it is cut off."""
    cdef int length, i
    cdef uint64_t number
    if c.at >= c.end:
        return False
    length = 1 << (c.at[0] >> 6)
    if c.end - c.at < length:
        return False
    number = c.at[0] & 0x3f
    for i in range(1, length):
        number = number << 8 | c.at[i]
    c.at += length
    value[0] = number
    return True


@cython.final
cdef class Opener:
    cdef readonly dict groups
    cdef readonly list numbers
    cdef readonly int64_t largest
    cdef readonly int64_t expected
    cdef readonly bint spin
    cdef readonly Py_ssize_t duplicates
    cdef uint64_t max_symbols, max_symbol_size, max_degree, max_window
    cdef list datagrams
    cdef bytes cid, masks
    cdef int64_t run_start, run_stop

    def __cinit__(self, max_symbols, max_symbol_size, max_degree, max_window):
        self.max_symbols = max_symbols
        self.max_symbol_size = max_symbol_size
        self.max_degree = max_degree
        self.max_window = max_window
        self.datagrams = []
        self.cid = self.masks = b""
        self.clear()

    cdef void clear(self):
        self.groups = {}
        self.numbers = []
        self.largest = self.run_start = self.run_stop = -1
        self.duplicates = 0

    def load(self, datagrams, bytes cid, mask):
        cdef Py_buffer view
        cdef Py_ssize_t i, offset = 1 + PyBytes_GET_SIZE(cid) + NUMBER_MAX
        cdef list held = list(datagrams)
        cdef bytes gathered = PyBytes_FromStringAndSize(NULL, SAMPLE * len(held))
        cdef uint8_t *samples = <uint8_t *>PyBytes_AS_STRING(gathered)
        if PyBytes_GET_SIZE(cid) > MAX_CID:
            raise ValueError("a connection id has at most 20 bytes")
        for i in range(len(held)):
            PyObject_GetBuffer(held[i], &view, PyBUF_SIMPLE)
            if view.len >= offset + SAMPLE:
                memcpy(samples + SAMPLE * i, <uint8_t *>view.buf + offset, SAMPLE)
            else:
                memset(samples + SAMPLE * i, 0, SAMPLE)
            PyBuffer_Release(&view)
        self.masks = mask(gathered) if held else b""
        if len(self.masks) != SAMPLE * len(held):
            raise ValueError("a mask for each sample")
        self.datagrams, self.cid = held, cid

    def open(self, Py_ssize_t start, decrypt, bytes iv, int key_phase, PacketWindow window, expected):
        cdef Py_buffer view
        cdef Py_ssize_t i = start, n = len(self.datagrams)
        cdef int outcome
        if start < 0:
            raise ValueError("there is no such datagram")
        self.clear()
        self.expected = expected
        while i < n:
            PyObject_GetBuffer(self.datagrams[i], &view, PyBUF_SIMPLE)
            try:
                outcome = self.open_one(i, &view, decrypt, iv, key_phase, window)
            finally:
                PyBuffer_Release(&view)
            if not outcome:
                break
            i += 1
        if self.run_start >= 0:
            self.numbers.append((self.run_start, self.run_stop))
        return i

    def release(self):
        self.datagrams = []
        self.groups = {}

    cdef int open_one(self, Py_ssize_t i, Py_buffer *view, decrypt, bytes iv, int key_phase,
                      PacketWindow window) except -1:
        """1: taken (or a duplicate); 0: not ours to judge, and nothing has changed."""
        cdef const uint8_t *data = <const uint8_t *>view.buf
        cdef const uint8_t *masks = <const uint8_t *>PyBytes_AS_STRING(self.masks) + SAMPLE * i
        cdef Py_ssize_t cid_size = PyBytes_GET_SIZE(self.cid), header = 1 + cid_size + NUMBER
        cdef uint8_t[1 + MAX_CID + NUMBER] head
        cdef uint8_t[NONCE] nonce
        cdef uint8_t first
        cdef int64_t number
        cdef _Window sealed
        cdef bytes payload
        cdef list found
        if view.len < 1 + cid_size + NUMBER_MAX + SAMPLE:
            return 0
        first = data[0] ^ (masks[0] & 0x1f)
        # Short header with the fixed bit, reserved bits clear, a number of two bytes, the present key.
        if first & 0xdb != 0x40 | (NUMBER - 1) or first >> 2 & 1 != key_phase:
            return 0
        if memcmp(data + 1, PyBytes_AS_STRING(self.cid), cid_size) != 0:
            return 0
        memcpy(head, data, header)
        head[0] = first
        head[header - 2] ^= masks[1]
        head[header - 1] ^= masks[2]
        number = full_number(head[header - 2] << 8 | head[header - 1], self.expected)
        nonce_of(nonce, iv, <uint64_t>number)
        sealed = _Window.__new__(_Window)
        sealed.data, sealed.size = data + header, view.len - header
        try:
            payload = decrypt(
                PyBytes_FromStringAndSize(<char *>nonce, NONCE), sealed, PyBytes_FromStringAndSize(<char *>head, header)
            )
        except InvalidTag:
            return 0
        finally:
            sealed.data, sealed.size = NULL, 0
        if window.has(number):
            self.duplicates += 1
            return 1
        found = self.symbols(payload)
        if found is None:
            return 0
        window.put(number)
        self.note(number, first)
        for transfer_id, packet in found:
            group = self.groups.get(transfer_id)
            if group is None:
                self.groups[transfer_id] = [packet]
            else:
                (<list>group).append(packet)
        return 1

    cdef void note(self, int64_t number, uint8_t first):
        if number > self.expected:
            self.expected = number + 1
        if number > self.largest:
            self.largest = number
            self.spin = first >> 5 & 1
        if number == self.run_stop:
            self.run_stop += 1
            return
        if self.run_start >= 0:
            self.numbers.append((self.run_start, self.run_stop))
        self.run_start = number
        self.run_stop = number + 1

    def parse(self, bytes payload):
        return self.symbols(payload)

    cdef list symbols(self, bytes payload):
        """[(transfer id, packet)] of a payload of nothing but symbols and padding, with one symbol at least; or None."""
        cdef cursor c
        cdef list found = []
        c.at = <const uint8_t *>PyBytes_AS_STRING(payload)
        c.end = c.at + PyBytes_GET_SIZE(payload)
        while c.at < c.end:
            if c.at[0] == 0:  # PADDING
                c.at += 1
                continue
            if c.end - c.at < 4:
                return None
            if memcmp(c.at, SOURCE, 4) == 0:
                c.at += 4
                one = self.source(&c, payload)
            elif memcmp(c.at, REPAIR, 4) == 0:
                c.at += 4
                one = self.repair(&c, payload)
            else:
                return None
            if one is None:
                return None
            found.append(one)
        return found or None

    cdef object symbol(self, cursor *c, bytes payload):
        cdef uint64_t length
        cdef Py_ssize_t at
        if not varint(c, &length) or length > <uint64_t>(c.end - c.at):
            return None
        if length < MIN_SYMBOL or length > self.max_symbol_size:
            return None
        at = c.at - <const uint8_t *>PyBytes_AS_STRING(payload)
        c.at += length
        return PySequence_GetSlice(PyMemoryView_FromObject(payload), at, at + <Py_ssize_t>length)

    cdef object source(self, cursor *c, bytes payload):
        cdef uint64_t transfer_id, sid
        if not varint(c, &transfer_id) or not varint(c, &sid) or sid >= self.max_symbols:
            return None
        view = self.symbol(c, payload)
        return None if view is None else (transfer_id, (sid, view))

    cdef object repair(self, cursor *c, bytes payload):
        cdef uint64_t transfer_id, first_sid, degree, head_span, tail_offset, tail_span, span, head_bytes
        cdef uint32_t number
        cdef const uint8_t *head
        if not varint(c, &transfer_id) or c.end - c.at < 4:
            return None
        number = <uint32_t>c.at[0] << 24 | <uint32_t>c.at[1] << 16 | <uint32_t>c.at[2] << 8 | c.at[3]
        c.at += 4
        if not varint(c, &first_sid) or not varint(c, &degree) or not varint(c, &head_span):
            return None
        if degree < 1 or degree > self.max_degree or head_span > self.max_window:
            return None
        head_bytes = (head_span + 7) // 8
        if head_bytes > <uint64_t>(c.end - c.at):
            return None
        head = c.at
        c.at += head_bytes
        if not varint(c, &tail_offset) or not varint(c, &tail_span):
            return None
        span = head_span + tail_offset + tail_span  # below 2^63 + 2^14
        if span > self.max_window or first_sid + span > self.max_symbols:
            return None
        if head_span == 0 and tail_span == 0 or tail_offset != 0 and (head_span == 0 or tail_span == 0):
            return None
        if head_span != 0 and (not head[0] & 1 or head[head_bytes - 1] >> ((head_span - 1) & 7) != 1):
            return None
        view = self.symbol(c, payload)
        if view is None:
            return None
        return transfer_id, (
            transfer_id, number, first_sid, degree, head_span,
            PyBytes_FromStringAndSize(<const char *>head, head_bytes), tail_offset, tail_span, view,
        )  # fmt: skip


cdef int64_t full_number(int64_t truncated, int64_t expected) noexcept:
    """RFC 9000 appendix A.3 for 16 bits."""
    cdef int64_t candidate = (expected & ~<int64_t>0xffff) | truncated
    if candidate <= expected - 0x8000 and candidate < (<int64_t>1 << 62) - 0x10000:
        return candidate + 0x10000
    if candidate > expected + 0x8000 and candidate >= 0x10000:
        return candidate - 0x10000
    return candidate
