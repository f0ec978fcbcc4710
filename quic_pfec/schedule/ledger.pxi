# Included by _policy.pyx: the state of every symbol of one transfer.


cdef object set_tuple(const coding_set *s, const uint8_t *head):
    return (s.first_sid, s.head_span, PyBytes_FromStringAndSize(<const char *>head, (s.head_span + 7) // 8),
            s.tail_offset, s.tail_span)


@cython.final
@cython.no_gc_clear  # C code holds pointers into what it refers to
cdef class Ledger:
    cdef ledger book
    cdef readonly object loss
    cdef double[::1] loss_values
    cdef const double[::1] priority
    cdef const int32_t[::1] unit_packets
    cdef const int32_t[::1] unit_position

    def __cinit__(self, const double[::1] priority not None, loss):
        if len(priority) > MAX_SYMBOLS:
            raise LocalError(f"{len(priority)} symbols, at most {MAX_SYMBOLS} are possible")
        self.loss = loss
        self.loss_values = loss.values
        if len(self.loss_values) != 3:
            raise LocalError("a loss estimate has three values")
        self.priority = priority
        cdef const double *first = &priority[0] if len(priority) else NULL
        if ledger_init(&self.book, <uint32_t>len(priority), first, <loss_estimate *>&self.loss_values[0]) != 0:
            raise MemoryError

    def __dealloc__(self):
        ledger_free(&self.book)

    def __reduce__(self):
        raise TypeError("a Ledger cannot be pickled")

    @property
    def symbols(self):
        return self.book.symbols

    @property
    def next(self):
        return self.book.next

    @property
    def prefix(self):
        return self.book.prefix

    @property
    def in_flight(self):
        return self.book.in_flight

    @property
    def repairs_in_flight(self):
        return self.book.repairs_in_flight

    @property
    def known_lost(self):
        return self.book.known_lost

    @property
    def known(self):
        return self.book.known

    @property
    def unresolved(self):
        return ledger_unresolved(&self.book)

    @property
    def losses_queued(self):
        return self.book.heap_count

    def send_source(self):
        cdef uint32_t sid = 0
        cdef int64_t token = ledger_send_source(&self.book, &sid)
        self.check_sent(token, "every symbol was sent")
        return sid, token

    def send_lost(self):
        cdef uint32_t sid = 0
        cdef int64_t token = ledger_send_lost(&self.book, &sid)
        self.check_sent(token, "no symbol is known to be lost")
        return sid, token

    def rank(self, const int32_t[::1] unit_packets not None, const int32_t[::1] unit_position not None):
        self.take_units(unit_packets, unit_position)
        if self.book.symbols:
            ledger_rank(&self.book, &unit_packets[0], &unit_position[0])

    cdef int take_units(self, const int32_t[::1] packets, const int32_t[::1] position) except -1:
        """Checked, and kept for as long as C code may look at them."""
        cdef Py_ssize_t sid, symbols = self.book.symbols
        if len(packets) != symbols or len(position) != symbols:
            raise LocalError("a unit for every symbol")
        for sid in range(symbols):
            if not 0 <= position[sid] <= sid or not position[sid] < packets[sid] <= symbols - sid + position[sid]:
                raise LocalError(f"symbol {sid} is place {position[sid]} of a unit of {packets[sid]}")
        if self.book.unit_packets != NULL:
            raise LocalError("the units of a ledger are set once")
        self.unit_packets, self.unit_position = packets, position
        return 0

    def send_repair(self):
        cdef int64_t token = ledger_send_repair(&self.book)
        self.check_sent(token, "")
        return token

    cdef int check_sent(self, int64_t token, str reason) except -1:
        if token == -2:
            raise MemoryError
        if token < 0:
            raise IndexError(reason)
        return 0

    cdef size_t check_token(self, token) except? -1:
        cdef int64_t number = token
        if number < 0 or <uint64_t>number >= self.book.token_count:
            raise IndexError(f"no packet has the token {token}")
        return <size_t>number

    def is_lost(self, int64_t sid):
        if sid < 0 or sid >= self.book.symbols:
            raise IndexError(f"no symbol has the id {sid}")
        return self.book.state[sid] == SYMBOL_LOST

    def fate(self, token, bint delivered, *, bint probe=False):
        cdef size_t number = self.check_token(token)
        cdef bint fresh = self.book.tokens[number] != TOKEN_SETTLED
        if ledger_fate(&self.book, number, delivered, probe) != 0:
            raise MemoryError
        return fresh

    def learn_known(self, int64_t start, int64_t stop):
        if start < 0 or stop > self.book.next:
            raise IndexError(f"symbols [{start}, {stop}) of {self.book.next} sent")
        if start < stop:
            ledger_learn_known(&self.book, <uint32_t>start, <uint32_t>stop)

    def sack_set(self, uint32_t max_window, uint32_t max_head_span):
        cdef coding_set s
        cdef uint8_t head[MAX_HEAD_BYTES]
        if ledger_unresolved(&self.book) == 0:
            raise IndexError("no symbol is unresolved")
        if not 1 <= max_window <= MAX_WINDOW or not 1 <= max_head_span <= 8 * MAX_HEAD_BYTES:
            raise LocalError(f"a window of {max_window} ids, a bitmap of {max_head_span}")
        ledger_sack_set(&self.book, max_window, max_head_span, &s, head)
        return set_tuple(&s, head)

    def full_set(self, uint32_t max_window):
        cdef coding_set s
        cdef uint8_t head[1]
        ledger_full_set(&self.book, max_window, &s)
        return set_tuple(&s, head)
