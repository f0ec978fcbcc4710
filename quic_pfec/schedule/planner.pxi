# Included by _policy.pyx: what the next packets carry.


cdef int ask(void *user, const sender_state *s, action *out) except -1:
    """A policy in Python answers. Its window is read here, because it may depend on what it decides."""
    cdef Planner planner = <Planner>user
    write_state(planner.view, s)
    if planner.past is not None:
        planner.past.view(planner.view)
    answer = planner.asked.decide(planner.view)
    planner.c.rule.full_window = is_full(planner.asked.window)
    if planner.asked_degree is not None:
        planner.c.degree = planner.asked_degree(planner.view, planner.usual_degree, planner.c.max_degree)
    if answer.kind == ACTION_RESEND and planner.asked_ranks is not None and planner.asked_ranks(planner.view):
        planner.c.ranks = True
    planner.c.verdict = 0 if planner.past is None else planner.asked.verdict
    count = answer.count
    out.kind = answer.kind
    out.count = <int32_t>min(max(count, -INT32_MAX), INT32_MAX)
    return 0


@cython.final
@cython.no_gc_clear  # C code holds pointers into what it refers to
cdef class Planner:
    cdef core c
    cdef readonly Ledger ledger
    cdef object asked  # the policy
    cdef object asked_degree  # its method `degree`, if a policy in Python has one
    cdef object asked_ranks   # its method `ranks`
    cdef uint32_t usual_degree
    cdef object listener  # the policy again, if it wants to be told of packets and fates
    cdef object view   # the State a policy in Python sees
    cdef const int32_t[::1] unit_packets
    cdef const int32_t[::1] unit_position
    cdef bytes manifest
    cdef object utility  # of each unit in the order of sending, or None
    cdef feature_memory memory
    cdef const uint32_t[::1] unit_of
    cdef const double[::1] utility_before
    cdef object past   # the FeatureMemory of a learned policy in Python

    def __cinit__(self, Ledger ledger not None, policy, const int32_t[::1] unit_packets not None,
                  const int32_t[::1] unit_position not None, bytes manifest not None, *, double now, double deadline_s,
                  uint64_t transfer_id, symbol_size, degree, max_degree, max_window, int64_t credit, double budget, double rtt_s,
                  double min_rtt_s, double slot_s, double reserved_s, unit_utility=None):
        ledger.take_units(unit_packets, unit_position)
        if not 1 <= len(manifest) < 1 << 31:
            raise LocalError(f"a manifest of {len(manifest)} bytes")
        if transfer_id >> 62:
            raise LocalError(f"transfer id {transfer_id} does not fit a varint")
        if not 1 <= max_window <= MAX_WINDOW or not 1 <= degree <= max_degree <= MAX_WINDOW:
            raise LocalError(f"a window of {max_window} ids, degree {degree} of {max_degree}")
        self.ledger = ledger
        self.unit_packets = unit_packets
        self.unit_position = unit_position
        self.manifest = manifest
        self.utility = unit_utility
        self.view = State()
        self.c.book = &ledger.book
        self.c.decide = ask
        self.c.user = <void *>self
        self.c.unit_packets = &unit_packets[0] if len(unit_packets) else NULL
        self.c.unit_position = &unit_position[0] if len(unit_position) else NULL
        self.c.transfer_id = transfer_id
        self.c.symbol_size = symbol_size
        self.c.degree = self.usual_degree = degree
        self.c.max_degree = max_degree
        self.c.max_window = max_window
        self.c.manifest_bytes = <uint32_t>len(manifest)
        self.c.budget = self.memory.budget_total = budget
        self.c.deadline_s = deadline_s
        self.c.credit = credit
        self.c.running = True
        self.set_path(rtt_s, min_rtt_s, slot_s, reserved_s)
        core_start(&self.c, now)
        self.policy = policy

    def __dealloc__(self):
        core_free(&self.c)

    def __reduce__(self):
        raise TypeError("a Planner cannot be pickled")

    @property
    def policy(self):
        return self.asked

    @policy.setter
    def policy(self, asked):
        cdef policy rule
        memset(&rule, 0, sizeof(rule))
        if isinstance(asked, Policy):
            rule = (<Policy>asked).rule
        else:
            rule.rule = RULE_EXTERNAL
            rule.full_window = is_full(asked.window)
        learned = not isinstance(asked, Policy) and isinstance(asked, Learned)
        if learned or rule.net != NULL:
            self.remember()
        if core_set_rule(&self.c, &rule) != 0:
            raise MemoryError
        self.asked = asked
        self.past = None
        if learned:
            self.past = FeatureMemory(self.sizes(), self.utility, self.c.state.slots_total, self.memory.budget_total,
                                      self.usual_degree)
            asked.enter(self.past)
        self.asked_degree = None if isinstance(asked, Policy) else getattr(asked, "degree", None)
        self.asked_ranks = None if isinstance(asked, Policy) else getattr(asked, "ranks", None)
        self.c.degree = self.usual_degree
        self.listener = asked if isinstance(asked, Listener) else None
        if self.listener is not None:
            self.listener.start(self.ledger)

    cdef object sizes(self):
        """Packets of each unit, in the order of sending."""
        return np.asarray(self.unit_packets)[np.asarray(self.unit_position) == 0].astype(np.int64)

    cdef int remember(self) except -1:
        """From now on there are features."""
        if self.c.memory != NULL:
            return 0
        sizes = self.sizes()
        if self.utility is None or len(self.utility) != len(sizes):
            raise LocalError("a learned policy needs the utility of each unit, in the order of sending")
        self.unit_of = np.repeat(np.arange(len(sizes), dtype=np.uint32), sizes)
        self.utility_before = np.concatenate(([0.0], np.cumsum(self.utility)))
        self.memory.unit_of = &self.unit_of[0] if len(self.unit_of) else NULL
        self.memory.utility_before = &self.utility_before[0]
        self.memory.units = len(sizes)
        features_start(&self.memory, self.c.state.slots_total)
        self.c.memory = &self.memory
        return 0

    def set_path(self, double rtt_s, double min_rtt_s, double slot_s, double reserved_s):
        if not slot_s > 0:
            raise LocalError(f"a packet takes time: {slot_s} s")
        self.c.rtt_s = rtt_s
        self.c.min_rtt_s = min_rtt_s
        self.c.slot_s = slot_s
        self.c.reserved_s = reserved_s
        core_changed(&self.c)

    def extend(self, double now, double deadline_s):
        core_extend(&self.c, now, deadline_s)
        if self.past is not None:
            self.past.extend(self.c.state.slots_total)

    @property
    def send_cutoff_s(self):
        return core_cutoff(&self.c)

    @property
    def slots_total(self):
        return self.c.state.slots_total

    @property
    def packets(self):
        return self.c.counters.source + self.c.counters.repair + self.c.counters.resent + self.c.counters.manifests

    @property
    def counters(self):
        cdef core_counters *n = &self.c.counters
        return (n.source, n.repair, n.resent, n.manifests, n.frame_bytes, n.losses, n.slots_credit,
                n.first_packet_s if n.any else None, n.last_packet_s if n.any else None)

    @property
    def overrides(self):
        return self.c.counters.overridden, self.c.counters.guarded

    @property
    def flec(self):
        cdef flec_view v
        cdef ledger *book = &self.ledger.book
        cdef double prior = loss_long(book.loss)
        if not policy_is_flec(&self.c.rule):
            return None
        v = flec_look(&self.c.flec, book.known_lost, book.seen_count, book.prefix, prior)
        return v.md, v.ad, v.eps, v.p, v.r_ge

    def finished(self, double now):
        return core_finished(&self.c, now)

    def ready(self, double now):
        return core_ready(&self.c, now) == 1

    def next_timer(self):
        cdef double when_s = core_next_timer(&self.c)
        return None if when_s == INFINITY else when_s

    def state(self, double now):
        core_view(&self.c, now)
        write_state(self.view, &self.c.state)
        return self.view

    cdef int settle(self, token, bint delivered, bint probe) except -1:
        cdef size_t number = self.ledger.check_token(token)
        cdef bint fresh = self.ledger.book.tokens[number] != TOKEN_SETTLED
        if core_fate(&self.c, number, delivered, probe) != 0:
            raise MemoryError
        if fresh and self.listener is not None:
            self.listener.on_fate(token, delivered, probe)
        if fresh and self.past is not None and not probe:
            self.past.on_fate(not delivered)
        return 0

    def fate(self, token, bint delivered, bint probe):
        self.settle(token, delivered, probe)

    def fates(self, tokens, bint delivered):
        for token in tokens:
            self.settle(token, delivered, False)

    def feedback(self, int64_t deficit, int64_t credit, bint running):
        core_feedback(&self.c, deficit, credit, running)

    cdef Py_ssize_t batch(self, double now, Py_ssize_t room, int64_t bytes_free, planned *out) except -1:
        cdef Py_ssize_t planned_one, count = 0
        room = min(room, BATCH)
        if room <= 0:
            return 0
        if self.listener is None and self.past is None:
            count = core_plan(&self.c, now, <size_t>room, bytes_free, out)
            if count < 0:
                raise MemoryError
            return count
        while count < room:  # each packet is told before the next is decided
            planned_one = core_plan(&self.c, now, 1, bytes_free, &out[count])
            if planned_one < 0:
                raise MemoryError
            if planned_one == 0:
                break
            self.tell(&out[count], now)
            count += 1
        return count

    cdef int tell(self, const planned *packet, double now) except -1:
        cdef const coding_set *s = &packet.set
        if packet.kind == FRAME_MANIFEST:
            return 0
        write_state(self.view, &self.c.state)
        if self.past is not None:
            self.past.view(self.view)
        if self.listener is None:
            return 0
        kind, stretch = ActionKind.SOURCE, None
        if packet.kind == FRAME_REPAIR:
            kind, stretch = ActionKind.REPAIR, (s.first_sid, s.first_sid + s.head_span + s.tail_offset + s.tail_span)
        elif packet.kind == FRAME_RESEND:
            kind = ActionKind.RESEND
        self.listener.on_sent(self.view, kind, packet.number, packet.token, stretch, now)
        return 0

    def plan(self, double now, Py_ssize_t max_packets, int64_t bytes_free):
        cdef planned packets[BATCH]
        cdef planned *packet
        cdef Py_ssize_t i, count = BATCH
        cdef list plans = []
        while count == BATCH:
            count = self.batch(now, max_packets - len(plans), bytes_free, packets)
            for i in range(count):
                packet = &packets[i]
                plans.append((packet.kind, packet.number, packet.token if packet.token >= 0 else None,
                              set_tuple(&packet.set, packet.head) if packet.kind == FRAME_REPAIR else None,
                              packet.degree if packet.kind == FRAME_REPAIR else 0))
        return plans

    def plan_into(self, encoder, double now, Py_ssize_t max_packets, int64_t bytes_free, out, Py_ssize_t stride,
                  Py_ssize_t offset):
        cdef Py_buffer view
        cdef planned packets[BATCH]
        cdef Py_ssize_t i, count = BATCH, at = offset
        cdef list kinds = [], lengths = [], tokens = []
        symbol_into, repair_into = encoder.symbol_into, encoder.repair_into
        if not MIN_SYMBOL_SIZE <= self.c.symbol_size <= MAX_SYMBOL_SIZE:
            raise LocalError(f"a symbol of {self.c.symbol_size} bytes, possible are {MIN_SYMBOL_SIZE} to {MAX_SYMBOL_SIZE}")
        try:
            PyObject_GetBuffer(out, &view, PyBUF_WRITABLE)
        except BufferError as error:
            raise LocalError(f"cannot be written to: {error}") from None
        try:
            check_room(view.len, max_packets, bytes_free, stride, offset)
            while count == BATCH:
                count = self.batch(now, max_packets - len(kinds), bytes_free, packets)
                for i in range(count):
                    lengths.append(self.write(&packets[i], now, <uint8_t *>view.buf, at, symbol_into, repair_into, out))
                    kinds.append(packets[i].kind)
                    tokens.append(packets[i].token if packets[i].token >= 0 else None)
                    at += stride
        finally:
            PyBuffer_Release(&view)
        return kinds, lengths, tokens

    cdef Py_ssize_t write(self, const planned *packet, double now, uint8_t *base, Py_ssize_t at, symbol_into, repair_into,
                          out) except -1:
        """The frame at `at`, which has room for what core_plan() said: bytes of it."""
        cdef uint8_t *target = base + at
        cdef uint32_t size
        cdef size_t header
        cdef const coding_set *s
        if packet.kind == FRAME_MANIFEST:
            size = manifest_fragment(self.c.manifest_bytes, packet.number)
            header = frame_write_manifest(target, self.c.transfer_id, self.c.manifest_bytes, packet.number,
                                          core_remaining_us(&self.c, now), size)
            memcpy(target + header, PyBytes_AS_STRING(self.manifest) + packet.number, size)
            return <Py_ssize_t>(header + size)
        size = self.c.symbol_size
        if packet.kind == FRAME_REPAIR:
            s = &packet.set
            header = frame_write_repair(target, self.c.transfer_id, packet.number, packet.degree, s, packet.head, size)
            repair_into(self.c.transfer_id, packet.number, s.first_sid, packet.degree, s.head_span,
                        PyBytes_FromStringAndSize(<const char *>packet.head, (s.head_span + 7) // 8), s.tail_offset,
                        s.tail_span, out, at + <Py_ssize_t>header)
        else:
            header = frame_write_source(target, self.c.transfer_id, packet.number, size)
            symbol_into(packet.number, out, at + <Py_ssize_t>header)
        return <Py_ssize_t>(header + size)


cdef int check_room(Py_ssize_t size, Py_ssize_t max_packets, int64_t bytes_free, Py_ssize_t stride, Py_ssize_t offset) except -1:
    cdef Py_ssize_t spare = size - offset - <Py_ssize_t>max(bytes_free, 0)
    if stride < 1 or offset < 0 or bytes_free > stride:
        raise LocalError(f"frames of {bytes_free} bytes, {stride} apart, from {offset} on")
    if max_packets > 0 and (spare < 0 or spare // stride < max_packets - 1):
        raise LocalError(f"{size} bytes have no room for {max_packets} frames of {bytes_free}, {stride} apart, from {offset} on")
    return 0
