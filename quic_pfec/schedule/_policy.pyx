# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
"""The compiled scheduler: Python's view of core.h.

This module validates and owns the memory; every rule is in the C files beside it, where the compiled simulator finds
them too. Contracts of the public names: quic_pfec/schedule/_policy.pyi. Everything works with the interpreter lock held:
a call takes microseconds at most.
"""

cimport cython
from cpython.buffer cimport PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.math cimport INFINITY
from libc.stdint cimport INT32_MAX, int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

import numpy as np

from quic_pfec.schedule.features import FeatureMemory
from quic_pfec.schedule.flec import Listener
from quic_pfec.schedule.learned import Learned
from quic_pfec.schedule.network import Network
from quic_pfec.schedule.state import IDLE, REPAIR, RESEND, SOURCE, Action, ActionKind, State
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import MAX_SYMBOL_SIZE, MAX_WINDOW, MIN_SYMBOL_SIZE


cdef extern from "core.h":
    ctypedef struct loss_estimate:
        double fates, losses, recent
    ctypedef struct coding_set:
        uint32_t first_sid, head_span, tail_offset, tail_span
    ctypedef struct ledger:
        uint32_t symbols, next, prefix, in_flight, repairs_in_flight, known_lost, known, seen_count
        uint8_t *state
        const int32_t *unit_packets
        int32_t *tokens
        loss_estimate *loss
        size_t token_count, heap_count
    int ledger_init(ledger *book, uint32_t symbols, const double *priority, loss_estimate *loss) nogil
    void ledger_free(ledger *book) nogil
    int64_t ledger_send_source(ledger *book, uint32_t *sid) nogil
    int64_t ledger_send_lost(ledger *book, uint32_t *sid) nogil
    int64_t ledger_send_repair(ledger *book) nogil
    void ledger_rank(ledger *book, const int32_t *unit_packets, const int32_t *unit_position) nogil
    int ledger_fate(ledger *book, size_t token, bint delivered, bint probe) nogil
    void ledger_learn_known(ledger *book, uint32_t start, uint32_t stop) nogil
    uint32_t ledger_unresolved(const ledger *book) nogil
    void ledger_sack_set(ledger *book, uint32_t max_window, uint32_t max_head_span, coding_set *s, uint8_t *head) nogil
    void ledger_full_set(const ledger *book, uint32_t max_window, coding_set *s) nogil

    double loss_long(const loss_estimate *loss) nogil
    int SYMBOL_LOST, TOKEN_SETTLED

    int RULE_EXTERNAL, RULE_NONE, RULE_FIXED, RULE_ARQ, RULE_DEFICIT, RULE_EPOCH, RULE_HYBRID
    int RULE_FLEC_RT, RULE_FLEC_RT_WINDOW, RULE_FLEC_RT_SPREAD, RULE_Q
    int ACTION_IDLE, ACTION_SOURCE, ACTION_REPAIR, ACTION_RESEND
    ctypedef struct action:
        int32_t kind, count
    ctypedef struct sender_state:
        int64_t slots_left, slots_total
        double rtt_slots
        int64_t sources_total, sources_sent, unit_packets, unit_position
        int64_t in_flight, repairs_in_flight, repairs_sent, known_lost, unresolved, window, feedback_deficit
        int64_t packets_extra, fates
        double loss_short, loss_long, budget_left
        bint can_source, can_repair, can_resend
    enum:
        FEATURES
        CHOICES
        HIDDEN
        OUTPUT_ROOM
    ctypedef struct network:
        float w1[15][64]
        float b1[64]
        float w2[64][64]
        float b2[64]
        float w3[64][8]
        float b3[8]
        float low[15]
        float high[15]
        int version
        bint resend
        double margin
        void (*forward)(const network *n, const float *x, float *y) nogil
    network *network_new()
    void network_free(network *n)
    ctypedef struct feature_memory:
        const uint32_t *unit_of
        const double *utility_before
        uint32_t units
        double budget_total
    void features_start(feature_memory *m, int64_t slots_total)
    ctypedef struct policy:
        int rule
        bint full_window
        double rate, alpha, horizon_rtt, open_share, spread, blind_share, hold_rtt, doubt, crowd, wide_degree, headroom
        const network *net
    action policy_decide(const policy *p, const sender_state *s) nogil
    bint policy_ranks(const policy *p, const sender_state *s) nogil
    uint32_t policy_degree(const policy *p, const sender_state *s, uint32_t degree, uint32_t most) nogil
    bint policy_is_flec(const policy *p) nogil
    ctypedef struct flec:
        pass
    ctypedef struct flec_view:
        uint32_t md, ad
        double eps, p, r_ge
    flec_view flec_look(const flec *f, uint32_t known_lost, uint32_t seen, uint32_t prefix, double loss_prior) nogil
    action flec_decide(flec *f, const policy *p, const sender_state *s, uint32_t seen) nogil

    int FRAME_MANIFEST, FRAME_SOURCE, FRAME_REPAIR, FRAME_RESEND
    ctypedef struct planned:
        int32_t kind
        uint32_t number
        int64_t token
        uint32_t degree
        coding_set set
        uint8_t head[32]
    ctypedef struct core_counters:
        uint64_t source, repair, resent, manifests, frame_bytes, losses, slots_credit, overridden, guarded
        double first_packet_s, last_packet_s
        bint any
    ctypedef int (*decide_function)(void *user, const sender_state *state, action *out) except -1
    ctypedef struct core:
        ledger *book
        policy rule
        decide_function decide
        void *user
        const int32_t *unit_packets
        const int32_t *unit_position
        feature_memory *memory
        uint64_t transfer_id
        uint32_t symbol_size, degree, max_degree, max_window, manifest_bytes
        double budget, deadline_s, rtt_s, min_rtt_s, slot_s, reserved_s
        int64_t credit, feedback_deficit
        bint running, ranks
        int verdict
        flec flec
        core_counters counters
        sender_state state
    void core_start(core *c, double now)
    int core_set_rule(core *c, const policy *rule)
    void core_free(core *c)
    void core_changed(core *c)
    double core_cutoff(const core *c)
    int64_t core_slots_left(const core *c, double now)
    bint core_finished(const core *c, double now)
    void core_view(core *c, double now)
    int core_ready(core *c, double now) except? -1
    double core_next_timer(const core *c)
    Py_ssize_t core_plan(core *c, double now, size_t room, int64_t bytes_free, planned *out) except? -1
    int core_fate(core *c, size_t token, bint delivered, bint probe)
    void core_feedback(core *c, int64_t deficit, int64_t credit, bint running)
    void core_extend(core *c, double now, double deadline_s)
    uint64_t core_remaining_us(const core *c, double now)

    enum:
        FRAME_HEADER_ROOM
    size_t frame_write_source(uint8_t *out, uint64_t transfer_id, uint32_t sid, uint32_t symbol_size)
    size_t frame_write_repair(uint8_t *out, uint64_t transfer_id, uint32_t number, uint32_t degree, const coding_set *s,
                              const uint8_t *head, uint32_t symbol_size)
    size_t frame_write_manifest(uint8_t *out, uint64_t transfer_id, uint32_t total, uint32_t offset,
                                uint64_t remaining_us, uint32_t size)
    uint32_t manifest_fragment(uint32_t total, uint32_t offset)


cdef enum:
    MAX_SYMBOLS = 1 << 24  # what the codec's arena holds
    BATCH = 64             # packets planned in one call of C
    MAX_HEAD_BYTES = 2048  # a bitmap over the widest window


# ---- policies ----------------------------------------------------------------------------------------------------------


cdef dict RULES = {
    "none": RULE_NONE,
    "fixed": RULE_FIXED,
    "arq": RULE_ARQ,
    "deficit": RULE_DEFICIT,
    "epoch": RULE_EPOCH,
    "flec-rt": RULE_FLEC_RT,
    "flec-rt-window": RULE_FLEC_RT_WINDOW,
    "flec-rt-spread": RULE_FLEC_RT_SPREAD,
    "hybrid": RULE_HYBRID,
    "ddqn": RULE_Q,
}
cdef dict REPAIR_ACTIONS = {1: REPAIR, 4: Action(ActionKind.REPAIR, 4), 16: Action(ActionKind.REPAIR, 16)}


cdef bint is_full(window) except? -1:
    if window not in ("sack", "full"):
        raise LocalError(f"a window is 'sack' or 'full', not {window!r}")
    return window == "full"


cdef object action_object(action a):
    if a.kind == ACTION_SOURCE:
        return SOURCE
    if a.kind == ACTION_REPAIR:
        return REPAIR_ACTIONS[a.count]
    return RESEND if a.kind == ACTION_RESEND else IDLE


cdef int read_state(state, sender_state *s) except -1:
    s.slots_left = state.slots_left
    s.slots_total = state.slots_total
    s.rtt_slots = state.rtt_slots
    s.sources_total = state.sources_total
    s.sources_sent = state.sources_sent
    s.unit_packets = state.unit_packets
    s.unit_position = state.unit_position
    s.in_flight = state.in_flight
    s.repairs_in_flight = state.repairs_in_flight
    s.repairs_sent = state.repairs_sent
    s.known_lost = state.known_lost
    s.unresolved = state.unresolved
    s.window = state.window
    s.feedback_deficit = state.feedback_deficit
    s.packets_extra = state.packets_extra
    s.fates = state.fates
    s.loss_short = state.loss_short
    s.loss_long = state.loss_long
    s.budget_left = state.budget_left
    s.can_source = state.can_source
    s.can_repair = state.can_repair
    s.can_resend = state.can_resend
    return 0


cdef int write_state(state, const sender_state *s) except -1:
    state.slots_left = s.slots_left
    state.slots_total = s.slots_total
    state.rtt_slots = s.rtt_slots
    state.sources_total = s.sources_total
    state.sources_sent = s.sources_sent
    state.unit_packets = s.unit_packets
    state.unit_position = s.unit_position
    state.in_flight = s.in_flight
    state.repairs_in_flight = s.repairs_in_flight
    state.repairs_sent = s.repairs_sent
    state.known_lost = s.known_lost
    state.unresolved = s.unresolved
    state.window = s.window
    state.feedback_deficit = s.feedback_deficit
    state.packets_extra = s.packets_extra
    state.fates = s.fates
    state.loss_short = s.loss_short
    state.loss_long = s.loss_long
    state.budget_left = s.budget_left
    state.can_source = s.can_source
    state.can_repair = s.can_repair
    state.can_resend = s.can_resend
    return 0


cdef int put(values, float *out, Py_ssize_t rows, Py_ssize_t columns, Py_ssize_t stride) except -1:
    """An array of a network, of `rows` x `columns`, into rows of `stride`."""
    cdef const float[:, ::1] from_ = values.reshape(rows, columns)
    cdef Py_ssize_t i, j
    for i in range(rows):
        for j in range(columns):
            out[i * stride + j] = from_[i, j]
    return 0


@cython.final
cdef class Policy:
    cdef policy rule
    cdef readonly str name
    cdef readonly dict parameters
    cdef readonly object network
    cdef network *weights

    def __cinit__(self, str name, window="sack", *, network=None, **parameters):
        if name not in RULES:
            raise LocalError(f"no compiled rule {name!r}")
        self.rule.rule = RULES[name]
        if network is not None or name == "ddqn":
            self.take(network, "q" if name == "ddqn" else "advantage")
        self.rule.full_window = is_full(window)
        self.name = name
        self.parameters = parameters
        for parameter, value in parameters.items():
            if parameter == "rate":
                self.rule.rate = value
            elif parameter == "alpha":
                self.rule.alpha = value
            elif parameter == "horizon_rtt":
                self.rule.horizon_rtt = value
            elif parameter == "open_share":
                self.rule.open_share = value
            elif parameter == "spread":
                self.rule.spread = value
            elif parameter == "blind_share":
                self.rule.blind_share = value
            elif parameter == "hold_rtt":
                self.rule.hold_rtt = value
            elif parameter == "doubt":
                self.rule.doubt = value
            elif parameter == "crowd":
                self.rule.crowd = value
            elif parameter == "wide_degree":
                self.rule.wide_degree = value
            elif parameter == "headroom":
                self.rule.headroom = value
            else:
                raise LocalError(f"no rule has a parameter {parameter!r}")

    cdef int take(self, learned, kind) except -1:
        if not isinstance(learned, Network) or learned.kind != kind or self.rule.rule not in (RULE_Q, RULE_HYBRID):
            raise LocalError(f"the rule {self.name!r} and {learned!r}: 'ddqn' has a network of kind 'q', 'hybrid' may have "
                             "one of kind 'advantage'")
        self.network = learned
        self.weights = network_new()
        if self.weights == NULL:
            raise MemoryError
        put(learned.w1, &self.weights.w1[0][0], FEATURES, HIDDEN, HIDDEN)
        put(learned.b1, &self.weights.b1[0], 1, HIDDEN, HIDDEN)
        put(learned.w2, &self.weights.w2[0][0], HIDDEN, HIDDEN, HIDDEN)
        put(learned.b2, &self.weights.b2[0], 1, HIDDEN, HIDDEN)
        put(learned.w3, &self.weights.w3[0][0], HIDDEN, learned.choices, OUTPUT_ROOM)
        put(learned.b3, &self.weights.b3[0], 1, learned.choices, OUTPUT_ROOM)
        put(learned.low, &self.weights.low[0], 1, FEATURES, FEATURES)
        put(learned.high, &self.weights.high[0], 1, FEATURES, FEATURES)
        self.weights.version = learned.features
        self.weights.resend = learned.resend
        if kind == "advantage" and learned.margin is None:
            return 0  # never acts
        self.weights.margin = 0.0 if learned.margin is None else learned.margin
        self.rule.net = self.weights
        return 0

    def __dealloc__(self):
        network_free(self.weights)

    def __reduce__(self):
        raise TypeError("a Policy cannot be pickled")

    def __repr__(self):
        learned = "" if self.network is None else f", network={self.network.label!r}"
        return f"Policy({self.name!r}, {self.window!r}, **{self.parameters!r}{learned})"

    def outputs(self, const float[:, ::1] x not None):
        cdef Py_ssize_t row, choice, choices
        cdef float y[CHOICES]
        if self.network is None or x.shape[1] != FEATURES:
            raise LocalError(f"a network, and features float32[B, {FEATURES}]")
        choices = self.network.choices
        result = np.empty((x.shape[0], choices), dtype=np.float32)
        cdef float[:, ::1] out = result
        for row in range(x.shape[0]):
            self.weights.forward(self.weights, &x[row, 0], y)
            for choice in range(choices):
                out[row, choice] = y[choice]
        return result

    @property
    def window(self):
        return "full" if self.rule.full_window else "sack"

    @property
    def oldest_first(self):
        return self.rule.rule == RULE_FLEC_RT

    def degree(self, state, uint32_t usual, uint32_t most):
        cdef sender_state s
        read_state(state, &s)
        return policy_degree(&self.rule, &s, usual, most)

    def ranks(self, state):
        cdef sender_state s
        read_state(state, &s)
        return bool(policy_ranks(&self.rule, &s))

    def packed(self):
        return PyBytes_FromStringAndSize(<const char *>&self.rule, sizeof(policy))

    def decide(self, state):
        cdef sender_state s
        cdef flec without_past
        if self.rule.rule == RULE_Q:
            raise LocalError("a learned policy decides within a transfer, whose past its features hold")
        read_state(state, &s)
        if policy_is_flec(&self.rule):
            memset(&without_past, 0, sizeof(without_past))
            return action_object(flec_decide(&without_past, &self.rule, &s, 0))
        return action_object(policy_decide(&self.rule, &s))


include "ledger.pxi"
include "planner.pxi"
