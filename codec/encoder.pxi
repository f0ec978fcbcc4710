# Included by _codec.pyx: the symbols of one transfer, and repairs over them.


@cython.final
@cython.no_gc
cdef class Encoder:
    cdef arena symbols
    cdef arena output  # MAX_BURST slots, touched as used
    cdef bint busy     # repairs() works without the interpreter lock; set and tested only with it
    cdef uint32_t *sids
    cdef uint8_t *coefficients
    cdef const uint8_t **operands
    cdef Py_ssize_t exports
    cdef readonly size_t symbol_size
    cdef readonly uint32_t capacity
    cdef readonly uint32_t count
    cdef uint32_t reserved    # slots handed out and not yet committed
    cdef bint run             # by reserve_run()
    cdef Py_ssize_t writable  # exports of their view
    cdef object handed        # weak reference to their view: a strong one would close a cycle that nothing collects

    def __cinit__(self, symbol_size, capacity):
        self.symbol_size = integer(symbol_size, "symbol_size", 1, MAX_SYMBOL_SIZE)
        self.capacity = <uint32_t>integer(capacity, "capacity", 1, PFEC_MAX_CAPACITY)
        self.sids = <uint32_t *>calloc(PFEC_MAX_SPAN, sizeof(uint32_t))
        self.coefficients = <uint8_t *>calloc(PFEC_MAX_SPAN, sizeof(uint8_t))
        self.operands = <const uint8_t **>calloc(PFEC_MAX_SPAN, sizeof(uint8_t *))
        if (arena_init(&self.symbols, self.symbol_size, self.capacity) != 0
                or arena_init(&self.output, self.symbol_size, MAX_BURST) != 0
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

    cdef inline int enter(self) except -1:
        if self.busy:
            raise RuntimeError("the encoder is in use by another thread")
        return 0

    cdef int check_room(self, uint64_t slots) except -1:
        self.enter()
        if slots > self.capacity - self.count:
            if self.count == self.capacity:
                raise ValueError(f"all {self.capacity} symbols are taken")
            raise ValueError(f"{slots} symbols do not fit, {self.capacity - self.count} are left")
        return 0

    cdef int take_back(self) except -1:
        """End the view handed out, or ValueError while something made from it lives: it could write to a symbol."""
        view = None if self.handed is None else self.handed()
        if view is not None:
            try:
                view.release()
            except BufferError:
                raise ValueError("views of the reserved slots are held") from None
        if self.writable != 0:
            raise ValueError("views of the reserved slots are held")
        self.handed = None
        return 0

    def push(self, data):
        cdef Py_buffer view
        acquire(&view, data, self.symbol_size)
        try:
            if self.reserved:
                raise ValueError("a reserved slot waits for commit()")
            self.check_room(1)
            arena_ahead(&self.symbols, self.count)
            memcpy(arena_slot(&self.symbols, self.count), view.buf, self.symbol_size)
        finally:
            PyBuffer_Release(&view)
        self.count += 1
        return self.count - 1

    def reserve(self):
        self.check_room(1)
        self.take_back()
        arena_ahead(&self.symbols, self.count)
        view = slot_view(self, &self.writable, arena_slot(&self.symbols, self.count), self.symbol_size, True)
        self.handed = weakref.ref(view)
        self.reserved, self.run = 1, False
        return view

    def reserve_run(self, count):
        cdef uint32_t slots = <uint32_t>integer(count, "count", 1, PFEC_MAX_CAPACITY)
        cdef _Run exporter
        self.check_room(slots)
        self.take_back()
        arena_back_run(&self.symbols, self.count, slots)
        exporter = _Run.__new__(_Run)
        exporter.owner = self
        exporter.exports = &self.writable
        exporter.data = arena_slot(&self.symbols, self.count)
        exporter.shape[0], exporter.shape[1] = slots, self.symbol_size
        exporter.strides[0], exporter.strides[1] = self.symbols.stride, 1
        view = memoryview(exporter)
        self.handed = weakref.ref(view)
        self.reserved, self.run = slots, True
        return view

    cdef uint32_t accept(self, bint run) except? 0xFFFFFFFF:
        cdef uint32_t first = self.count
        self.enter()
        if self.reserved == 0 or self.run != run:
            raise ValueError("no run is reserved" if run else "no slot is reserved")
        self.take_back()
        self.count += self.reserved
        self.reserved = 0
        return first

    def commit(self):
        return self.accept(False)

    def commit_run(self):
        return self.accept(True)

    def symbol(self, sid):
        cdef uint64_t index = field(sid, "sid")
        self.enter()
        if index >= self.count:
            raise KeyError(sid)
        return slot_view(self, &self.exports, arena_slot(&self.symbols, index), self.symbol_size, False)

    def symbol_into(self, sid, out, offset):
        cdef uint64_t index = field(sid, "sid")
        cdef Py_buffer view
        cdef uint8_t *target = acquire_target(&view, out, offset, self.symbol_size)
        try:
            self.enter()
            if index >= self.count:
                raise KeyError(sid)
            memmove(target, arena_slot(&self.symbols, index), self.symbol_size)
        finally:
            PyBuffer_Release(&view)

    def gather(self, first_sid, nbytes):
        cdef uint64_t first = field(first_sid, "first_sid")
        cdef uint64_t size = integer(nbytes, "nbytes", 1, MAX_UNIT_BYTES)
        cdef size_t payload, i, count
        cdef uint8_t *out
        self.enter()
        if self.symbol_size <= UNIT_HEADER:
            raise ValueError("symbols without room behind the unit header")
        payload = self.symbol_size - UNIT_HEADER
        count = <size_t>((size + payload - 1) // payload)
        if first + count > self.count:
            raise KeyError(first_sid)
        unit = PyBytes_FromStringAndSize(NULL, <Py_ssize_t>size)
        out = <uint8_t *>PyBytes_AS_STRING(unit)
        for i in range(count):
            memcpy(out + i * payload, arena_slot(&self.symbols, first + i) + UNIT_HEADER, min(payload, size - i * payload))
        return unit

    def repair(self, transfer_id, repair_number, first_sid, degree, head_span, bytes head, tail_offset, tail_span):
        cdef repair_header h
        fill_header(&h, transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        self.enter()
        check_header(&h, h.degree, PFEC_MAX_SPAN, self.count)
        self.encode(&h, self.output.base)
        return PyBytes_FromStringAndSize(<char *>self.output.base, <Py_ssize_t>self.symbol_size)

    def repair_into(self, transfer_id, repair_number, first_sid, degree, head_span, bytes head, tail_offset, tail_span, out,
                    offset):
        cdef repair_header h
        cdef Py_buffer view
        cdef uint8_t *target
        fill_header(&h, transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        target = acquire_target(&view, out, offset, self.symbol_size)
        try:
            self.enter()
            check_header(&h, h.degree, PFEC_MAX_SPAN, self.count)
            self.encode(&h, self.output.base)  # padded: not into `out`, which may end with the symbol
            memcpy(target, self.output.base, self.symbol_size)
        finally:
            PyBuffer_Release(&view)

    def repairs(self, count, transfer_id, repair_number, first_sid, degree, head_span, bytes head, tail_offset, tail_span):
        cdef repair_header h
        cdef size_t i, n = integer(count, "count", 1, MAX_BURST)
        fill_header(&h, transfer_id, repair_number, first_sid, degree, head_span, head, tail_offset, tail_span)
        self.enter()
        h.repair_number += n - 1  # the last one is checked: the numbers of a burst do not wrap
        check_header(&h, h.degree, PFEC_MAX_SPAN, self.count)
        h.repair_number -= n - 1
        self.busy = True
        with nogil:
            for i in range(n):
                self.encode(&h, arena_slot(&self.output, i))
                h.repair_number += 1
        self.busy = False
        return [PyBytes_FromStringAndSize(<char *>arena_slot(&self.output, i), <Py_ssize_t>self.symbol_size)
                for i in range(n)]

    cdef void encode(self, const repair_header *h, uint8_t *out) noexcept nogil:
        cdef size_t i, n = repair_expand(h, self.sids, self.coefficients)
        for i in range(n):
            self.operands[i] = arena_slot(&self.symbols, self.sids[i])
        gf256.dot(out, self.operands, self.coefficients, n, self.output.stride)
