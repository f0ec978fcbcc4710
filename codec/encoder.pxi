# Included by _codec.pyx: the symbols of one transfer, and repairs over them.


@cython.final
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
    cdef bint reserved

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

    cdef int check_room(self) except -1:
        self.enter()
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
            arena_ahead(&self.symbols, self.count)
            memcpy(arena_slot(&self.symbols, self.count), view.buf, self.symbol_size)
        finally:
            PyBuffer_Release(&view)
        self.count += 1
        return self.count - 1

    def reserve(self):
        self.check_room()
        self.reserved = True
        arena_ahead(&self.symbols, self.count)
        return slot_view(self, &self.exports, arena_slot(&self.symbols, self.count), self.symbol_size, True)

    def commit(self):
        self.enter()
        if not self.reserved:
            raise ValueError("no slot is reserved")
        self.reserved = False
        self.count += 1
        return self.count - 1

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
