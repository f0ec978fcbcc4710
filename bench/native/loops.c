/* Timing loops around the kernels and codecs, so that a figure holds no call from Python. Built on first use together
 * with codec/ by bench/codec_native.py; no part of the product. All times are nanoseconds of the monotonic clock. */
#define _POSIX_C_SOURCE 200809L
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "arena.h"
#include "coefficients.h"
#include "decoder.h"
#include "gf256.h"

enum { MAX_SOURCES = 1024 };

double now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return 1e9 * (double)t.tv_sec + (double)t.tv_nsec;
}

/* ---- the limit: as many sources, XORed only ----------------------------------------------------------------------- */

#define XOR_BODY(VECTOR, VECTORS)                                                                                      \
    for (size_t at = 0; at < n; at += (VECTORS) * sizeof(VECTOR)) {                                                    \
        VECTOR sum[VECTORS];                                                                                           \
        GF256_UNROLL                                                                                                   \
        for (int v = 0; v < (VECTORS); v++)                                                                            \
            sum[v] = (VECTOR){0};                                                                                      \
        for (size_t i = 0; i + 1 < k; i += 2) {                                                                        \
            const VECTOR *a = (const VECTOR *)(const void *)(x[i] + at), *b = (const VECTOR *)(const void *)(x[i + 1] + at); \
            GF256_UNROLL                                                                                               \
            for (int v = 0; v < (VECTORS); v++)                                                                        \
                sum[v] ^= a[v] ^ b[v];                                                                                 \
        }                                                                                                              \
        VECTOR *out = (VECTOR *)(void *)(y + at);                                                                      \
        GF256_UNROLL                                                                                                   \
        for (int v = 0; v < (VECTORS); v++)                                                                            \
            out[v] = sum[v];                                                                                           \
    }

/* Even k, aligned operands, n a multiple of the strip: 1,408 bytes in every width. */
typedef unsigned long long v16 __attribute__((vector_size(16), may_alias));
static void xor16(uint8_t *y, const uint8_t *const *x, size_t k, size_t n)
{
    XOR_BODY(v16, 8)
}
#if GF256_X86
typedef unsigned long long v32 __attribute__((vector_size(32), may_alias));
typedef unsigned long long v64 __attribute__((vector_size(64), may_alias));
__attribute__((target("avx2"))) static void xor32(uint8_t *y, const uint8_t *const *x, size_t k, size_t n)
{
    XOR_BODY(v32, 11)
}
__attribute__((target("avx512f"))) static void xor64(uint8_t *y, const uint8_t *const *x, size_t k, size_t n)
{
    XOR_BODY(v64, 11)
}
#endif

static void (*xor_of(const gf256_kernels *level))(uint8_t *, const uint8_t *const *, size_t, size_t)
{
#if GF256_X86
    if (strcmp(level->name, "gfni512") == 0 || strcmp(level->name, "avx512") == 0)
        return xor64;
    if (strcmp(level->name, "gfni256") == 0 || strcmp(level->name, "avx2") == 0)
        return xor32;
#endif
    (void)level;
    return xor16;
}

/* ---- kernels ------------------------------------------------------------------------------------------------------ */

typedef struct {
    arena symbols, output;
    const uint8_t *x[MAX_SOURCES];
    uint8_t c[MAX_SOURCES];
} operands;

static operands o;

/* Random symbols to work on. 0, or -1 without memory. */
int prepare(size_t k, size_t n, uint64_t seed)
{
    gf256_init();
    arena_free(&o.symbols);
    arena_free(&o.output);
    if (k > MAX_SOURCES || arena_init(&o.symbols, n, k) != 0 || arena_init(&o.output, n, 1) != 0)
        return -1;
    for (size_t i = 0; i < k; i++) {
        uint8_t *p = arena_slot(&o.symbols, i);
        for (size_t j = 0; j < o.symbols.stride; j++) {
            seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            p[j] = (uint8_t)(seed >> 56);
        }
        o.x[i] = p;
        o.c[i] = (uint8_t)(1 + (seed >> 40) % 255);
    }
    return 0;
}

const char *level_name(size_t index)
{
    gf256_init();
    const gf256_kernels *level = gf256_level(index);
    return level == NULL ? NULL : level->supported() ? level->name : "";
}

typedef void (*isal_encode)(int, int, int, unsigned char *, unsigned char **, unsigned char **);

enum { COPY, XOR, DOT, AXPYS, AXPY, ISAL };

/* ns of one run of `what` over k prepared sources, as the mean of `times` runs. */
double kernel_ns(int what, size_t index, size_t k, size_t times, isal_encode isal, unsigned char *tables)
{
    const gf256_kernels *level = gf256_level(index);
    void (*fused_xor)(uint8_t *, const uint8_t *const *, size_t, size_t) = xor_of(level);
    uint8_t *y = o.output.base;
    const size_t n = o.symbols.stride;
    const double start = now_ns();
    for (size_t t = 0; t < times; t++) {
        switch (what) {
        case COPY:
            memcpy(y, o.x[t % k], n);
            break;
        case XOR:
            fused_xor(y, o.x, k, n);
            break;
        case DOT:
            level->dot(y, o.x, o.c, k, n);
            break;
        case AXPYS:
            memset(y, 0, n);
            for (size_t i = 0; i < k; i++)
                level->axpy(y, o.x[i], o.c[i], n);
            break;
        case AXPY:
            level->axpy(y, o.x[t % k], o.c[t % k], n);
            break;
        default:
            isal((int)n, (int)k, 1, tables, (unsigned char **)(void *)o.x, &y);
        }
        __asm__ volatile("" : : "r"(y) : "memory");
    }
    return (now_ns() - start) / (double)times;
}

const uint8_t *prepared_coefficients(void)
{
    return o.c;
}

const uint8_t *output(void)
{
    return o.output.base;
}

/* ---- the paper's class: eager elimination, payloads carried along, a table of 64 KiB ------------------------------- */

enum { COLUMNS = 1024 }; /* column = SID mod COLUMNS: the stream keeps its window below that */

typedef struct {
    uint8_t coefficient[COLUMNS], *payload;
    uint32_t pivot; /* column */
} eager_row;

typedef struct {
    eager_row *row[COLUMNS + 1]; /* row[rank] is scratch */
    uint32_t rank, sid_of[COLUMNS];
    eager_row *rows;
    arena symbols, payloads;
    uint8_t *known;
} eager;

static void eager_free(eager *e)
{
    arena_free(&e->symbols);
    arena_free(&e->payloads);
    free(e->rows);
    free(e->known);
    free(e);
}

static eager *eager_new(uint32_t symbols, size_t size)
{
    eager *e = calloc(1, sizeof *e);
    if (e == NULL)
        return NULL;
    e->rows = calloc(COLUMNS + 1, sizeof *e->rows);
    e->known = calloc(symbols, 1);
    if ((arena_init(&e->symbols, size, symbols) | arena_init(&e->payloads, size, COLUMNS + 1)) != 0 || e->rows == NULL
        || e->known == NULL) {
        eager_free(e);
        return NULL;
    }
    for (uint32_t i = 0; i <= COLUMNS; i++) {
        e->row[i] = &e->rows[i];
        e->rows[i].payload = arena_slot(&e->payloads, i);
    }
    return e;
}

static void eager_add(eager_row *y, const eager_row *x, uint8_t c, size_t n)
{
    gf256_scalar.axpy(y->coefficient, x->coefficient, c, COLUMNS);
    gf256_scalar.axpy(y->payload, x->payload, c, n);
}

static void eager_remove(eager *e, uint32_t r)
{
    eager_row *row = e->row[r];
    e->row[r] = e->row[--e->rank];
    e->row[e->rank] = row;
}

/* The first column of row r becomes its pivot and leaves all other rows; a row of zeros goes. */
static void eager_pivot(eager *e, uint32_t r, size_t n)
{
    eager_row *row = e->row[r];
    uint32_t p = 0;
    while (p < COLUMNS && row->coefficient[p] == 0)
        p++;
    if (p == COLUMNS) {
        if (r < e->rank)
            eager_remove(e, r);
        return;
    }
    const uint8_t inverse = gf256_inv[row->coefficient[p]];
    gf256_scalar.scal(row->coefficient, inverse, COLUMNS);
    gf256_scalar.scal(row->payload, inverse, n);
    row->pivot = p;
    for (uint32_t j = 0; j < e->rank; j++)
        if (j != r && e->row[j]->coefficient[p] != 0)
            eager_add(e->row[j], row, e->row[j]->coefficient[p], n);
    e->rank += r == e->rank;
}

static void eager_known(eager *e, uint32_t sid, const uint8_t *data, size_t n)
{
    uint32_t owner = COLUMNS;
    memcpy(arena_slot(&e->symbols, sid), data, n);
    e->known[sid] = 1;
    for (uint32_t r = 0; r < e->rank; r++) {
        const uint8_t c = e->row[r]->coefficient[sid % COLUMNS];
        if (c == 0)
            continue;
        gf256_scalar.axpy(e->row[r]->payload, arena_slot(&e->symbols, sid), c, n);
        e->row[r]->coefficient[sid % COLUMNS] = 0;
        if (e->row[r]->pivot == sid % COLUMNS)
            owner = r;
    }
    if (owner != COLUMNS)
        eager_pivot(e, owner, n);
}

/* Deliver every row of one coefficient. */
static void eager_settle(eager *e, size_t n)
{
    for (uint32_t r = 0; r < e->rank;) {
        eager_row *row = e->row[r];
        unsigned others = 0;
        for (uint32_t c = 0; c < COLUMNS; c++)
            others += row->coefficient[c] != 0;
        if (others != 1) {
            r++;
            continue;
        }
        const uint32_t column = row->pivot;
        row->coefficient[column] = 0;
        eager_remove(e, r);
        memcpy(arena_slot(&e->symbols, e->sid_of[column]), row->payload, n); /* no other row has it: RREF */
        e->known[e->sid_of[column]] = 1;
    }
}

static void eager_source(eager *e, uint32_t sid, const uint8_t *data, size_t n)
{
    if (e->known[sid])
        return;
    eager_known(e, sid, data, n);
    if (e->sid_of[sid % COLUMNS] == sid)
        eager_settle(e, n);
}

static void eager_repair(eager *e, const uint32_t *sids, const uint8_t *factors, size_t terms, const uint8_t *data,
                         size_t n)
{
    eager_row *row = e->row[e->rank];
    memset(row->coefficient, 0, COLUMNS);
    memcpy(row->payload, data, n);
    for (size_t i = 0; i < terms; i++) {
        if (e->known[sids[i]]) {
            gf256_scalar.axpy(row->payload, arena_slot(&e->symbols, sids[i]), factors[i], n);
        } else {
            row->coefficient[sids[i] % COLUMNS] = factors[i];
            e->sid_of[sids[i] % COLUMNS] = sids[i];
        }
    }
    for (uint32_t j = 0; j < e->rank; j++)
        if (row->coefficient[e->row[j]->pivot] != 0)
            eager_add(row, e->row[j], row->coefficient[e->row[j]->pivot], n);
    eager_pivot(e, e->rank, n);
    eager_settle(e, n);
}

/* ---- a recorded stream -------------------------------------------------------------------------------------------- */

typedef struct {
    uint32_t is_repair, lost, sid; /* sid: of a source */
    uint32_t number, first_sid, degree, head_span, head_at, tail_offset, tail_span;
} event;

/* Distinct symbols: the packet before the codec lies in cache, as a packetiser or a decryption leaves it. */
enum { RING = 251 };

typedef struct {
    double encode_ns, decode_ns, worst_ns;
    uint64_t wrong, recovered;
} result;

static repair_header header_of(const event *v, const uint8_t *heads)
{
    return (repair_header){.transfer_id = 4, .repair_number = v->number, .first_sid = v->first_sid, .degree = v->degree,
                           .head_span = v->head_span, .tail_offset = v->tail_offset, .tail_span = v->tail_span,
                           .head = heads + v->head_at, .head_bytes = (v->head_span + 7) / 8};
}

/* Encode all events, then decode those that were not lost, with the level in use (eager_scalar = 0) or with the paper's
 * class. `took`, unless NULL: ns of each decoder call, kept if shorter than what is there. 0, or -1 without memory. */
int stream(const event *events, size_t count, const uint8_t *heads, uint32_t symbols, size_t size, size_t level_index,
           int eager_scalar, double *took, result *out)
{
    static uint32_t sids[PFEC_MAX_SPAN], found[32];
    static uint8_t factors[PFEC_MAX_SPAN];
    static const uint8_t *terms[PFEC_MAX_SPAN];
    const decoder_limits limits = {512, 255, 4096, 1024};
    arena source, sent, wire;
    decoder d;
    eager *e = NULL;
    size_t repairs = 0;
    memset(out, 0, sizeof *out);
    gf256_init();
    gf256 = *gf256_level(level_index);
    for (size_t i = 0; i < count; i++)
        repairs += events[i].is_repair;
    int failed = arena_init(&source, size, RING) | arena_init(&sent, size, symbols) | arena_init(&wire, size, repairs + 1);
    failed |= decoder_init(&d, &limits, size, symbols);
    if (eager_scalar) {
        e = eager_new(symbols, size);
        failed |= e == NULL;
    }
    if (failed)
        return -1;
    const size_t n = source.stride;
    uint64_t seed = 1;
    for (uint32_t i = 0; i < RING; i++) {
        uint8_t *p = arena_slot(&source, i);
        for (size_t j = 0; j + 8 <= size; j += 8) {
            seed = seed * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            memcpy(p + j, &seed, 8);
        }
    }
    for (uint32_t i = 0; i < symbols; i++) {
        memset(arena_slot(&sent, i), 0, n); /* page faults are not the codec's */
        memset(arena_slot(&d.symbols, i), 0, n);
        if (eager_scalar)
            memset(arena_slot(&e->symbols, i), 0, n);
    }
    for (size_t i = 0; i <= repairs; i++)
        memset(arena_slot(&wire, i), 0, n);

    double start = now_ns();
    size_t r = 0;
    for (size_t i = 0; i < count; i++) {
        const event *v = &events[i];
        if (!v->is_repair) {
            memcpy(arena_slot(&sent, v->sid), arena_slot(&source, v->sid % RING), size);
            continue;
        }
        const repair_header h = header_of(v, heads);
        const size_t k = repair_expand(&h, sids, factors);
        uint8_t *y = arena_slot(&wire, r++);
        for (size_t j = 0; j < k; j++)
            terms[j] = arena_slot(&sent, sids[j]);
        if (!eager_scalar) {
            gf256.dot(y, terms, factors, k, n);
            continue;
        }
        memset(y, 0, n);
        for (size_t j = 0; j < k; j++)
            gf256_scalar.axpy(y, terms[j], factors[j], n);
    }
    out->encode_ns = now_ns() - start;

    r = 0;
    start = now_ns();
    double before = start;
    for (size_t i = 0; i < count; i++) {
        const event *v = &events[i];
        const uint8_t *data = v->is_repair ? arena_slot(&wire, r++) : arena_slot(&source, v->sid % RING);
        if (v->lost)
            continue;
        if (took != NULL)
            before = now_ns();
        if (eager_scalar) {
            if (v->is_repair) {
                const repair_header h = header_of(v, heads);
                const size_t k = repair_expand(&h, sids, factors);
                eager_repair(e, sids, factors, k, data, n);
            } else {
                eager_source(e, v->sid, data, n);
            }
            if (took != NULL && now_ns() - before < took[2 * i])
                took[2 * i] = now_ns() - before;
            continue;
        }
        if (v->is_repair) {
            const repair_header h = header_of(v, heads);
            if (repair_header_check(&h, limits.max_degree, limits.max_span, symbols) == NULL)
                decoder_repair(&d, &h, data);
        } else {
            decoder_source(&d, v->sid, data);
        }
        if (took != NULL) {
            const double after = now_ns();
            if (after - before < took[2 * i])
                took[2 * i] = after - before;
            before = after;
        }
        if (d.pending != 0)
            decoder_poll(&d, NULL, 0, 32, UINT64_MAX, found);
        if (took != NULL && now_ns() - before < took[2 * i + 1])
            took[2 * i + 1] = now_ns() - before;
    }
    while (d.pending != 0)
        decoder_poll(&d, NULL, 0, 32, UINT64_MAX, found);
    out->decode_ns = now_ns() - start;
    for (uint32_t i = 0; i < symbols; i++) {
        const int have = eager_scalar ? e->known[i] : (d.flags[i] & SID_KNOWN) != 0;
        const uint8_t *got = eager_scalar ? arena_slot(&e->symbols, i) : decoder_symbol(&d, i);
        out->recovered += (uint64_t)have;
        out->wrong += have && memcmp(got, arena_slot(&source, i % RING), size) != 0;
    }
    arena_free(&source);
    arena_free(&sent);
    arena_free(&wire);
    if (e != NULL)
        eager_free(e);
    decoder_free(&d);
    return 0;
}
