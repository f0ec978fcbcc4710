/* Streaming decoder: exact elimination on coefficients alone, payload work only for what is asked for.
 *
 * Held state. Unknown SIDs that some held repair names have a *column*. The matrix rows are [C | T]: C over the
 * columns, T over the *raw repairs* (payloads kept as they came, less the terms known by then). Throughout
 *
 *     sum over columns u of C[j][u] * symbol(u)  =  sum over raw repairs k of T[j][k] * raw(k)        (*)
 *
 * and C is in reduced row echelon form: every row has a pivot column in which all other rows are zero. A symbol is
 * determined by what was received exactly if its column is the only one of a row, whichever pivots were chosen. So
 * a symbol is found as early as it can be, also when older ones are still missing.
 *
 * Row operations touch two short vectors, never a payload. A redundant repair therefore costs no payload work; a
 * determined symbol costs one dot product over raw repairs, when decoder_poll() asks for it.
 *
 * All work and memory is bounded by decoder_limits. A repair beyond a limit is dropped and leaves no trace but counters.
 */
#ifndef QUIC_PFEC_DECODER_H
#define QUIC_PFEC_DECODER_H

#include <stddef.h>
#include <stdint.h>

#include "arena.h"
#include "coefficients.h"

#define PFEC_MAX_UNKNOWN 4096u     /* columns: the matrix takes up to 4 * columns^2 bytes */
#define PFEC_MAX_CAPACITY (1u << 24) /* symbols: a unit id has 24 bits (docs/wire.md §3) */

enum { SOURCE_NEW = 0, SOURCE_DUPLICATE = 1, SOURCE_CONFLICT = 2, SOURCE_REPLACED = 3 };
enum { REPAIR_INNOVATIVE = 0, REPAIR_REDUNDANT = 1, REPAIR_TOO_COSTLY = 2, REPAIR_CONTRADICTS = 3 };
enum { SID_KNOWN = 1, SID_RECEIVED = 2, SID_LATE = 4 }; /* LATE: received after a repair had given it a column */

typedef struct {
    uint32_t max_unknown;        /* columns, 1..PFEC_MAX_UNKNOWN */
    uint32_t max_degree;         /* 1..PFEC_MAX_SPAN */
    uint32_t max_span;           /* SIDs, 1..PFEC_MAX_SPAN */
    uint32_t row_ops_per_repair; /* row operations one call of decoder_repair() may do */
} decoder_limits;

typedef struct {
    uint64_t redundant, rejected, row_operations, payload_macs, recovered;
    uint64_t contradictions; /* one-term repairs that disagree with a received symbol */
    uint64_t discarded;      /* rows thrown away because a decoded symbol proved wrong */
    uint64_t compactions;    /* sweeps that let every row rest on one stored repair */
} decoder_counters;

typedef struct {
    decoder_limits limits;
    decoder_counters counters;
    size_t symbol_size;

    /* Per SID. */
    arena symbols;
    uint32_t capacity;
    uint8_t *flags;      /* SID_* */
    uint16_t *column_of; /* column + 1; 0 = none */
    uint64_t *known;     /* bitmap */
    uint32_t known_count, prefix, highest;

    /* The matrix. row[0..rank-1] are live; row[rank] is the scratch row of the repair being reduced. */
    arena matrix;
    uint8_t **row;
    uint16_t *pivot;     /* per row: column */
    uint8_t *determined; /* per row */
    uint8_t *rebased;    /* per row, while a sweep runs: it rests on slots of the sweep alone */
    uint32_t rank, pending;
    size_t t_offset;     /* where T starts in a row */

    /* Columns and raw repairs in use. The widths are high-water marks, multiples of 64: row operations stop there. */
    uint64_t *column_used;
    uint32_t *sid_of;  /* per column */
    uint16_t *row_at;  /* per column: row + 1 of the pivot; 0 = not a pivot */
    uint32_t columns;
    size_t column_width;
    arena raw;
    uint64_t *raw_used;
    uint32_t max_raw, raws, sweep_at; /* above sweep_at slots in use a sweep begins */
    int sweeping;
    size_t raw_width;

    /* Terms of each raw repair that were unknown when it came: max_unknown entries a slot. */
    uint32_t *term_sid;
    uint8_t *term_factor;
    uint16_t *term_count;
    uint64_t *folded_at;   /* per slot: value of late_sources when its late terms were last folded in */
    uint64_t late_sources;

    /* Scratch. */
    uint32_t *sids;
    uint8_t *coefficients;
    const uint8_t **operands;
    uint8_t *factors;
    uint8_t *named;
} decoder;

/* Arguments must be in range (the wrapper checks). 0, or -1 without memory; decoder_free() is legal after either. */
int decoder_init(decoder *d, const decoder_limits *limits, size_t symbol_size, uint32_t capacity);
void decoder_free(decoder *d);
/* capacity >= d->capacity; moves the symbols. 0, or -1 with the decoder as it was. */
int decoder_grow(decoder *d, uint32_t capacity);

/* sid < capacity, data of symbol_size bytes; SOURCE_*. */
int decoder_source(decoder *d, uint32_t sid, const uint8_t *data);
/* A header that passed repair_header_check() with the limits and capacity of d; REPAIR_*. */
int decoder_repair(decoder *d, const repair_header *header, const uint8_t *data);
/* Compute up to max_symbols determined symbols: those of `first` in its order, then the others in ascending order. Stops
 * early once max_macs multiply-adds are done, which the last symbol may exceed; 0 computes none.
 * Writes their SIDs to `out` (room for min(max_symbols, d->pending)); returns how many. */
size_t decoder_poll(decoder *d, const uint32_t *first, size_t n_first, size_t max_symbols, uint64_t max_macs,
                    uint32_t *out);
/* First run [*start, *stop) of known SIDs at or above `from`; 0 if there is none. */
int decoder_known_run(const decoder *d, uint32_t from, uint32_t *start, uint32_t *stop);

static inline const uint8_t *decoder_symbol(const decoder *d, uint32_t sid)
{
    return arena_slot(&d->symbols, sid);
}

#endif
