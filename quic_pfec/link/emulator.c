/* The bottleneck between two network namespaces: one thread, two TUN devices, both directions.
 *
 * It does to IP packets what quic_pfec/sim/link.py does in virtual time, with the same arithmetic in the same order, so
 * that the same seed loses the same slots here, in the Python twin (twin.py) and in the simulator; `replay` exists for
 * the test of that. In C, because under SCHED_FIFO a turn must be short, and because an interpreter that is late by
 * milliseconds measures itself.
 *
 *   emulator LEFT_FD RIGHT_FD key=value ...   run between two descriptors that carry one packet a read
 *   emulator replay key=value ...             the forward direction in virtual time, packets from standard input
 *
 * Commands, one a line on standard input, each answered by one line of JSON: epoch (restart slots, losses, counters),
 * mark (restart counters only), report. The end of the input stops it. The parent, emulator.py, checks all values.
 */
#define _GNU_SOURCE
#include "emulator_link.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum { PACKETS_PER_TURN = 64, LINE = 256 };
static const double IDLE_S = 0.25; /* longest sleep: idle slots are drawn in it, so that no turn draws minutes of them */

static void die(const char *what)
{
    fprintf(stderr, "emulator: %s: %s\n", what, errno ? strerror(errno) : "not understood");
    exit(1);
}

/* ---- packets -------------------------------------------------------------------------------------------------- */

static int protocol_of(const uint8_t *p, size_t size)
{
    return size >= 20 && p[0] >> 4 == 4 ? p[9] : size >= 40 && p[0] >> 4 == 6 ? p[6] : -1;
}

/* Damage that the checksum misses if it hits a UDP datagram (its payload changes and the checksum with it, RFC 1624),
 * since that is what an endpoint has to notice; anything else is damaged as it is, and the receiver's kernel drops it. */
static void damage(uint8_t *p, size_t size, uint64_t offset, uint8_t mask)
{
    size_t ip = size >= 20 && p[0] >> 4 == 4 ? 4u * (p[0] & 15) : 40;
    int whole = p[0] >> 4 == 6 || (size >= 20 && !((p[6] & 0x3f) | p[7])); /* not a fragment */
    if (protocol_of(p, size) != 17 || !whole || ip < 20 || size <= ip + 8) {
        p[offset] ^= mask;
        return;
    }
    uint8_t *sum = p + ip + 6;
    size_t in_payload = offset % (size - ip - 8), at = ip + 8 + in_payload;
    uint32_t shift = in_payload % 2 ? 0 : 8, before = (uint32_t)p[at] << shift;
    p[at] ^= mask;
    uint32_t old = (uint32_t)sum[0] << 8 | sum[1];
    if (old == 0) /* no checksum (IPv4 only) */
        return;
    uint32_t fresh = (~old & 0xffff) + (~before & 0xffff) + ((uint32_t)p[at] << shift);
    fresh = (fresh & 0xffff) + (fresh >> 16);
    fresh = (fresh & 0xffff) + (fresh >> 16);
    fresh = ~fresh & 0xffff;
    if (fresh == 0)
        fresh = 0xffff; /* zero would mean that there is none */
    sum[0] = (uint8_t)(fresh >> 8);
    sum[1] = (uint8_t)fresh;
}

static void accept_packet(Direction *d, double now, const uint8_t *packet, size_t size)
{
    if (!d->free_count) {
        d->n.ring_drops++;
        return;
    }
    Outcome o = direction_send(d, now, size);
    int protocol = protocol_of(packet, size);
    *(protocol == 6 ? &d->n.tcp_in : &d->n.udp_in) += protocol == 6 || protocol == 17 ? size : 0;
    if (o.fate != DELIVER)
        return;
    histogram_add(&d->queue_delay, o.queue_delay_s);
    uint32_t entry = d->free_entries[--d->free_count];
    memcpy(d->data[entry], packet, size);
    if (o.mask)
        damage(d->data[entry], size, o.offset, o.mask);
    Fifo *f = o.held ? &d->held : &d->prompt;
    f->items[(f->head + f->count++) % RING] = (Waiting){o.due_s, ++d->entered, entry, (uint32_t)size};
}

static Fifo *earliest(Direction *d)
{
    Fifo *p = &d->prompt, *h = &d->held;
    if (!p->count || !h->count)
        return p->count ? p : h->count ? h : NULL;
    const Waiting *a = &p->items[p->head], *b = &h->items[h->head];
    return a->due_s < b->due_s || (a->due_s == b->due_s && a->order < b->order) ? p : h;
}

static double clock_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void deliver(Direction *d, int fd)
{
    for (Fifo *f; (f = earliest(d));) {
        Waiting w = f->items[f->head];
        double now = clock_s();
        if (w.due_s > now)
            return;
        f->head = (f->head + 1) % RING;
        f->count--;
        d->free_entries[d->free_count++] = w.entry;
        if (write(fd, d->data[w.entry], w.size) != (ssize_t)w.size) {
            d->n.write_errors++;
            continue;
        }
        int protocol = protocol_of(d->data[w.entry], w.size);
        *(protocol == 6 ? &d->n.tcp_out : &d->n.udp_out) += protocol == 6 || protocol == 17 ? w.size : 0;
        d->n.sent++;
        d->n.sent_bytes += w.size;
        histogram_add(&d->lateness, now - w.due_s);
    }
}

/* ---- running -------------------------------------------------------------------------------------------------- */

static Direction directions[2]; /* 0: left to right, 1: right to left */
static double epoch_s, mark_s, cpu_mark_s;
static int real_time, locked;

static double cpu_s(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) * 1e-6;
}

static void print_histogram(const char *name, const Histogram *h)
{
    printf(",\"%s\":{\"count\":%llu,\"total_s\":%.9g,\"largest_s\":%.9g,\"p50_s\":%.9g,\"p99_s\":%.9g,\"counts\":[", name,
           (unsigned long long)h->count, h->total_s, h->largest_s, histogram_quantile(h, 0.5),
           histogram_quantile(h, 0.99));
    static const int bounds[] = {0, 10, 50, 100, 250, 1000, 5000, BUCKETS + 1}; /* in units; see link/report.py */
    for (int i = 0; i < 7; i++) {
        uint64_t sum = 0;
        for (int b = bounds[i]; b < bounds[i + 1]; b++)
            sum += h->buckets[b];
        printf("%s%llu", i ? "," : "", (unsigned long long)sum);
    }
    printf("]}");
}

static void print_direction(const char *name, const Direction *d)
{
#define FIELD(key, value) printf(",\"%s\":%llu", key, (unsigned long long)(value))
    printf(",\"%s\":{\"in_flight\":%u", name, d->prompt.count + d->held.count);
    FIELD("packets", d->n.packets);
    FIELD("bytes", d->n.bytes);
    FIELD("queue_drops", d->n.queue_drops);
    FIELD("lost", d->n.lost);
    FIELD("delivered", d->n.delivered);
    FIELD("delivered_bytes", d->n.delivered_bytes);
    FIELD("corrupted", d->n.corrupted);
    FIELD("reordered", d->n.reordered);
    FIELD("sent", d->n.sent);
    FIELD("sent_bytes", d->n.sent_bytes);
    FIELD("ring_drops", d->n.ring_drops);
    FIELD("write_errors", d->n.write_errors);
    FIELD("tcp_bytes_in", d->n.tcp_in);
    FIELD("tcp_bytes_out", d->n.tcp_out);
    FIELD("udp_bytes_in", d->n.udp_in);
    FIELD("udp_bytes_out", d->n.udp_out);
    FIELD("largest_queue_bytes", d->largest_queue_bytes);
    FIELD("slots_drawn", d->drawn);
    FIELD("slots_lost", d->slots_lost);
#undef FIELD
    print_histogram("lateness", &d->lateness);
    print_histogram("queue_delay", &d->queue_delay);
    printf("}");
}

static void command(const char *line)
{
    double now = clock_s();
    if (!strcmp(line, "epoch") || !strcmp(line, "mark")) {
        for (int i = 0; i < 2; i++)
            line[0] == 'e' ? direction_epoch(&directions[i], now) : direction_mark(&directions[i]);
        if (line[0] == 'e')
            epoch_s = now;
        mark_s = now;
        cpu_mark_s = cpu_s();
        printf("{\"clock_s\":%.9f}\n", now);
    } else if (!strcmp(line, "report")) {
        for (int i = 0; i < 2; i++)
            direction_advance(&directions[i], now);
        if (!epoch_s && directions[0].begun)
            epoch_s = directions[0].epoch_s;
        printf("{\"emulator\":\"c\",\"clock_s\":%.9f,\"wall_s\":%.9f,\"cpu_s\":%.6f,\"real_time\":%s,\"locked\":%s,", now,
               now - mark_s, cpu_s() - cpu_mark_s, real_time ? "true" : "false", locked ? "true" : "false");
        epoch_s ? printf("\"epoch_clock_s\":%.9f", epoch_s) : printf("\"epoch_clock_s\":null");
        print_direction("forward", &directions[0]);
        print_direction("backward", &directions[1]);
        printf("}\n");
    } else {
        printf("{\"error\":\"unknown command; there are epoch, mark and report\"}\n");
    }
    fflush(stdout);
}

/* Obey what came on standard input; 0 at its end. */
static int obey(void)
{
    static char pending[LINE];
    static size_t length;
    char chunk[LINE];
    ssize_t got = read(0, chunk, sizeof chunk);
    if (got <= 0)
        return got < 0 && errno == EINTR;
    for (ssize_t i = 0; i < got; i++) {
        if (chunk[i] != '\n') {
            length += length < LINE - 1 ? (size_t)(pending[length] = chunk[i], 1) : 0;
            continue;
        }
        pending[length] = 0;
        length = 0;
        command(pending);
    }
    return 1;
}

static void run(int left, int right)
{
    struct sched_param priority = {.sched_priority = 10};
    prctl(PR_SET_TIMERSLACK, 1000UL, 0UL, 0UL, 0UL); /* sleeps end within a microsecond instead of 50 */
    real_time = real_time && !sched_setscheduler(0, SCHED_FIFO, &priority);
    locked = !mlockall(MCL_CURRENT | MCL_FUTURE);
    signal(SIGINT, SIG_IGN); /* Ctrl-C is for the parent, which still wants a report and then closes our input */
    signal(SIGPIPE, SIG_IGN);
    int out[2] = {right, left};
    struct pollfd fds[3] = {{left, POLLIN, 0}, {right, POLLIN, 0}, {0, POLLIN, 0}};
    uint8_t packet[PACKET_BYTES];
    mark_s = clock_s();
    printf("{\"ready\":true}\n");
    fflush(stdout);
    for (;;) {
        double due_s = INFINITY;
        for (int i = 0; i < 2; i++) {
            Fifo *f = earliest(&directions[i]);
            if (f && f->items[f->head].due_s < due_s)
                due_s = f->items[f->head].due_s;
        }
        double wait_s = due_s - clock_s();
        wait_s = wait_s < 0 ? 0 : wait_s > IDLE_S ? IDLE_S : wait_s;
        struct timespec timeout = {0, (long)(wait_s * 1e9)};
        int ready = ppoll(fds, 3, &timeout, NULL);
        if (ready < 0 && errno != EINTR)
            die("ppoll");
        for (int i = 0; i < 2 && ready > 0; i++) {
            for (int n = 0; fds[i].revents && n < PACKETS_PER_TURN; n++) {
                ssize_t size = read(fds[i].fd, packet, sizeof packet);
                if (size < 0 && (errno == EAGAIN || errno == EINTR))
                    break;
                if (size < 0)
                    die("read");
                if (size == 0) { /* a socket whose other end has gone; a device has no end */
                    fds[i].fd = -1;
                    break;
                }
                accept_packet(&directions[i], clock_s(), packet, (size_t)size);
            }
        }
        /* After the packets that were there before it, so that an epoch has none of the past in it. */
        if (ready > 0 && fds[2].revents && !obey())
            return;
        for (int i = 0; i < 2; i++)
            deliver(&directions[i], out[i]);
        for (int i = 0; i < 2 && ready == 0; i++)
            direction_advance(&directions[i], clock_s());
    }
}

/* ---- settings ------------------------------------------------------------------------------------------------- */

static const uint8_t *map_trace(int fd, uint64_t *steps)
{
    struct stat status;
    if (fstat(fd, &status) || !status.st_size)
        die("trace");
    void *bits = mmap(NULL, (size_t)status.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (bits == MAP_FAILED)
        die("trace");
    *steps = (uint64_t)status.st_size;
    return bits;
}

static void set(const char *argument)
{
    const char *value = strchr(argument, '=');
    if (!value)
        die(argument);
    size_t length = (size_t)(value++ - argument);
    for (int i = 0; i < 2; i++) {
        Direction *d = &directions[i];
        Channel *c = &d->channel;
#define IS(name) (length == sizeof(name) - 1 && !memcmp(argument, name, length))
        if (IS("seconds_per_byte")) d->seconds_per_byte = strtod(value, NULL);
        else if (IS("owd_s")) d->owd_s = strtod(value, NULL);
        else if (IS("queue_bytes")) d->queue_bytes = strtod(value, NULL);
        else if (IS("slot_s")) d->slot_s = strtod(value, NULL);
        else if (IS("corrupt")) d->corrupt = strtod(value, NULL);
        else if (IS("reorder")) d->reorder = strtod(value, NULL);
        else if (IS("reorder_s")) d->reorder_s = strtod(value, NULL);
        else if (IS("overhead")) d->overhead = strtoull(value, NULL, 10);
        else if (IS("packet_clock")) d->packet_clock = atoi(value);
        else if (IS("from_start")) d->from_start = atoi(value);
        else if (IS("real_time")) real_time = atoi(value);
        else if (IS("seeds")) { /* forward,backward */
            c->seed = strtoull(i ? strchr(value, ',') + 1 : value, NULL, 10);
            d->noise_seed = ~c->seed;
        } else if (IS("ge") || IS("ge_both")) {
            if (i && IS("ge")) continue;
            if (sscanf(value, "%la,%la,%la,%la", &c->loss[0], &c->loss[1], &c->move[0], &c->move[1]) != 4) die(argument);
            c->model = GILBERT_ELLIOTT;
        } else if (IS("trace") || IS("trace_both")) { /* a descriptor of a file with a byte 0 or 1 for each step */
            if (i && IS("trace")) continue;
            c->trace = map_trace(atoi(value), &c->trace_steps);
            c->model = TRACE;
        } else die(argument);
#undef IS
    }
}

/* Lines "NOW SIZE" or "epoch NOW"; answers "q", "l SLOT" or "d DUE SLOT OFFSET MASK", numbers of seconds as "%a". */
static void replay(void)
{
    char line[LINE];
    for (double now; fgets(line, sizeof line, stdin);) {
        unsigned long long size;
        if (sscanf(line, "epoch %la", &now) == 1) {
            direction_epoch(&directions[0], now);
        } else if (sscanf(line, "%la %llu", &now, &size) == 2) {
            Outcome o = direction_send(&directions[0], now, size);
            if (o.fate == QUEUE_DROP)
                printf("q\n");
            else if (o.fate == CHANNEL_DROP)
                printf("l %lld\n", (long long)o.slot);
            else
                printf("d %a %lld %llu %u\n", o.due_s, (long long)o.slot, (unsigned long long)o.offset, o.mask);
        } else {
            die(line);
        }
    }
}

int main(int argc, char **argv)
{
    int replaying = argc > 1 && !strcmp(argv[1], "replay");
    int first = replaying ? 2 : 3;
    if (argc < first)
        die("arguments");
    for (int i = first; i < argc; i++)
        set(argv[i]);
    for (int i = 0; i < 2; i++) {
        Direction *d = &directions[i];
        d->busy_until_s = -INFINITY;
        for (d->free_count = 0; d->free_count < RING; d->free_count++)
            d->free_entries[d->free_count] = d->free_count;
        direction_begin(d);
        direction_mark(d);
    }
    if (replaying)
        replay();
    else
        run(atoi(argv[1]), atoi(argv[2]));
    return 0;
}
