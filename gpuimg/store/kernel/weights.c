#include "weights.h"

enum { MAX_LOG = 6, MIN_LOG = 5, WEIGHTS = 12 };

typedef struct {
    uint64_t bits;
    unsigned count;
    uint8_t *to;
} bit_writer;

static void put(bit_writer *out, uint32_t value, unsigned bits)
{
    out->bits |= (uint64_t)(value & ((1u << bits) - 1)) << out->count;
    out->count += bits;
    while (out->count >= 8) {
        *out->to++ = (uint8_t)out->bits;
        out->bits >>= 8;
        out->count -= 8;
    }
}

static void put_rest(bit_writer *out)
{
    if (out->count)
        *out->to++ = (uint8_t)out->bits;
}

/* Shares of 1 << log for each weight, none below 1 for one that occurs; the sum is exact. */
static void normalize(const unsigned counts[WEIGHTS], unsigned total, unsigned log, unsigned shares[WEIGHTS])
{
    unsigned size = 1u << log, given = 0, largest = 0;
    for (unsigned w = 0; w < WEIGHTS; w++) {
        shares[w] = counts[w] * size / total;
        if (counts[w] && !shares[w])
            shares[w] = 1;
        given += shares[w];
        if (counts[w] > counts[largest])
            largest = w;
    }
    while (given > size) {
        unsigned most = largest;
        for (unsigned w = 0; w < WEIGHTS; w++)
            if (shares[w] > shares[most])
                most = w;
        shares[most]--;
        given--;
    }
    shares[largest] += size - given;
}

static void write_shares(bit_writer *out, const unsigned shares[WEIGHTS], unsigned log)
{
    unsigned threshold = 1u << log, remaining = threshold + 1, bits = log + 1, w = 0;
    int after_zero = 0;
    put(out, log - MIN_LOG, 4);
    while (remaining > 1) {
        if (after_zero) {
            unsigned zeros = 0;
            while (!shares[w]) {
                zeros++;
                w++;
            }
            for (; zeros >= 3; zeros -= 3)
                put(out, 3, 2);
            put(out, zeros, 2);
        }
        unsigned value = shares[w++] + 1;
        unsigned spare = 2 * threshold - 1 - remaining;
        remaining -= value - 1;
        after_zero = value == 1;
        if (value >= threshold)
            value += spare;
        put(out, value, bits - (value < spare));
        while (remaining < threshold) {
            bits--;
            threshold >>= 1;
        }
    }
}

/* Returns the bytes read, or 0. */
static size_t read_shares(const uint8_t *data, size_t size, unsigned shares[WEIGHTS], unsigned *log)
{
    size_t position = 0, end = 8 * size;
    unsigned w = 0;
    int after_zero = 0;
#define PEEK(n)                                                                                              \
    ({                                                                                                       \
        unsigned value_ = 0;                                                                                 \
        for (unsigned bit_ = 0; bit_ < (n) && position + bit_ < end; bit_++)                                 \
            value_ |= (unsigned)(data[(position + bit_) / 8] >> ((position + bit_) % 8) & 1) << bit_;        \
        value_;                                                                                              \
    })
    memset(shares, 0, WEIGHTS * sizeof *shares);
    *log = PEEK(4) + MIN_LOG;
    position = 4;
    if (*log > MAX_LOG)
        return 0;
    unsigned threshold = 1u << *log, remaining = threshold + 1, bits = *log + 1;
    while (remaining > 1) {
        if (after_zero) {
            unsigned zeros;
            do {
                zeros = PEEK(2);
                position += 2;
                w += zeros;
            } while (zeros == 3 && w < WEIGHTS);
        }
        if (w >= WEIGHTS || position >= end)
            return 0;
        unsigned spare = 2 * threshold - 1 - remaining;
        unsigned value = PEEK(bits), low = value & (threshold - 1);
        if (low < spare) {
            value = low;
            position += bits - 1;
        } else {
            if (value >= threshold)
                value -= spare;
            position += bits;
        }
        /* 0 stands for a share below one, which is written nowhere here: such a frame is left to the library. */
        if (!value || value - 1 > remaining - 1)
            return 0;
        shares[w++] = value - 1;
        remaining -= value - 1;
        after_zero = value == 1;
        while (remaining < threshold) {
            bits--;
            threshold >>= 1;
        }
    }
#undef PEEK
    return position <= end ? (position + 7) / 8 : 0;
}

static void spread(const unsigned shares[WEIGHTS], unsigned log, uint8_t places[1 << MAX_LOG])
{
    unsigned size = 1u << log, step = (size >> 1) + (size >> 3) + 3, position = 0;
    for (unsigned w = 0; w < WEIGHTS; w++)
        for (unsigned i = 0; i < shares[w]; i++) {
            places[position] = (uint8_t)w;
            position = (position + step) & (size - 1);
        }
}

typedef struct {
    uint16_t states[1 << MAX_LOG];
    uint32_t bits_delta[WEIGHTS];
    int32_t state_delta[WEIGHTS];
} encoding_table;

static void build_encoding(encoding_table *table, const unsigned shares[WEIGHTS], unsigned log)
{
    uint8_t places[1 << MAX_LOG];
    unsigned size = 1u << log, starts[WEIGHTS], total = 0;
    spread(shares, log, places);
    for (unsigned w = 0; w < WEIGHTS; w++) {
        starts[w] = total;
        if (shares[w] == 1) {
            table->bits_delta[w] = (log << 16) - size;
        } else if (shares[w]) {
            unsigned bits = log - highest_bit(shares[w] - 1);
            table->bits_delta[w] = (bits << 16) - (shares[w] << bits);
        }
        table->state_delta[w] = (int32_t)total - (int32_t)shares[w];
        total += shares[w];
    }
    for (unsigned place = 0; place < size; place++)
        table->states[starts[places[place]]++] = (uint16_t)(size + place);
}

static uint32_t first_state(const encoding_table *table, unsigned weight)
{
    unsigned bits = (table->bits_delta[weight] + (1u << 15)) >> 16;
    uint32_t value = (bits << 16) - table->bits_delta[weight];
    return table->states[(int32_t)(value >> bits) + table->state_delta[weight]];
}

size_t weights_encode(const uint8_t *weights, unsigned count, uint8_t *out)
{
    unsigned counts[WEIGHTS] = {0}, shares[WEIGHTS], kinds = 0;
    for (unsigned i = 0; i < count; i++)
        counts[weights[i]]++;
    for (unsigned w = 0; w < WEIGHTS; w++)
        kinds += counts[w] > 0;
    if (count < 3 || kinds < 2)
        return 0;
    unsigned log = count > 64 ? MAX_LOG : MIN_LOG;
    bit_writer writer = {0, 0, out};
    encoding_table table;
    normalize(counts, count, log, shares);
    write_shares(&writer, shares, log);
    put_rest(&writer);
    build_encoding(&table, shares, log);

    /* Weights of even numbers belong to the first state, odd ones to the second; the last is coded first. */
    bit_writer bits = {0, 0, writer.to};
    uint32_t states[2];
    states[(count - 1) & 1] = first_state(&table, weights[count - 1]);
    states[(count - 2) & 1] = first_state(&table, weights[count - 2]);
    for (unsigned i = count - 2; i-- > 0;) {
        uint32_t *state = &states[i & 1];
        unsigned weight = weights[i], moved = (*state + table.bits_delta[weight]) >> 16;
        put(&bits, *state, moved);
        *state = table.states[(int32_t)(*state >> moved) + table.state_delta[weight]];
    }
    put(&bits, states[1], log);
    put(&bits, states[0], log);
    put(&bits, 1, 1);
    put_rest(&bits);
    return (size_t)(bits.to - out);
}

typedef struct {
    uint8_t weight, bits;
    uint16_t base;
} decoding_entry;

static void build_decoding(decoding_entry table[1 << MAX_LOG], const unsigned shares[WEIGHTS], unsigned log)
{
    uint8_t places[1 << MAX_LOG];
    unsigned size = 1u << log, next[WEIGHTS];
    spread(shares, log, places);
    memcpy(next, shares, sizeof next);
    for (unsigned place = 0; place < size; place++) {
        unsigned weight = places[place], state = next[weight]++;
        unsigned bits = log - highest_bit(state);
        table[place] = (decoding_entry){(uint8_t)weight, (uint8_t)bits, (uint16_t)((state << bits) - size)};
    }
}

/* Sixteen bits of a stream from a position on; those before its beginning are zero, none lie behind its end. */
static unsigned window_at(const uint8_t *stream, size_t size, int64_t position)
{
    if (position < 0)
        return position > -8 ? (unsigned)stream[0] << -position : 0;
    size_t byte = (size_t)position / 8;
    return (stream[byte] | (byte + 1 < size ? (unsigned)stream[byte + 1] << 8 : 0)) >> position % 8;
}

unsigned weights_decode(const uint8_t *data, size_t size, uint8_t weights[256])
{
    unsigned shares[WEIGHTS], log;
    size_t head = read_shares(data, size, shares, &log);
    if (!head || head >= size || !data[size - 1])
        return 0;
    decoding_entry table[1 << MAX_LOG];
    build_decoding(table, shares, log);
    const uint8_t *stream = data + head;
    /* Bits are read from the end of the stream, below the mark that is its highest bit. */
    int64_t left = 8 * (int64_t)(size - head) - 8 + highest_bit(data[size - 1]);
    unsigned states[2], count = 0;
#define TAKE(n)                                                                                              \
    ({                                                                                                       \
        unsigned bits_ = (n);                                                                                \
        unsigned value_ = bits_ ? window_at(stream, size - head, left - bits_) & ((1u << bits_) - 1) : 0;    \
        left -= bits_;                                                                                       \
        value_;                                                                                              \
    })
    if (left < 2 * (int64_t)log)
        return 0;
    states[0] = TAKE(log);
    states[1] = TAKE(log);
    for (unsigned turn = 0;; turn ^= 1) {
        decoding_entry entry = table[states[turn]];
        if (count >= 254)
            return 0;
        weights[count++] = entry.weight;
        states[turn] = entry.base + TAKE(entry.bits);
        if (left < 0) {
            weights[count++] = table[states[turn ^ 1]].weight;
            return count;
        }
    }
#undef TAKE
}
