#include "streams.h"

#include "vector.h"

void codes_build(code_table *codes, const tree *from)
{
    unsigned starts[MAX_CODE_BITS + 2] = {0};
    memset(codes, 0, sizeof *codes);
    codes->lowest = 255;
    for (unsigned v = 0; v < from->symbols; v++)
        if (from->weights[v]) {
            starts[from->weights[v] + 1] += 1u << (from->weights[v] - 1);
            codes->lowest = v < codes->lowest ? (uint8_t)v : codes->lowest;
            codes->highest = (uint8_t)v;
        }
    for (unsigned w = 1; w <= MAX_CODE_BITS; w++)
        starts[w] += starts[w - 1];
    for (unsigned v = 0; v < from->symbols; v++) {
        unsigned weight = from->weights[v];
        if (!weight)
            continue;
        codes->codes[v] = (uint16_t)(starts[weight] >> (weight - 1));
        codes->bits[v] = (uint8_t)(from->bits + 1 - weight);
        starts[weight] += 1u << (weight - 1);
    }
}

BIT_TRICKS
static size_t encode_scalar(const code_table *codes, const uint8_t *data, size_t size, uint8_t *out,
                            uint64_t bits, unsigned count)
{
    uint8_t *to = out;
    size_t left = size;
    for (; left >= 4; left -= 4) {
        const uint8_t *four = data + left - 4;
        uint64_t late = codes->codes[four[3]] | (uint64_t)codes->codes[four[2]] << codes->bits[four[3]];
        uint64_t early = codes->codes[four[1]] | (uint64_t)codes->codes[four[0]] << codes->bits[four[1]];
        unsigned late_bits = codes->bits[four[3]] + codes->bits[four[2]];
        bits |= (late | early << late_bits) << count;
        count += late_bits + codes->bits[four[1]] + codes->bits[four[0]];
        store64(to, bits);
        to += count >> 3;
        bits >>= count & 56;
        count &= 7;
    }
    while (left > 0) {
        unsigned v = data[--left];
        bits |= (uint64_t)codes->codes[v] << count;
        count += codes->bits[v];
    }
    bits |= 1ull << count++;
    store64(to, bits);
    return (size_t)(to - out) + (count + 7) / 8;
}

size_t stream_encode(const code_table *codes, const uint8_t *data, size_t size, uint8_t *out)
{
    partial_stream begun = {data + size, out, 0, 0};
    if (vector_available())
        vector_encode(codes, data, &begun);
    return (size_t)(begun.to - out) +
           encode_scalar(codes, data, (size_t)(begun.end - data), begun.to, begun.bits, begun.count);
}

/* From this length on several bytes a look-up repay the making of their table. */
enum { LONG = 8 * 1024, LONG_WITH_ONE_BIT = 64 * 1024 };

static void fill_single(decode_table *table, const tree *from)
{
    /* The bytes by weight, and by value where weights are equal: the order of their codes. */
    unsigned starts[MAX_CODE_BITS + 2] = {0}, position = 0;
    uint8_t order[256];
    for (unsigned v = 0; v < from->symbols; v++)
        starts[from->weights[v] + 1]++;
    for (unsigned weight = 1; weight <= MAX_CODE_BITS + 1; weight++)
        starts[weight] += starts[weight - 1];
    unsigned first = starts[1], next[MAX_CODE_BITS + 2];
    memcpy(next, starts, sizeof next);
    for (unsigned v = 0; v < from->symbols; v++)
        order[next[from->weights[v]]++] = (uint8_t)v;
    for (unsigned i = first; i < from->symbols; i++) {
        unsigned v = order[i], weight = from->weights[v];
        /* A tree of fewer bits is spread over the whole table. */
        unsigned span = 1u << (weight - 1 + MAX_CODE_BITS - from->bits);
        uint64_t entry = v | (from->bits + 1 - weight) << 8;
        uint16_t *to = table->single + position;
        position += span;
        if (span < 4) {
            for (unsigned copy = 0; copy < span; copy++)
                to[copy] = (uint16_t)entry;
            continue;
        }
        for (unsigned copy = 0; copy < span; copy += 4)
            store64((uint8_t *)(to + copy), entry * 0x0001000100010001ull);
    }
}

/* Every entry step by step, at most six bytes: for trees with a code of one bit. */
static void fill_stepwise(decode_table *table)
{
    for (unsigned index = 0; index < 1u << MAX_CODE_BITS; index++) {
        uint64_t bytes = 0, count = 0, taken = 0;
        while (count < 6) {
            unsigned entry = table->single[index << taken & ((1u << MAX_CODE_BITS) - 1)];
            if (taken + (entry >> 8) > MAX_CODE_BITS)
                break;
            bytes |= (uint64_t)(entry & 255) << (8 * ++count);
            taken += entry >> 8;
        }
        table->entries[index] = taken | bytes | count << 56;
    }
}

VECTORS
static void prepend(uint64_t *RESTRICT to, const uint64_t *RESTRICT from, size_t count, uint64_t head)
{
    for (size_t i = 0; i < count; i++)
        to[i] = ((from[i] & 0xFFFFFFFFFF00ull) << 8 | (from[i] & 0xFF000000000000FFull)) + head;
}

/*
 * Without codes of one bit at most five bytes fit into an entry. What follows a first code of n bits is what the
 * remaining bits decode to alone: the tables of fewer bits are made first, each out of those before it.
 */
static void fill_by_tables(decode_table *table)
{
    uint64_t tables[2 << MAX_CODE_BITS]; /* the table of m bits begins at 1 << m */
    tables[1] = 0;
    for (unsigned m = 1; m <= MAX_CODE_BITS; m++) {
        uint64_t *to = m == MAX_CODE_BITS ? table->entries : tables + (1u << m);
        unsigned step = 1u << (MAX_CODE_BITS - m);
        for (unsigned index = 0; index < 1u << m;) {
            unsigned entry = table->single[index * step], bits = entry >> 8;
            if (bits > m) {
                to[index++] = 0;
                continue;
            }
            size_t count = 1u << (m - bits);
            uint64_t head = bits | (uint64_t)(entry & 255) << 8 | 1ull << 56;
            prepend(to + index, tables + count, count, head);
            index += (unsigned)count;
        }
    }
}

void decode_build(decode_table *table, const tree *from, size_t size)
{
    int one_bit = 0;
    fill_single(table, from);
    for (unsigned v = 0; v < from->symbols; v++)
        one_bit |= from->weights[v] == from->bits;
    table->has_entries = size >= (one_bit ? LONG_WITH_ONE_BIT : LONG);
    if (table->has_entries && one_bit)
        fill_stepwise(table);
    else if (table->has_entries)
        fill_by_tables(table);
}

typedef struct {
    const uint8_t *start, *at; /* bits are taken from the eight bytes at `at`, highest first */
    uint64_t bits;             /* what is left of them, at the top; the lowest bit set marks the end of them */
    uint8_t *to, *end;
} reader;

static int reader_open(reader *from, const uint8_t *data, size_t size, uint8_t *to, uint8_t *end)
{
    *from = (reader){data, data + size - 8, 0, to, end};
    if (size < 8 || !data[size - 1])
        return 0;
    unsigned mark = 8 - highest_bit(data[size - 1]);
    from->bits = (load64(from->at) | 1) << mark;
    return 1;
}

/* Decodes byte by byte what is left, and checks that the stream ends where the output does. */
static int finish(const decode_table *table, reader *from)
{
    int64_t left = 8 * (from->at - from->start) + 64 - __builtin_ctzll(from->bits);
    for (; from->to < from->end; from->to++) {
        uint64_t window = 0;
        for (int64_t byte = (left - 1) >> 3, shift = 56; byte >= 0 && shift >= 40; byte--, shift -= 8)
            window |= (uint64_t)from->start[byte] << shift;
        window <<= (unsigned)(-left & 7);
        unsigned entry = table->single[window >> (64 - MAX_CODE_BITS)];
        *from->to = (uint8_t)entry;
        left -= entry >> 8;
        if (left < 0)
            return 0;
    }
    return left == 0;
}

/* Look-ups between two refills, each of at most MAX_CODE_BITS; what they and the last store may write. */
enum { TURNS = 5, MARGIN = TURNS * 6 + 8 };

#define ROOM(s) ((s).end - (s).to >= MARGIN && (s).at - (s).start >= 8)
#define REFILL(s)                                                                                            \
    do {                                                                                                     \
        unsigned used_ = (unsigned)__builtin_ctzll((s).bits);                                                \
        (s).at -= used_ >> 3;                                                                                \
        (s).bits = (load64((s).at) | 1) << (used_ & 7);                                                      \
    } while (0)
/* Several bytes at a time. */
#define STEP(s)                                                                                              \
    do {                                                                                                     \
        uint64_t entry_ = entries[(s).bits >> (64 - MAX_CODE_BITS)];                                         \
        (s).bits <<= entry_ & 63;                                                                            \
        store64((s).to, entry_ >> 8);                                                                        \
        (s).to += entry_ >> 56;                                                                              \
    } while (0)
/* One byte. */
#define SMALL_STEP(s)                                                                                        \
    do {                                                                                                     \
        unsigned entry_ = single[(s).bits >> (64 - MAX_CODE_BITS)];                                          \
        (s).bits <<= entry_ >> 8;                                                                            \
        *(s).to++ = (uint8_t)entry_;                                                                         \
    } while (0)
/* Streams side by side keep the processor busy; then each alone, since they do not end together. */
#define RUN_FOUR(STEP, first)                                                                                \
    do {                                                                                                     \
        reader a = (first)[0], b = (first)[1], c = (first)[2], d = (first)[3];                               \
        while (ROOM(a) && ROOM(b) && ROOM(c) && ROOM(d)) {                                                   \
            for (int turn = 0; turn < TURNS; turn++) {                                                       \
                STEP(a);                                                                                     \
                STEP(b);                                                                                     \
                STEP(c);                                                                                     \
                STEP(d);                                                                                     \
            }                                                                                                \
            REFILL(a);                                                                                       \
            REFILL(b);                                                                                       \
            REFILL(c);                                                                                       \
            REFILL(d);                                                                                       \
        }                                                                                                    \
        (first)[0] = a;                                                                                      \
        (first)[1] = b;                                                                                      \
        (first)[2] = c;                                                                                      \
        (first)[3] = d;                                                                                      \
    } while (0)
#define RUN_EIGHT(STEP, first)                                                                               \
    do {                                                                                                     \
        reader a = (first)[0], b = (first)[1], c = (first)[2], d = (first)[3];                               \
        reader e = (first)[4], f = (first)[5], g = (first)[6], h = (first)[7];                               \
        while (ROOM(a) && ROOM(b) && ROOM(c) && ROOM(d) && ROOM(e) && ROOM(f) && ROOM(g) && ROOM(h)) {       \
            for (int turn = 0; turn < TURNS; turn++) {                                                       \
                STEP(a);                                                                                     \
                STEP(b);                                                                                     \
                STEP(c);                                                                                     \
                STEP(d);                                                                                     \
                STEP(e);                                                                                     \
                STEP(f);                                                                                     \
                STEP(g);                                                                                     \
                STEP(h);                                                                                     \
            }                                                                                                \
            REFILL(a);                                                                                       \
            REFILL(b);                                                                                       \
            REFILL(c);                                                                                       \
            REFILL(d);                                                                                       \
            REFILL(e);                                                                                       \
            REFILL(f);                                                                                       \
            REFILL(g);                                                                                       \
            REFILL(h);                                                                                       \
        }                                                                                                    \
        (first)[0] = a;                                                                                      \
        (first)[1] = b;                                                                                      \
        (first)[2] = c;                                                                                      \
        (first)[3] = d;                                                                                      \
        (first)[4] = e;                                                                                      \
        (first)[5] = f;                                                                                      \
        (first)[6] = g;                                                                                      \
        (first)[7] = h;                                                                                      \
    } while (0)
#define RUN_ALL(STEP)                                                                                        \
    if (count == 8)                                                                                          \
        RUN_EIGHT(STEP, streams);                                                                            \
    for (unsigned s = 0; s < count; s += 4)                                                                  \
        RUN_FOUR(STEP, streams + s);                                                                         \
    for (unsigned s = 0; s < count; s++) {                                                                   \
        reader last = streams[s];                                                                            \
        while (ROOM(last)) {                                                                                 \
            for (int turn = 0; turn < TURNS; turn++)                                                         \
                STEP(last);                                                                                  \
            REFILL(last);                                                                                    \
        }                                                                                                    \
        streams[s] = last;                                                                                   \
    }

BIT_TRICKS
static void decode_several(const uint64_t *entries, reader *streams, unsigned count)
{
    RUN_ALL(STEP)
}

BIT_TRICKS
static void decode_singly(const uint16_t *single, reader *streams, unsigned count)
{
    RUN_ALL(SMALL_STEP)
}

static int open_four(reader streams[4], const uint8_t *data, const size_t lengths[4], uint8_t *out, size_t size)
{
    size_t part = (size + 3) / 4;
    for (unsigned s = 0; s < 4; s++) {
        uint8_t *to = out + s * part, *end = s < 3 ? to + part : out + size;
        if (!reader_open(&streams[s], data, lengths[s], to, end))
            return 0;
        data += lengths[s];
    }
    return 1;
}

int streams_decode(const decode_table *table, const uint8_t *data, const size_t lengths[4], uint8_t *out,
                   size_t size, const uint8_t *other, const size_t other_lengths[4], size_t other_size)
{
    reader streams[8];
    unsigned count = other ? 8 : 4;
    if (!open_four(streams, data, lengths, out, size) ||
        (other && !open_four(streams + 4, other, other_lengths, out + size, other_size)))
        return 0;
    if (table->has_entries)
        decode_several(table->entries, streams, count);
    else
        decode_singly(table->single, streams, count);
    for (unsigned s = 0; s < count; s++)
        if (!finish(table, &streams[s]))
            return 0;
    return 1;
}
