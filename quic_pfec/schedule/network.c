/* The learned policies: forward pass and what follows from it (schedule/network.py, schedule/learned.py).
 *
 * Every sum runs over the inputs in their order, each product rounded by itself, so that the outputs are the same bits
 * on every processor and in the Python twins; only columns are worked on side by side. */
#include "core.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#if defined(__GNUC__) && defined(__x86_64__)
#define TWO_TARGETS 1
#else
#define TWO_TARGETS 0
#endif

typedef float eight __attribute__((vector_size(32)));

/* out[j] = b[j] + sum of x[i] w[i][j]. A macro, because what is inlined keeps the vectors of the target it was written
 * for. */
#define DEFINE_LAYERS(name, target)                                                                                  \
    target static void name##_wide(const float *x, int inputs, const float (*w)[HIDDEN], const float *b, float *out) \
    {                                                                                                                \
        for (int column = 0; column < HIDDEN; column += 32) {                                                        \
            const eight *first = (const eight *)(const void *)(b + column);                                          \
            eight p = first[0], q = first[1], r = first[2], s = first[3];                                            \
            for (int i = 0; i < inputs; i++) {                                                                       \
                const eight *row = (const eight *)(const void *)(w[i] + column);                                     \
                p += x[i] * row[0];                                                                                  \
                q += x[i] * row[1];                                                                                  \
                r += x[i] * row[2];                                                                                  \
                s += x[i] * row[3];                                                                                  \
            }                                                                                                        \
            eight *to = (eight *)(void *)(out + column);                                                             \
            to[0] = p, to[1] = q, to[2] = r, to[3] = s;                                                              \
        }                                                                                                            \
        for (int j = 0; j < HIDDEN; j++)                                                                             \
            out[j] = out[j] < 0.0f ? 0.0f : out[j];                                                                  \
    }                                                                                                                \
    target static void name(const network *n, const float *x, float *y)                                              \
    {                                                                                                                \
        _Alignas(32) float first[HIDDEN], second[HIDDEN];                                                            \
        name##_wide(x, FEATURES, n->w1, n->b1, first);                                                               \
        name##_wide(first, HIDDEN, n->w2, n->b2, second);                                                            \
        eight sum = *(const eight *)(const void *)n->b3;                                                             \
        for (int i = 0; i < HIDDEN; i++)                                                                             \
            sum += second[i] * *(const eight *)(const void *)n->w3[i];                                               \
        memcpy(y, &sum, CHOICES * sizeof *y);                                                                        \
    }

DEFINE_LAYERS(forward_plain, )
#if TWO_TARGETS
DEFINE_LAYERS(forward_avx2, __attribute__((target("avx2"))))
#endif

network *network_new(void)
{
    network *n = aligned_alloc(64, sizeof(network));
    if (n == NULL)
        return NULL;
    memset(n, 0, sizeof *n);
    n->forward = forward_plain;
#if TWO_TARGETS
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2"))
        n->forward = forward_avx2;
#endif
    return n;
}

void network_free(network *n)
{
    free(n);
}

static bool any_but(const bool *allowed, int choice)
{
    bool any = false;
    for (int a = 0; a < CHOICES; a++)
        any |= allowed[a] && a != choice;
    return any;
}

/* The paper's: the highest value among what is allowed. */
static action highest(const network *n, const sender_state *s, const feature_memory *m, uint32_t degree)
{
    bool allowed[CHOICES];
    float x[FEATURES], y[CHOICES];
    int best = -1;
    choice_masks(s, n->resend, allowed);
    if (!any_but(allowed, -1))
        return (action){ACTION_IDLE, 1};
    features_look(m, s, n->version, degree, x);
    n->forward(n, x, y);
    for (int a = 0; a < CHOICES; a++)
        if (allowed[a] && (best < 0 || y[a] > y[best]))
            best = a;
    return choice_action(s, best);
}

/* What a rule's action is among the choices, or -1. */
int choice_of(action a)
{
    switch (a.kind) {
    case ACTION_SOURCE:
        return 0;
    case ACTION_REPAIR:
        return a.count == 16 ? 3 : a.count == 4 ? 2 : 1;
    case ACTION_RESEND:
        return 4;
    default:
        return -1;
    }
}

/* The rule's own, unless another choice gains more than the margin. */
static action overridden(const policy *p, const sender_state *s, const feature_memory *m, uint32_t degree, int *verdict)
{
    const network *n = p->net;
    action own = policy_decide(p, s);
    int base = choice_of(own), best = -1;
    if (base < 0 || (base == 4 && !n->resend))
        return own;
    bool allowed[CHOICES];
    float x[FEATURES], y[CHOICES];
    choice_masks(s, n->resend, allowed);
    if (!any_but(allowed, base))
        return own;
    features_look(m, s, n->version, degree, x);
    for (int i = 0; i < FEATURES; i++) {
        if (!(x[i] >= n->low[i] && x[i] <= n->high[i])) {
            *verdict = VERDICT_GUARD;
            return own;
        }
    }
    n->forward(n, x, y);
    for (int a = 0; a < (n->resend ? CHOICES : CHOICES - 1); a++) {
        if (!isfinite(y[a])) {
            *verdict = VERDICT_GUARD;
            return own;
        }
        if (allowed[a] && (best < 0 || y[a] > y[best]))
            best = a;
    }
    if (best == base || !((double)y[best] - (double)y[base] > n->margin))
        return own;
    *verdict = VERDICT_OVERRIDE;
    return choice_action(s, best);
}

action network_decide(const policy *p, const sender_state *s, const feature_memory *m, uint32_t degree, int *verdict)
{
    *verdict = VERDICT_RULE;
    return p->rule == RULE_Q ? highest(p->net, s, m, degree) : overridden(p, s, m, degree, verdict);
}
