/* The scheduler core of one outgoing transfer: what is known of every symbol, and what the next packet carries.
 *
 * The sender (Cython: _policy.pyx) and the compiled simulator run this very code. transfer/ledger.py, transfer/planner.py
 * and schedule/policies.py are its specification in Python: same rules, same numbers, compared by differential tests. No
 * clock, no input or output, no Python object; the only allocations are those of the ledger. Times are seconds on one
 * clock, counts are packets unless said otherwise. */
#ifndef QUIC_PFEC_SCHEDULE_CORE_H
#define QUIC_PFEC_SCHEDULE_CORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- ledger.c: the state of N symbols (transfer/ledger.py) ---- */

enum { SYMBOL_UNSENT, SYMBOL_IN_FLIGHT, SYMBOL_LOST, SYMBOL_KNOWN };
enum { TOKEN_REPAIR = -1, TOKEN_SETTLED = -2 }; /* what a token stands for, besides a sid */
enum { TURNS_PER_LOSS = 5 };

/* Three doubles in this order: the memory is shared with LossEstimate of transfer/ledger.py. */
typedef struct {
    double fates, losses, recent;
} loss_estimate;

typedef struct {
    double priority;
    uint32_t sid;
} lost_symbol;

typedef struct {
    uint32_t first_sid, head_span, tail_offset, tail_span;
} coding_set;

typedef struct {
    uint32_t symbols, next, prefix, in_flight, repairs_in_flight, known_lost, known;
    uint32_t fated;                               /* 1 + highest sid whose first fate is known */
    uint32_t stretch_start, stretch_stop, stretch_turns;
    uint8_t *state;                               /* symbols + 1: a sentinel that is never known */
    uint8_t *seen;                                /* flec.c: lost, but a repair over it arrived; NULL without a rule of it */
    uint32_t seen_count;
    const double *priority;                       /* the caller's, one a symbol; lower is resent first */
    const int32_t *unit_packets, *unit_position;  /* the caller's, once ledger_rank() was called; else NULL */
    loss_estimate *loss;                          /* the caller's: shared by the transfers of a connection */
    int32_t *tokens;                              /* token -> sid, TOKEN_REPAIR or TOKEN_SETTLED */
    size_t token_count, token_room;
    lost_symbol *heap;
    size_t heap_count, heap_room;
} ledger;

/* 0, or -1 without memory. `priority` (symbols long) and `loss` must outlive the ledger. */
int ledger_init(ledger *book, uint32_t symbols, const double *priority, loss_estimate *loss);
void ledger_free(ledger *book);

/* Each returns a token >= 0; -1: nothing to send; -2: no memory, and nothing changed. */
int64_t ledger_send_source(ledger *book, uint32_t *sid);
int64_t ledger_send_lost(ledger *book, uint32_t *sid);
int64_t ledger_send_repair(ledger *book);

/* token < token_count. 0, or -2 without memory: the loss is counted, but the symbol stays in flight. */
int ledger_fate(ledger *book, size_t token, bool delivered, bool probe);
/* From now on losses are resent by priority times the packets of the unit over those that it lacks: what completes most for
 * a packet goes first. Both arrays are of each symbol: packets of its unit, its place in it. */
void ledger_rank(ledger *book, const int32_t *unit_packets, const int32_t *unit_position);
/* start <= stop <= next. */
void ledger_learn_known(ledger *book, uint32_t start, uint32_t stop);

static inline uint32_t ledger_unresolved(const ledger *book)
{
    return book->in_flight + book->known_lost;
}

/* The unresolved symbols; needs unresolved > 0. `head` has room for (max_head_span + 7) / 8 bytes. */
void ledger_sack_set(ledger *book, uint32_t max_window, uint32_t max_head_span, coding_set *set, uint8_t *head);
void ledger_full_set(const ledger *book, uint32_t max_window, coding_set *set);

double loss_recent(double recent, bool lost); /* one step of the moving average */
double loss_long(const loss_estimate *loss);

/* ---- policies.c: the rules (schedule/policies.py) ---- */

enum { ACTION_IDLE, ACTION_SOURCE, ACTION_REPAIR, ACTION_RESEND };
enum { RULE_EXTERNAL, RULE_NONE, RULE_FIXED, RULE_ARQ, RULE_DEFICIT, RULE_EPOCH, RULE_HYBRID,
       RULE_FLEC_RT, RULE_FLEC_RT_WINDOW, RULE_FLEC_RT_SPREAD, RULE_Q };

typedef struct {
    int32_t kind, count;
} action;

typedef struct network network; /* network.c */

/* The fields of schedule/state.py. */
typedef struct {
    int64_t slots_left, slots_total;
    double rtt_slots;
    int64_t sources_total, sources_sent, unit_packets, unit_position;
    int64_t in_flight, repairs_in_flight, repairs_sent, known_lost, unresolved, window, feedback_deficit;
    int64_t packets_extra, fates;
    double loss_short, loss_long, budget_left;
    bool can_source, can_repair, can_resend;
} sender_state;

/* A rule and its parameters; each rule reads its own. */
typedef struct {
    int rule;
    bool full_window;
    double rate;                                    /* fixed */
    double alpha;                                   /* epoch, hybrid */
    double horizon_rtt, open_share, spread;         /* hybrid */
    double blind_share, hold_rtt, doubt, crowd, wide_degree; /* hybrid */
    double headroom;                                /* flec */
    const network *net;                             /* of RULE_Q; may override RULE_HYBRID; else NULL. The caller's */
} policy;

action policy_decide(const policy *p, const sender_state *s); /* not the rules of flec.c, and no network */
/* Are losses to be resent by what completes units? */
bool policy_ranks(const policy *p, const sender_state *s);
/* Symbols that a repair combines, where `degree` is usual and `most` allowed. */
uint32_t policy_degree(const policy *p, const sender_state *s, uint32_t degree, uint32_t most);

static inline bool policy_is_flec(const policy *p)
{
    return p->rule >= RULE_FLEC_RT && p->rule <= RULE_FLEC_RT_SPREAD;
}

/* ---- flec.c: FlEC real time, which remembers more than the ledger (schedule/flec.py) ---- */

enum { GILBERT_EVENTS = 5000, GILBERT_ENOUGH = 500 };

typedef struct {
    double at_s;
    bool lost;
} gilbert_event;

/* The channel over the last fates: counts of losses and of transitions in a ring of GILBERT_EVENTS. */
typedef struct {
    gilbert_event *events;
    uint32_t first, count, lost, from_ack, ack_to_loss, from_loss, loss_to_ack;
    double refreshed_s;
    bool enough;
    double eps, p, r; /* as of the last refresh, if enough */
} gilbert;

typedef struct {
    int64_t token;
    uint32_t first, stop;
} repair_range;

typedef struct {
    repair_range *flying; /* repairs in flight, in the order of sending */
    size_t flying_count, flying_room;
    gilbert channel;
    double clock_s;       /* of the last packet */
    int reason;           /* why the last decision was for a repair: REASON_* */
    uint32_t tail_end, tail_protected, tail_sent;
    double tail_most;     /* repairs of the present round, less one */
    uint32_t spread_end;
    double spread_left;
} flec;

enum { REASON_NONE, REASON_FEEDBACK, REASON_TAIL, REASON_SPREAD };

typedef struct {
    uint32_t md, ad; /* degrees missing; added: repairs in flight over the window */
    double eps, p, r_ge;
} flec_view;

/* 0, or -1 without memory. Zeroed memory is a flec that has seen nothing, good for flec_decide() alone. */
int flec_init(flec *f, ledger *book);
void flec_free(flec *f);
flec_view flec_look(const flec *f, uint32_t known_lost, uint32_t seen, uint32_t prefix, double loss_prior);
/* The prefix is sources_sent - window of the state. */
action flec_decide(flec *f, const policy *p, const sender_state *s, uint32_t seen);
/* A symbol left; `set` of a repair, else NULL. 0, or -1 without memory: nothing is remembered. */
int flec_sent(flec *f, const sender_state *s, int64_t token, const coding_set *set, uint32_t seen, double now);
/* After ledger_fate() of a token that was not settled before and meant `meaning`. */
void flec_fate(flec *f, ledger *book, int64_t token, int32_t meaning, bool delivered, bool probe);

/* ---- features.c: the state of a learned policy, and its choices (schedule/features.py) ---- */

enum { FEATURES = 15, CHOICES = 5, MAX_SOURCE_BURST = 8 };

typedef struct {
    /* The caller's. */
    const uint32_t *unit_of;      /* of each sid: the place of its unit in the order of sending */
    const double *utility_before; /* units + 1: of all units before each */
    uint32_t units;
    double budget_total;          /* infinity: unlimited */
    /* Its own. */
    double after_loss;            /* moving average of loss given that the fate before was a loss */
    bool lost_before;
    uint32_t prefix;
    int64_t progress_left;        /* slots left when the prefix last moved */
} feature_memory;

void features_start(feature_memory *m, int64_t slots_total);
void features_fate(feature_memory *m, bool lost);
void features_view(feature_memory *m, const sender_state *s);
/* version 1 or 2; out: FEATURES floats. */
void features_look(const feature_memory *m, const sender_state *s, int version, uint32_t degree, float *out);
/* d of the paper with the deficit `reported`; and Brem, which is T less what was spent where there is no budget. */
double state_deficit(const sender_state *s, double reported);
double state_budget(const sender_state *s);
/* source, repair 1, 4, 16, resend: out has CHOICES places. */
void choice_masks(const sender_state *s, bool resend, bool *out);
action choice_action(const sender_state *s, int choice);

/* ---- network.c: the learned policies (schedule/network.py, schedule/learned.py) ---- */

enum { HIDDEN = 64, OUTPUT_ROOM = 8 };
enum { VERDICT_RULE, VERDICT_OVERRIDE, VERDICT_GUARD }; /* of a network that may override its rule */

/* Set by the caller but for `forward`; outputs beyond the choices have weights of 0. */
struct network {
    _Alignas(64) float w1[FEATURES][HIDDEN], b1[HIDDEN], w2[HIDDEN][HIDDEN], b2[HIDDEN], w3[HIDDEN][OUTPUT_ROOM];
    float b3[OUTPUT_ROOM], low[FEATURES], high[FEATURES];
    int version; /* of the features */
    bool resend; /* the fifth choice exists */
    double margin;
    void (*forward)(const network *n, const float *x, float *y); /* FEATURES, CHOICES */
};

/* Zeroed; NULL without memory. */
network *network_new(void);
void network_free(network *n);
/* p->net and `m` are there. */
action network_decide(const policy *p, const sender_state *s, const feature_memory *m, uint32_t degree, int *verdict);
/* The choice that is a rule's action, -1 for idling. */
int choice_of(action a);

/* ---- core.c: masks, budget, bursts, the manifest's copies (transfer/planner.py) ---- */

enum { FRAME_MANIFEST, FRAME_SOURCE, FRAME_REPAIR, FRAME_RESEND };
enum { MAX_HEAD_SPAN = 256 }; /* ids in a repair's bitmap: 32 bytes */

typedef struct {
    int32_t kind;       /* FRAME_* */
    uint32_t number;    /* sid; offset of the manifest's fragment; repair number */
    int64_t token;      /* -1: none will be reported */
    uint32_t degree;    /* of a repair, as the two below */
    coding_set set;
    uint8_t head[MAX_HEAD_SPAN / 8];
} planned;

typedef struct {
    uint64_t source, repair, resent, manifests, frame_bytes, losses, slots_credit;
    uint64_t overridden, guarded; /* packets that a network chose, or a guard kept for the rule */
    double first_packet_s, last_packet_s; /* of no meaning before the first */
    bool any;
} core_counters;

typedef struct core core;
/* Decides in place of a rule; *out is ACTION_IDLE with count 1 when called. 0, or -1: the plan is given up. */
typedef int (*decide_function)(void *user, const sender_state *state, action *out);

struct core {
    /* Set by the caller before core_start(); budget = infinity: unlimited. */
    ledger *book;
    policy rule;
    decide_function decide; /* for RULE_EXTERNAL */
    void *user;
    const int32_t *unit_packets, *unit_position; /* of each sid: packets of its unit, its place in it */
    feature_memory *memory; /* NULL: nobody asks for features, and no rule has a network */
    uint64_t transfer_id;
    uint32_t symbol_size, degree, max_degree, max_window, manifest_bytes;
    double budget, deadline_s, rtt_s, min_rtt_s, slot_s, reserved_s;
    int64_t credit, feedback_deficit;
    bool running; /* the receiver is */
    bool ranks;   /* losses are resent by what completes units, whatever the rule says */
    /* Its own. */
    bool heard, late, has_burst, has_chosen; /* late: after core_extend() */
    flec flec;
    action burst, chosen;
    int verdict; /* VERDICT_* of what was chosen; set by `decide` too */
    double chosen_s;
    uint32_t since_manifest, manifest_at; /* manifest_at: the fragment that is due, MANIFEST_IDLE = none */
    double manifest_retry_s;
    uint64_t repair_number;
    core_counters counters;
    sender_state state;
};

/* `c->flec` must be zeroed before the first call. */
void core_start(core *c, double now);
/* Takes the rule; one of flec.c begins without a past. 0, or -1 without memory. */
int core_set_rule(core *c, const policy *rule);
void core_free(core *c); /* not the ledger */
/* The policy, the path or the masks changed: what was chosen for this instant is void. */
static inline void core_changed(core *c)
{
    c->has_chosen = false;
}
static inline double core_cutoff(const core *c)
{
    return c->deadline_s - c->min_rtt_s / 2;
}
int64_t core_slots_left(const core *c, double now);
bool core_finished(const core *c, double now);
/* The policy's view at `now`, in c->state. */
void core_view(core *c, double now);
/* What the rule says of c->state; not RULE_EXTERNAL. */
action core_ask(core *c);
/* Would the next packet be the rule's to choose? If so c->state is the view at `now`. */
bool core_decides(core *c, double now);
/* The next packets are these, as far as the masks allow, whatever the rule says. */
void core_force(core *c, action forced);
/* Is there a frame to send? 1 or 0, or -1 from `decide`. */
int core_ready(core *c, double now);
/* When to ask again without any other event; infinity = never. */
double core_next_timer(const core *c);
/* Up to `room` packets, each of at most `bytes_free` bytes, which count as sent; -1 from `decide`, -2 without memory.
 * Less than `room`: nothing more is due, or it does not fit. */
ptrdiff_t core_plan(core *c, double now, size_t room, int64_t bytes_free, planned *out);
/* token < book->token_count. 0, or -2 without memory. */
int core_fate(core *c, size_t token, bool delivered, bool probe);
/* What a PFEC_ACK says besides its ranges, which go to ledger_learn_known(). */
void core_feedback(core *c, int64_t deficit, int64_t credit, bool running);
/* The receiver has frozen and takes late symbols: the same rule goes on, by a second deadline; the manifest is over. */
void core_extend(core *c, double now, double deadline_s);
uint64_t core_remaining_us(const core *c, double now);

/* ---- frames.c: headers as wire/frames.py writes them (docs/wire.md), frame type included ---- */

enum { FRAME_HEADER_ROOM = 4 + 8 + 8 + 8 + 8 + MAX_HEAD_SPAN / 8 + 8 + 8 + 2, MANIFEST_CHUNK = 1024 };

size_t varint_size(uint64_t value);
size_t frame_source_overhead(uint64_t transfer_id);
size_t frame_repair_overhead(uint64_t transfer_id, uint64_t degree, const coding_set *set);
size_t frame_manifest_overhead(uint64_t transfer_id, uint32_t total, uint32_t offset, uint64_t remaining_us, uint32_t size);
/* Each writes at most FRAME_HEADER_ROOM bytes and returns how many. */
size_t frame_write_source(uint8_t *out, uint64_t transfer_id, uint32_t sid, uint32_t symbol_size);
size_t frame_write_repair(uint8_t *out, uint64_t transfer_id, uint32_t number, uint32_t degree, const coding_set *set,
                          const uint8_t *head, uint32_t symbol_size);
size_t frame_write_manifest(uint8_t *out, uint64_t transfer_id, uint32_t total, uint32_t offset, uint64_t remaining_us,
                            uint32_t size);
static inline uint32_t manifest_fragment(uint32_t total, uint32_t offset)
{
    return total - offset < MANIFEST_CHUNK ? total - offset : MANIFEST_CHUNK;
}

#endif
