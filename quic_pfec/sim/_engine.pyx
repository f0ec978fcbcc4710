# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False, binding=False
"""The compiled simulator: Python's view of engine.h.

This module validates and owns the memory; what happens in a slot is in the C files beside it. Contracts of the public
names: quic_pfec/sim/_engine.pyi.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING
from libc.math cimport INFINITY
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free
from libc.string cimport memcpy, memset

import numpy as np

from quic_pfec.schedule._policy import Policy
from quic_pfec.schedule.features import CHOICES as ACTIONS
from quic_pfec.schedule.features import NAMES
from quic_pfec.schedule.state import State
from quic_pfec.transfer.ledger import LossEstimate
from quic_pfec.wire.errors import LocalError
from quic_pfec.wire.limits import MAX_SYMBOL_SIZE, MIN_SYMBOL_SIZE

cdef extern from "gf256.h":
    void gf256_init()

cdef extern from "engine.h":
    ctypedef uint8_t flag "bool"
    ctypedef struct policy:
        int rule
        bint full_window
    ctypedef struct loss_estimate:
        double fates, losses, recent
    ctypedef struct sender_state:
        int64_t slots_left, slots_total
        double rtt_slots
        int64_t sources_total, sources_sent, unit_packets, unit_position
        int64_t in_flight, repairs_in_flight, repairs_sent, known_lost, unresolved, window, feedback_deficit
        int64_t packets_extra, fates
        double loss_short, loss_long, budget_left
        bint can_source, can_repair, can_resend
    ctypedef struct feature_memory:
        pass
    ctypedef struct core_counters:
        uint64_t source, repair, resent, manifests, losses, slots_credit, overridden, guarded
    ctypedef struct core:
        sender_state state
        core_counters counters
        uint32_t degree
    void features_look(const feature_memory *m, const sender_state *s, int version, uint32_t degree, float *out) nogil
    void choice_masks(const sender_state *s, bint resend, flag *out) nogil
    ctypedef struct decoder:
        uint32_t highest
        uint8_t *flags
    enum:
        SID_KNOWN
        FEATURES
        CHOICES
        MOST_DEGREE

    ctypedef struct scenario:
        uint32_t symbols, units, slots, steps
        const int32_t *unit_packets
        const int32_t *unit_position
        const uint32_t *unit_of
        const double *priority
        const double *oldest_first
        const int64_t *packets
        const double *utility
        const double *utility_before
        double utility_total
        const uint8_t *losses
        const double *times_s
        const int64_t *step_slots
        const double *step_rtt_s
        const double *step_slot_s
        double deadline_s
    ctypedef struct receiver_counters:
        uint64_t source, duplicate, recovered, useful, useless, dropped, late, feedback
    ctypedef struct receiver:
        decoder d
        bint manifest
        double frozen_s, gained
        int64_t *missing
        receiver_counters counters
    ctypedef struct disturbances:
        double feedback_loss, fates_loss, feedback_delay_s, fates_delay_s, reordering, reordering_s
    ctypedef struct episode:
        core core
        feature_memory memory
        receiver receiver
        uint32_t slot
        bint done, resend, ruled
        uint64_t feedback_count, feedback_ignored
        uint8_t *carried
    ctypedef struct start:
        const policy *rule
        bint oldest_first, full_window, resend
        double budget
        uint32_t degree, symbol_size
        loss_estimate loss
        disturbances disturbed
        uint64_t seed
    int episode_reset(episode *e, const scenario *world, const start *s) nogil
    void episode_free(episode *e) nogil
    int episode_copy(episode *to, const episode *from_) nogil
    int episode_set_rule(episode *e, const policy *rule, bint full_window) nogil
    int episode_advance(episode *e, uint32_t from_) nogil
    int episode_finish(episode *e) nogil
    int episode_choose(episode *e, int choice, double *reward) nogil
    int episode_rule_choice(episode *e) nogil

gf256_init()
FEATURES_COUNT = FEATURES
assert FEATURES == len(NAMES) and CHOICES == len(ACTIONS)

cdef enum:
    MAX_SYMBOLS = 1 << 24  # what the codec's arena holds
    MAX_SLOTS = 1 << 30


include "scenario.pxi"


cdef int read_policy(asked, policy *out) except -1:
    if not isinstance(asked, Policy):
        raise LocalError(f"a compiled policy is needed, not {type(asked).__name__}")
    packed = asked.packed()
    if len(packed) != sizeof(policy):
        raise LocalError("schedule._policy and sim._engine were built from different sources")
    memcpy(out, PyBytes_AS_STRING(packed), sizeof(policy))
    return 0


cdef double share(value, name) except -1.0:
    cdef double number = value
    if not 0 <= number <= 1:
        raise LocalError(f"{name} is a share, not {number}")
    return number


cdef double period(value, name) except -1.0:
    cdef double number = value
    if not 0 <= number < INFINITY:
        raise LocalError(f"{name} is a time, finite and not negative: {number}")
    return number


@cython.final
cdef class Lanes:
    cdef episode *lanes
    cdef Py_ssize_t count
    cdef bint resend
    cdef int version
    cdef list worlds    # Scenario of each lane
    cdef list policies  # kept: the rule may point into it

    def __cinit__(self, count, *, bint resend=False, features=1):
        if not 1 <= count <= 1 << 20:
            raise LocalError(f"{count} lanes")
        if features not in (1, 2):
            raise LocalError(f"features of version 1 or 2, not {features}")
        self.lanes = <episode *>calloc(count, sizeof(episode))
        if self.lanes == NULL:
            raise MemoryError
        self.count = count
        self.resend = resend
        self.version = features
        self.worlds = [None] * count
        self.policies = [None] * count

    def __dealloc__(self):
        cdef Py_ssize_t lane
        if self.lanes != NULL:
            for lane in range(self.count):
                episode_free(&self.lanes[lane])
            free(self.lanes)

    def __reduce__(self):
        raise TypeError("Lanes cannot be pickled")

    def __len__(self):
        return self.count

    cdef episode *lane(self, number) except NULL:
        cdef Py_ssize_t at = number
        if not 0 <= at < self.count:
            raise LocalError(f"no lane {number} of {self.count}")
        if self.worlds[at] is None:
            raise LocalError(f"lane {number} was never reset")
        return &self.lanes[at]

    cdef int check_all(self) except -1:
        for lane in range(self.count):
            if self.worlds[lane] is None:
                raise LocalError(f"lane {lane} was never reset")
        return 0

    def reset(self, lane, Scenario scenario not None, asked=None, *, window="sack", double budget=INFINITY, degree=48,
              symbol_size=64, history=(0, 0), feedback_loss=0.0, fates_loss=0.0, feedback_delay_s=0.0, fates_delay_s=0.0,
              reordering=0.0, reordering_s=0.0, seed=0):
        cdef start s
        cdef policy rule
        cdef Py_ssize_t at = lane
        memset(&s, 0, sizeof(s))
        if not 0 <= at < self.count:
            raise LocalError(f"no lane {lane} of {self.count}")
        if window not in ("sack", "full"):
            raise LocalError(f"a window is 'sack' or 'full', not {window!r}")
        if not budget >= 0:
            raise LocalError(f"a budget of {budget} packets")
        if not 1 <= degree <= MOST_DEGREE:
            raise LocalError(f"degree must be in 1..255: {degree}")
        if not MIN_SYMBOL_SIZE <= symbol_size <= MAX_SYMBOL_SIZE:
            raise LocalError(f"a symbol of {symbol_size} bytes")
        if asked is not None:
            read_policy(asked, &rule)
            s.rule = &rule
            s.oldest_first = asked.oldest_first
        s.full_window = window == "full"
        s.resend = self.resend
        s.budget = budget
        s.degree = degree
        s.symbol_size = symbol_size
        s.loss.fates, s.loss.losses, s.loss.recent = LossEstimate(*history).values
        s.disturbed.feedback_loss = share(feedback_loss, "feedback_loss")
        s.disturbed.fates_loss = share(fates_loss, "fates_loss")
        s.disturbed.feedback_delay_s = period(feedback_delay_s, "feedback_delay_s")
        s.disturbed.fates_delay_s = period(fates_delay_s, "fates_delay_s")
        s.disturbed.reordering = share(reordering, "reordering")
        s.disturbed.reordering_s = period(reordering_s, "reordering_s")
        s.seed = seed & 0xFFFFFFFFFFFFFFFF
        self.worlds[at] = None
        self.policies[at] = asked
        if episode_reset(&self.lanes[at], &scenario.s, &s) != 0:
            raise MemoryError
        self.worlds[at] = scenario
        if asked is None and episode_advance(&self.lanes[at], 0) != 0:
            raise MemoryError

    def set_policy(self, lane, asked):
        cdef policy rule
        cdef episode *e = self.lane(lane)
        cdef bint full = False
        if asked is not None:
            read_policy(asked, &rule)
        elif self.policies[lane] is not None:
            full = self.policies[lane].window == "full"
        if episode_set_rule(e, &rule if asked is not None else NULL, full) != 0:
            raise MemoryError
        self.policies[lane] = asked

    # deciding

    def observe(self, out=None):
        cdef Py_ssize_t i
        self.check_all()
        if out is None:
            out = np.empty((self.count, FEATURES), dtype=np.float32)
        cdef float[:, ::1] rows = out
        if rows.shape[0] != self.count or rows.shape[1] != FEATURES:
            raise LocalError(f"out has shape {out.shape}")
        with nogil:
            for i in range(self.count):
                if self.lanes[i].done:
                    memset(&rows[i, 0], 0, FEATURES * sizeof(float))
                else:
                    features_look(&self.lanes[i].memory, &self.lanes[i].core.state, self.version,
                                  self.lanes[i].core.degree, &rows[i, 0])
        return out

    def masks(self, out=None):
        cdef Py_ssize_t i
        self.check_all()
        if out is None:
            out = np.empty((self.count, CHOICES), dtype=np.bool_)
        if out.dtype != np.bool_:
            raise LocalError(f"out has dtype {out.dtype}")
        cdef uint8_t[:, ::1] rows = out.view(np.uint8)
        if rows.shape[0] != self.count or rows.shape[1] != CHOICES:
            raise LocalError(f"out has shape {out.shape}")
        with nogil:
            for i in range(self.count):
                if self.lanes[i].done:
                    memset(&rows[i, 0], 0, CHOICES)
                else:
                    choice_masks(&self.lanes[i].core.state, self.resend, <flag *>&rows[i, 0])
        return out

    def step(self, actions):
        cdef Py_ssize_t i
        cdef int64_t chosen
        cdef int failed = 0
        cdef uint8_t allowed[CHOICES]
        self.check_all()
        asked = row(actions, np.int64, "actions", self.count)
        rewards, done = np.zeros(self.count), np.zeros(self.count, dtype=np.bool_)
        cdef const int64_t[::1] choice = asked
        cdef double[::1] reward = rewards
        cdef uint8_t[::1] over = done.view(np.uint8)
        for i in range(self.count):
            chosen = choice[i]
            if self.lanes[i].done or chosen == -1:
                continue
            choice_masks(&self.lanes[i].core.state, self.resend, <flag *>allowed)
            if not 0 <= chosen < CHOICES or not allowed[chosen]:
                raise LocalError(f"lane {i} may not take action {chosen}")
        with nogil:
            for i in range(self.count):
                if not self.lanes[i].done and choice[i] >= 0:
                    failed |= episode_choose(&self.lanes[i], <int>choice[i], &reward[i])
                over[i] = self.lanes[i].done
        if failed:
            raise MemoryError
        return rewards, done

    def rule_actions(self):
        cdef Py_ssize_t i
        self.check_all()
        chosen = np.empty(self.count, dtype=np.int64)
        cdef int64_t[::1] out = chosen
        for i in range(self.count):
            out[i] = episode_rule_choice(&self.lanes[i])
        return chosen

    def advance(self, slots):
        cdef Py_ssize_t i
        cdef int failed = 0
        self.check_all()
        wanted = row(slots, np.int64, "slots", self.count)
        done = np.zeros(self.count, dtype=np.bool_)
        cdef const int64_t[::1] target = wanted
        cdef uint8_t[::1] over = done.view(np.uint8)
        for i in range(self.count):
            if not -1 <= target[i] <= MAX_SLOTS:
                raise LocalError(f"no slot {target[i]}")
            if target[i] >= 0 and not self.lanes[i].ruled:
                raise LocalError(f"lane {i} has no policy")
        with nogil:
            for i in range(self.count):
                if target[i] >= 0:
                    failed |= episode_advance(&self.lanes[i], <uint32_t>target[i])
                over[i] = self.lanes[i].done
        if failed:
            raise MemoryError
        return done

    def finish(self, lanes=None):
        cdef Py_ssize_t i
        cdef int failed = 0
        chosen = np.arange(self.count) if lanes is None else row(lanes, np.int64, "lanes")
        for number in chosen:
            self.lane(number)
            if not self.lanes[<Py_ssize_t>number].ruled and not self.lanes[<Py_ssize_t>number].done:
                raise LocalError(f"lane {number} has no policy")
        cdef const int64_t[::1] numbers = chosen
        with nogil:
            for i in range(numbers.shape[0]):
                failed |= episode_finish(&self.lanes[numbers[i]])
        if failed:
            raise MemoryError

    def copy(self, source, target):
        cdef episode *from_ = self.lane(source)
        cdef Py_ssize_t at = target
        if not 0 <= at < self.count:
            raise LocalError(f"no lane {target} of {self.count}")
        if source == target:
            return
        self.worlds[at] = None
        if episode_copy(&self.lanes[at], from_) != 0:
            raise MemoryError
        self.worlds[at] = self.worlds[source]
        self.policies[at] = self.policies[source]

    # looking

    def slots(self):
        self.check_all()
        return np.array([self.lanes[i].slot for i in range(self.count)], dtype=np.int64)

    def done(self):
        self.check_all()
        return np.array([self.lanes[i].done for i in range(self.count)], dtype=np.bool_)

    def j_block(self):
        self.check_all()
        return np.array([self.lanes[i].receiver.gained for i in range(self.count)])

    def j_frac(self):
        self.check_all()
        shares = np.empty(self.count)
        for i in range(self.count):
            world = <Scenario>self.worlds[i]
            shares[i] = (world.utility * (self.present(i) / world.unit_packets)).sum() / world.utility.sum()
        return shares

    def state(self, lane):
        cdef sender_state *s = &self.lane(lane).core.state
        return State(
            slots_left=s.slots_left, slots_total=s.slots_total, rtt_slots=s.rtt_slots, sources_total=s.sources_total,
            sources_sent=s.sources_sent, unit_packets=s.unit_packets, unit_position=s.unit_position, in_flight=s.in_flight,
            repairs_in_flight=s.repairs_in_flight, repairs_sent=s.repairs_sent, known_lost=s.known_lost,
            unresolved=s.unresolved, window=s.window, feedback_deficit=s.feedback_deficit, packets_extra=s.packets_extra,
            fates=s.fates, loss_short=s.loss_short, loss_long=s.loss_long, budget_left=s.budget_left,
            can_source=bool(s.can_source), can_repair=bool(s.can_repair), can_resend=bool(s.can_resend),
        )

    def carried(self, lane):
        cdef episode *e = self.lane(lane)
        cdef Scenario world = <Scenario>self.worlds[lane]
        kinds = np.empty(world.s.slots, dtype=np.uint8)
        cdef uint8_t[::1] out = kinds
        memcpy(&out[0], e.carried, world.s.slots)
        return kinds

    def known(self, lane):
        cdef episode *e = self.lane(lane)
        cdef Scenario world = <Scenario>self.worlds[lane]
        cdef uint32_t i
        flags = np.zeros(world.s.symbols, dtype=np.bool_)
        cdef uint8_t[::1] out = flags.view(np.uint8)
        for i in range(e.receiver.d.highest):
            out[i] = (e.receiver.d.flags[i] & SID_KNOWN) != 0
        return flags

    def present(self, lane):
        cdef episode *e = self.lane(lane)
        cdef Scenario world = <Scenario>self.worlds[lane]
        cdef uint32_t i
        there = np.zeros(world.s.units, dtype=np.int64)
        cdef int64_t[::1] out = there
        for i in range(world.s.units):
            out[i] = world.s.packets[i] - e.receiver.missing[i]
        return there

    def complete(self, lane):
        return self.present(lane) == (<Scenario>self.worlds[lane]).unit_packets

    def sender_counters(self, lane):
        cdef episode *e = self.lane(lane)
        cdef core_counters *n = &e.core.counters
        return {"source": n.source, "repair": n.repair, "resent": n.resent, "manifests": n.manifests, "losses": n.losses,
                "feedback": e.feedback_count, "feedback_ignored": e.feedback_ignored, "slots_credit": n.slots_credit,
                "overridden": n.overridden, "guarded": n.guarded}

    def receiver_counters(self, lane):
        cdef receiver_counters *n = &self.lane(lane).receiver.counters
        return {"source": n.source, "duplicate": n.duplicate, "recovered": n.recovered, "repairs_useful": n.useful,
                "repairs_useless": n.useless, "repairs_dropped": n.dropped, "late": n.late, "feedback": n.feedback}

    def frozen_s(self, lane):
        return self.lane(lane).receiver.frozen_s
