# Included by _engine.pyx: what a hand-off is made of besides its policy.


cdef object row(value, dtype, name, Py_ssize_t length=-1):
    """A private one-dimensional array: what is validated here stays as it is."""
    array = np.array(value, dtype=dtype, order="C")
    if array.ndim != 1 or (length >= 0 and len(array) != length):
        raise LocalError(f"{name} has shape {array.shape}" + (f", not ({length},)" if length >= 0 else ""))
    return array


@cython.final
cdef class Scenario:
    cdef scenario s
    cdef list arrays
    cdef readonly object unit_packets
    cdef readonly object utility

    def __init__(self, unit_packets, utility, losses, times_s, step_slots, step_rtt_s, step_slot_s, double deadline_s):
        packets = row(unit_packets, np.int64, "unit_packets")
        values = row(utility, np.float64, "utility", len(packets))
        lost = row(losses, np.bool_, "losses")
        times = row(times_s, np.float64, "times_s", len(lost))
        slots = row(step_slots, np.int64, "step_slots")
        rtts = row(step_rtt_s, np.float64, "step_rtt_s", len(slots))
        lengths = row(step_slot_s, np.float64, "step_slot_s", len(slots))
        if not len(packets) or packets.min() < 1 or packets.max() > MAX_SYMBOLS or packets.sum() > MAX_SYMBOLS:
            raise LocalError(f"units of one packet at least, {MAX_SYMBOLS} packets in all at most")
        if not (values >= 0).all() or not 0 < values.sum() < np.inf:
            raise LocalError("utility must be finite, not negative, and not all zero")
        if not 1 <= len(lost) <= MAX_SLOTS or times[0] < 0 or not (np.diff(times) > 0).all() or not np.isfinite(times).all():
            raise LocalError("at least one slot, and times that ascend")
        if not len(slots) or slots[0] != 0 or not (np.diff(slots) > 0).all():
            raise LocalError("the path has a first step at slot 0, and the others ascend")
        if not (np.isfinite(rtts) & (rtts > 0) & np.isfinite(lengths) & (lengths > 0)).all():
            raise LocalError("round trips and slots take time")
        if not np.isfinite(deadline_s):
            raise LocalError(f"a deadline at {deadline_s}")
        first = np.cumsum(packets) - packets
        symbols = int(packets.sum())
        self.unit_packets, self.utility = packets, values
        per_sid = np.repeat(packets, packets).astype(np.int32)
        position = (np.arange(symbols) - np.repeat(first, packets)).astype(np.int32)
        unit_of = np.repeat(np.arange(len(packets)), packets).astype(np.uint32)
        priority = (-(values / packets))[unit_of].astype(np.float64)
        oldest = np.arange(symbols, dtype=np.float64)
        before = np.concatenate(([0.0], np.cumsum(values)))
        bits = lost.astype(np.uint8)
        self.arrays = [packets, values, times, slots, rtts, lengths, per_sid, position, unit_of, priority, oldest, before, bits]
        self.s.symbols = symbols
        self.s.units = len(packets)
        self.s.slots = len(lost)
        self.s.steps = len(slots)
        self.s.packets = <const int64_t *>address(packets)
        self.s.utility = <const double *>address(values)
        self.s.times_s = <const double *>address(times)
        self.s.step_slots = <const int64_t *>address(slots)
        self.s.step_rtt_s = <const double *>address(rtts)
        self.s.step_slot_s = <const double *>address(lengths)
        self.s.unit_packets = <const int32_t *>address(per_sid)
        self.s.unit_position = <const int32_t *>address(position)
        self.s.unit_of = <const uint32_t *>address(unit_of)
        self.s.priority = <const double *>address(priority)
        self.s.oldest_first = <const double *>address(oldest)
        self.s.utility_before = <const double *>address(before)
        self.s.losses = <const uint8_t *>address(bits)
        self.s.utility_total = values.sum()
        self.s.deadline_s = deadline_s

    def __reduce__(self):
        raise TypeError("a Scenario cannot be pickled")

    @property
    def symbols(self):
        return self.s.symbols

    @property
    def slots(self):
        return self.s.slots


cdef void *address(array):
    cdef size_t where = array.ctypes.data
    return <void *>where
