# Included by _codec.pyx: the way of a received packet, from its fields to its place in a unit, without Python in between.
# What is plain is done here; whatever calls for a judgement is left, untouched, to the receiver.

INTAKE_END = -1
INTAKE_ODD = -2
INTAKE_CONTRADICTS = -3

cdef enum:
    END = -1
    ODD = -2
    CONTRADICTS = -3


@cython.final
cdef class Intake:
    cdef Decoder decoder
    cdef readonly int64_t most_useless
    cdef public int64_t useless_left
    cdef public uint64_t highest
    cdef uint64_t source, duplicate, useful, useless, dropped
    cdef bint urgent, placing
    cdef size_t payload
    cdef Py_ssize_t units
    cdef const int64_t[::1] sizes
    cdef const int64_t[::1] base
    cdef int32_t[::1] sid_of
    cdef int64_t[::1] missing

    def __cinit__(self, Decoder decoder not None, useless_repairs):
        self.decoder = decoder
        self.most_useless = self.useless_left = <int64_t>integer(useless_repairs, "useless_repairs", 0, 0x7FFFFFFF)

    def __reduce__(self):
        raise TypeError("an Intake cannot be pickled")

    def bind(self, const int64_t[::1] sizes not None, const int64_t[::1] base not None, int32_t[::1] sid_of not None,
             int64_t[::1] missing not None):
        cdef Py_ssize_t unit, units = sizes.shape[0]
        cdef int64_t payload = <int64_t>self.decoder.d.symbol_size - UNIT_HEADER, fragments
        if payload < 1:
            raise ValueError("symbols without room behind the unit header")
        if units < 1 or base.shape[0] != units + 1 or missing.shape[0] != units or base[0] != 0 or base[units] != sid_of.shape[0]:
            raise ValueError("the arrays do not belong together")
        for unit in range(units):
            fragments = base[unit + 1] - base[unit]
            if not (1 <= fragments <= MAX_FRAGMENTS and (fragments - 1) * payload < sizes[unit] <= fragments * payload):
                raise ValueError(f"unit {unit} of {sizes[unit]} bytes does not make {fragments} symbols")
        self.sizes, self.base, self.sid_of, self.missing = sizes, base, sid_of, missing
        self.payload = <size_t>payload
        self.units = units
        self.placing = True

    cdef int64_t place_of(self, const uint8_t *symbol, Py_ssize_t *unit) noexcept:
        """Index into sid_of of the fragment that a symbol claims to be, or -1 if there is no such fragment."""
        cdef int64_t at
        unit[0] = <Py_ssize_t>symbol[0] << 16 | <Py_ssize_t>symbol[1] << 8 | symbol[2]
        if unit[0] >= self.units:
            return -1
        at = self.base[unit[0]] + symbol[3]
        return at if at < self.base[unit[0] + 1] else -1

    cdef int64_t file(self, uint32_t sid, int64_t at, Py_ssize_t unit) noexcept:
        self.sid_of[at] = <int32_t>sid
        self.missing[unit] -= 1
        return unit if self.missing[unit] == 0 else END

    cdef int earn(self) noexcept:
        self.useless_left = min(self.most_useless, self.useless_left + 1)
        return 0

    cdef int64_t take_source(self, uint64_t sid, const uint8_t *data, uint64_t end) noexcept:
        cdef decoder *d = &self.decoder.d
        cdef Py_ssize_t unit = 0
        cdef int64_t at = -1
        if sid >= end:
            return ODD
        if d.flags[sid] & SID_KNOWN:
            if memcmp(arena_slot(&d.symbols, sid), data, d.symbol_size) != 0:
                return ODD
            decoder_source(d, <uint32_t>sid, data)
            self.duplicate += 1
            return END
        if self.placing:
            at = self.place_of(data, &unit)
            if at < 0 or self.sid_of[at] >= 0:
                return ODD
        decoder_source(d, <uint32_t>sid, data)
        self.source += 1
        self.earn()
        self.urgent |= sid > self.highest
        self.highest = max(self.highest, sid + 1)
        return END if at < 0 else self.file(<uint32_t>sid, at, unit)

    cdef int64_t take_repair(self, const repair_header *h, const uint8_t *data, uint64_t end) noexcept:
        cdef decoder *d = &self.decoder.d
        cdef int outcome
        if (h.head_span > end or h.tail_offset > end or h.tail_span > end
                or h.first_sid + h.head_span + h.tail_offset + h.tail_span > end):  # field() keeps the sum below 2^64
            return ODD
        if self.useless_left <= 0:
            self.dropped += 1
            return END
        if repair_header_check(h, d.limits.max_degree, d.limits.max_span, end) != NULL:
            return ODD
        outcome = decoder_repair(d, h, data)
        if outcome == C_REPAIR_INNOVATIVE:
            self.useful += 1
            self.earn()
        elif outcome == C_REPAIR_REDUNDANT:
            self.useless += 1
            self.useless_left -= 1
        elif outcome == C_REPAIR_TOO_COSTLY:
            self.dropped += 1
        else:
            return CONTRADICTS
        return END

    cdef int64_t one(self, packet, uint64_t end) except? -9:
        cdef Py_buffer view
        cdef repair_header h
        cdef uint64_t sid = 0
        cdef tuple items
        cdef Py_ssize_t n
        if not isinstance(packet, tuple):
            return ODD
        items = <tuple>packet
        n = len(items)
        if n != 2 and n != 9:
            return ODD
        try:
            if n == 2:
                sid = field(items[0], "sid")
            else:
                fill_header(&h, items[0], items[1], items[2], items[3], items[4], items[5], items[6], items[7])
            PyObject_GetBuffer(items[n - 1], &view, PyBUF_SIMPLE)
        except Exception:
            return ODD  # the receiver's own way raises it again
        try:
            self.decoder.enter()  # reading the packet may have run other code
            end = min(end, <uint64_t>self.decoder.d.capacity)
            if <size_t>view.len != self.decoder.d.symbol_size:
                return ODD
            if n == 2:
                return self.take_source(sid, <const uint8_t *>view.buf, end)
            return self.take_repair(&h, <const uint8_t *>view.buf, end)
        finally:
            PyBuffer_Release(&view)

    def take(self, list packets not None, start, end):
        cdef Py_ssize_t i = <Py_ssize_t>integer(start, "start", 0, 0x7FFFFFFF)
        cdef uint64_t stop = integer(end, "end", 0, <uint64_t>1 << 62)
        cdef int64_t what
        while i < len(packets):
            what = self.one(packets[i], stop)
            if what == ODD:
                return i, ODD
            i += 1
            if what != END:
                return i, what
        return i, END

    def place(self, list sids not None, start):
        cdef Py_ssize_t unit = 0, i = <Py_ssize_t>integer(start, "start", 0, 0x7FFFFFFF)
        cdef int64_t at, what
        cdef uint32_t sid
        if not self.placing:
            raise ValueError("no units are bound")
        while i < len(sids):
            sid = self.decoder.sid(sids[i])
            if not self.decoder.d.flags[sid] & SID_KNOWN:
                raise KeyError(sid)
            at = self.place_of(arena_slot(&self.decoder.d.symbols, sid), &unit)
            if at < 0 or (self.sid_of[at] >= 0 and self.sid_of[at] != <int32_t>sid):
                return i, ODD
            i += 1
            if self.sid_of[at] < 0:
                what = self.file(sid, at, unit)
                if what != END:
                    return i, what
        return i, END

    def collect(self, unit):
        cdef Py_ssize_t index, i, fragments
        cdef size_t size, start, n
        cdef int32_t sid
        cdef uint8_t *out
        if not self.placing:
            raise ValueError("no units are bound")
        index = <Py_ssize_t>integer(unit, "unit", 0, <uint64_t>self.units - 1)
        self.decoder.enter()
        size = <size_t>self.sizes[index]
        fragments = self.base[index + 1] - self.base[index]
        data = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        out = <uint8_t *>PyBytes_AS_STRING(data)
        for i in range(fragments):
            sid = self.sid_of[self.base[index] + i]
            start = <size_t>i * self.payload
            n = min(self.payload, size - start)
            if sid < 0:
                memset(out + start, 0, n)
            elif <uint32_t>sid >= self.decoder.d.capacity:
                raise ValueError(f"sid {sid} is not below the capacity {self.decoder.d.capacity}")
            else:
                memcpy(out + start, arena_slot(&self.decoder.d.symbols, sid) + UNIT_HEADER, n)
        return data

    def counts(self):
        counted = (self.source, self.duplicate, self.useful, self.useless, self.dropped, self.urgent)
        self.source = self.duplicate = self.useful = self.useless = self.dropped = 0
        self.urgent = False
        return counted
