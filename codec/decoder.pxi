# Included by _codec.pyx: Python's view of decoder.h.


cdef struct received:
    bint is_repair
    uint64_t sid
    repair_header header
    Py_buffer view
    int outcome


@cython.final
cdef class Decoder:
    cdef decoder d
    cdef Py_ssize_t exports
    cdef bint busy  # poll() and receive_batch() work without the interpreter lock; set and tested only with it

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
        self.check_sid(number)
        return <uint32_t>number

    cdef int check_sid(self, uint64_t number) except -1:
        if number >= self.d.capacity:
            raise ValueError(f"sid {number} is not below the capacity {self.d.capacity}")
        return 0

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

    def receive_batch(self, packets):
        cdef list held = list(packets)
        cdef size_t i, n = len(held), acquired = 0
        cdef received *batch = <received *>calloc(n + 1, sizeof(received))
        cdef received *event
        cdef tuple packet
        if batch == NULL:
            raise MemoryError
        try:
            for i in range(n):
                event = &batch[i]
                packet = held[i]
                if len(packet) == 2:
                    event.sid = field(packet[0], "sid")
                elif len(packet) == 9:
                    event.is_repair = True
                    fill_header(&event.header, packet[0], packet[1], packet[2], packet[3], packet[4], packet[5],
                                packet[6], packet[7])
                else:
                    raise ValueError(f"a packet is (sid, data) or a header of eight and data, not {len(packet)} items")
                acquire(&event.view, packet[len(packet) - 1], self.d.symbol_size)
                acquired += 1
            self.enter()  # reading the packets may have run other code
            for i in range(n):
                if batch[i].is_repair:
                    check_header(&batch[i].header, self.d.limits.max_degree, self.d.limits.max_span, self.d.capacity)
                else:
                    self.check_sid(batch[i].sid)
            self.busy = True
            with nogil:
                for i in range(n):
                    event = &batch[i]
                    if event.is_repair:
                        event.outcome = decoder_repair(&self.d, &event.header, <const uint8_t *>event.view.buf)
                    else:
                        event.outcome = decoder_source(&self.d, <uint32_t>event.sid, <const uint8_t *>event.view.buf)
            self.busy = False
            return [batch[i].outcome for i in range(n)]
        finally:
            for i in range(acquired):
                PyBuffer_Release(&batch[i].view)
            free(batch)

    def poll(self, max_symbols, order=None, *, max_macs=None):
        cdef size_t wanted = integer(max_symbols, "max_symbols", 0, 0xFFFFFFFF)
        cdef uint64_t macs = UINT64_MAX if max_macs is None else integer(max_macs, "max_macs", 1, 0xFFFFFFFF)
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
                found = decoder_poll(&self.d, first, n_first, wanted, macs, out)
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
    def payload_macs(self):
        self.enter()
        return self.d.counters.payload_macs

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
