#include "planes.h"

#include <math.h>

#include "huffman.h"
#include "vector.h"

enum { HEAD = 4, ENTRY = 8, LISTS_HEAD = 8 + 2 * ENTRY, LONGEST_GAP = 255, SAMPLE = 4096 };
enum { MODE_RAW, MODE_CONSTANT, MODE_ZSTD, MODE_SPARSE, MODE_MASKED };

/* A plane coded to more than this part of itself stays raw: reading it then costs nothing. */
static const double WORTHWHILE = 0.95;
/* From this share of zeros on, a mask of them beats a code for each, and is quicker to read. */
static const double MASKED_ZEROS = 0.5;
/* From this share on, listing the gaps between what is not zero beats the mask. */
static const double SPARSE_ZEROS = 0.9;

size_t planes_scratch(size_t size)
{
    /* Planes, and the lists of one sparse plane, which may be longer than it by the long gaps. */
    return 4 * size + 4096;
}

size_t planes_bound(size_t size, unsigned width)
{
    return HEAD + ENTRY * width + 2 * size + huffman_bound(size) + 4096;
}

static void write_entry(uint8_t *entry, unsigned mode, size_t length)
{
    store32(entry, mode);
    store32(entry + 4, (uint32_t)length);
}

static int is_constant(const uint8_t *data, size_t size)
{
    return data[0] == data[size - 1] && !memcmp(data, data + 1, size - 1);
}

/* Shannon's entropy of the counts, in bits for each. */
static double entropy(const uint32_t counts[256], size_t total)
{
    double sum = 0;
    for (unsigned v = 0; v < 256; v++)
        if (counts[v])
            sum -= counts[v] * log2((double)counts[v] / (double)total);
    return total ? sum / (double)total : 0;
}

typedef struct {
    double ratio; /* coded / plain, as far as entropy tells */
    double zeros; /* share of zero bytes */
} glance;

/* Counts up to SAMPLE bytes out of 16 places of a plane. */
static glance look(const uint8_t *data, size_t size)
{
    uint32_t counts[256];
    size_t total = size;
    if (size <= SAMPLE) {
        count_bytes(data, size, counts);
    } else {
        uint8_t sample[SAMPLE];
        const size_t piece = SAMPLE / 16;
        for (size_t i = 0; i < 16; i++)
            memcpy(sample + i * piece, data + (size - piece) / 15 * i, piece);
        total = SAMPLE;
        count_bytes(sample, total, counts);
    }
    double bits = entropy(counts, total);
    double zeros = (double)counts[0] / (double)total;
    unsigned kinds = 0, most = 0;
    for (unsigned v = 0; v < 256; v++) {
        kinds += counts[v] > 0;
        most = counts[v] > most ? counts[v] : most;
    }
    /* Few samples of many kinds look less random than they are (Miller and Madow's correction). */
    bits += (kinds - 1) / (2 * 0.6931471805599453 * (double)total);
    /* The most frequent byte takes a whole bit, however little it says. */
    double share = (double)most / (double)total;
    if (zeros < MASKED_ZEROS && share > 0.5 && kinds > 1)
        bits += 1 + share * log2(share) + (1 - share) * log2(1 - share);
    return (glance){bits < 8 ? bits / 8 : 1, zeros};
}

/* One plane or list as constant, frame or raw; returns its length. */
static size_t encode_list(const uint8_t *data, size_t size, uint8_t *entry, uint8_t *out)
{
    if (size > 1 && is_constant(data, size)) {
        out[0] = data[0];
        write_entry(entry, MODE_CONSTANT, 1);
        return 1;
    }
    size_t coded = size && look(data, size).ratio < WORTHWHILE ? huffman_encode(data, size, out) : 0;
    if (coded && (double)coded < WORTHWHILE * (double)size) {
        write_entry(entry, MODE_ZSTD, coded);
        return coded;
    }
    memcpy(out, data, size);
    write_entry(entry, MODE_RAW, size);
    return size;
}

/* The lists of a sparse plane: the zeros before each other byte, and these bytes. Returns the gaps' length. */
static size_t list_sparse(const uint8_t *data, size_t size, uint8_t *gaps, uint8_t *values, size_t *count)
{
    sparse_lists lists = {0, 0, 0};
    size_t begun = vector_sparse_available() ? vector_list_sparse(data, size, gaps, values, &lists) : 0;
    uint8_t *gap = gaps + lists.gaps, *value = values + lists.values;
    size_t zeros = lists.zeros;
    for (size_t start = begun; start < size; start += 8) {
        uint64_t word = 0;
        if (size - start >= 8)
            word = load64(data + start);
        else
            memcpy(&word, data + start, size - start);
        size_t position = 0;
        while (word) {
            unsigned skip = (unsigned)__builtin_ctzll(word) / 8;
            zeros += skip;
            for (; zeros >= LONGEST_GAP; zeros -= LONGEST_GAP)
                *gap++ = LONGEST_GAP;
            *gap++ = (uint8_t)zeros;
            *value++ = (uint8_t)(word >> (8 * skip));
            zeros = 0;
            position += skip + 1;
            word = skip == 7 ? 0 : word >> (8 * skip + 8);
        }
        zeros += 8 - position;
    }
    *count = (size_t)(value - values);
    return (size_t)(gap - gaps);
}

/* Two lists behind a head that tells their lengths; returns the length of all. */
static size_t encode_lists(const uint8_t *first, size_t first_size, const uint8_t *second, size_t second_size,
                           uint8_t *out)
{
    uint8_t *to = out + LISTS_HEAD;
    to += encode_list(first, first_size, out + 8, to);
    to += encode_list(second, second_size, out + 8 + ENTRY, to);
    return (size_t)(to - out);
}

static size_t encode_sparse(const uint8_t *data, size_t size, uint8_t *scratch, uint8_t *entry, uint8_t *out)
{
    uint8_t *values = scratch, *gaps = scratch + size + 64;
    size_t count, gap_bytes = list_sparse(data, size, gaps, values, &count);
    store32(out, (uint32_t)count);
    store32(out + 4, (uint32_t)gap_bytes);
    size_t length = encode_lists(gaps, gap_bytes, values, count, out);
    write_entry(entry, MODE_SPARSE, length);
    return length;
}

/* The mask of the bytes that are not zero, and these bytes; returns their number. */
static size_t list_masked(const uint8_t *data, size_t size, uint8_t *mask, uint8_t *values)
{
    size_t count = 0;
    size_t done = vector_sparse_available() ? vector_mask(data, size, mask, values, &count) : 0;
    memset(mask + done / 8, 0, (size + 7) / 8 - done / 8);
    for (size_t i = done; i < size; i++)
        if (data[i]) {
            mask[i / 8] |= (uint8_t)(1u << i % 8);
            values[count++] = data[i];
        }
    return count;
}

static size_t encode_masked(const uint8_t *data, size_t size, uint8_t *scratch, uint8_t *entry, uint8_t *out)
{
    uint8_t *values = scratch, *mask = scratch + size + 64;
    size_t count = list_masked(data, size, mask, values);
    store32(out, (uint32_t)count);
    store32(out + 4, 0);
    size_t length = encode_lists(mask, (size + 7) / 8, values, count, out);
    write_entry(entry, MODE_MASKED, length);
    return length;
}

static size_t encode_plane(const uint8_t *data, size_t size, uint8_t *scratch, uint8_t *entry, uint8_t *out)
{
    if (is_constant(data, size))
        return encode_list(data, size, entry, out);
    double zeros = look(data, size).zeros;
    if (zeros >= MASKED_ZEROS) {
        size_t length = zeros >= SPARSE_ZEROS ? encode_sparse(data, size, scratch, entry, out)
                                              : encode_masked(data, size, scratch, entry, out);
        if (length < size)
            return length;
    }
    return encode_list(data, size, entry, out);
}

static void place_planes(uint8_t *scratch, size_t count, unsigned width, uint8_t *planes[8])
{
    for (unsigned p = 0; p < width; p++)
        planes[p] = scratch + p * count;
}

/* Whether a plane is to stay raw, from a few elements out of 16 places; before it has been split off. */
static void foresee_raw(const uint8_t *data, const uint8_t *base, size_t count, unsigned width, unsigned transform,
                        int raw[8])
{
    enum { PLACES = 16, PIECE = 256 };
    uint8_t samples[8][PLACES * PIECE];
    memset(raw, 0, 8 * sizeof *raw);
    if (count < 4 * PLACES * PIECE)
        return;
    for (size_t i = 0; i < PLACES; i++) {
        uint8_t *places[8];
        size_t start = (count - PIECE) / (PLACES - 1) * i;
        for (unsigned p = 0; p < width; p++)
            places[p] = samples[p] + i * PIECE;
        elements_split(data + start * width, base ? base + start * width : NULL, PIECE, width, transform, places);
    }
    for (unsigned p = 0; p < width; p++)
        raw[p] = look(samples[p], sizeof samples[p]).ratio >= WORTHWHILE;
}

size_t planes_encode(const uint8_t *data, const uint8_t *base, size_t size, unsigned width, unsigned transform,
                     uint8_t *scratch, uint8_t *out)
{
    size_t count = size / width, tail = size % width;
    uint8_t *planes[8] = {0}, *to = out + HEAD + ENTRY * width;
    int raw[8];
    if (!count)
        return 0;
    foresee_raw(data, base, count, width, transform, raw);
    place_planes(scratch, count, width, planes);
    /* The first planes, as long as they stay raw, are split off to where they belong. */
    for (unsigned p = 0; p < width && raw[p]; p++)
        planes[p] = to + p * count;
    elements_split(data, base, count, width, transform, planes);
    out[0] = (uint8_t)transform;
    out[1] = (uint8_t)width;
    out[2] = out[3] = 0;
    for (unsigned p = 0; p < width; p++) {
        uint8_t *entry = out + HEAD + ENTRY * p;
        if (raw[p]) {
            if (planes[p] != to)
                memcpy(to, planes[p], count);
            write_entry(entry, MODE_RAW, count);
            to += count;
        } else {
            to += encode_plane(planes[p], count, scratch + size, entry, to);
        }
        if ((size_t)(to - out) >= size)
            return 0;
    }
    memcpy(to, data + size - tail, tail);
    to += tail;
    return (size_t)(to - out) < size ? (size_t)(to - out) : 0;
}

/* Decodes a list into `to`, or points to it where it lies; NULL if it is damaged or foreign. */
static const uint8_t *decode_list(const uint8_t *entry, const uint8_t *data, size_t length, uint8_t *to,
                                  size_t size)
{
    switch (load32(entry)) {
    case MODE_RAW:
        return length == size ? data : NULL;
    case MODE_CONSTANT:
        if (length != 1)
            return NULL;
        memset(to, data[0], size);
        return to;
    case MODE_ZSTD:
        return huffman_decode(data, length, to, size) == HUFFMAN_DECODED ? to : NULL;
    default:
        return NULL;
    }
}

static const uint8_t *decode_sparse(const uint8_t *data, size_t length, uint8_t *scratch, uint8_t *to,
                                    size_t size)
{
    if (length < LISTS_HEAD)
        return NULL;
    size_t count = load32(data), gap_bytes = load32(data + 4);
    size_t first = load32(data + 12), second = load32(data + 8 + ENTRY + 4);
    if (count > size || gap_bytes < count || gap_bytes - count > size / LONGEST_GAP ||
        length - LISTS_HEAD != first + second)
        return NULL;
    const uint8_t *lists = data + LISTS_HEAD;
    const uint8_t *gaps = decode_list(data + 8, lists, first, scratch, gap_bytes);
    const uint8_t *values = decode_list(data + 8 + ENTRY, lists + first, second, scratch + gap_bytes + 64, count);
    if (!gaps || !values)
        return NULL;
    memset(to, 0, size);
    size_t position = 0, taken = 0;
    for (size_t i = 0; i < gap_bytes; i++) {
        position += gaps[i];
        if (gaps[i] == LONGEST_GAP)
            continue;
        if (position >= size || taken >= count)
            return NULL;
        to[position++] = values[taken++];
    }
    return taken == count ? to : NULL;
}

static size_t count_bits(const uint8_t *data, size_t size)
{
    size_t count = 0, i = 0;
    for (; i + 8 <= size; i += 8)
        count += (size_t)__builtin_popcountll(load64(data + i));
    for (; i < size; i++)
        count += (size_t)__builtin_popcount(data[i]);
    return count;
}

static const uint8_t *decode_masked(const uint8_t *data, size_t length, uint8_t *scratch, uint8_t *to, size_t size)
{
    if (length < LISTS_HEAD)
        return NULL;
    size_t count = load32(data), mask_size = (size + 7) / 8;
    size_t first = load32(data + 12), second = load32(data + 8 + ENTRY + 4);
    if (count > size || load32(data + 4) || length - LISTS_HEAD != first + second)
        return NULL;
    const uint8_t *lists = data + LISTS_HEAD;
    const uint8_t *mask = decode_list(data + 8, lists, first, scratch, mask_size);
    uint8_t *room = scratch + mask_size + 64;
    const uint8_t *values = decode_list(data + 8 + ENTRY, lists + first, second, room, count);
    if (!mask || !values || count_bits(mask, mask_size) != count || (size % 8 && mask[size / 8] >> size % 8))
        return NULL;
    size_t taken = 0;
    size_t done = vector_sparse_available() ? vector_unmask(mask, values, count, to, size, &taken) : 0;
    for (size_t i = done; i < size; i++)
        to[i] = mask[i / 8] >> i % 8 & 1 ? values[taken++] : 0;
    return to;
}

int planes_decode(const uint8_t *payload, size_t length, const uint8_t *base, unsigned width, uint8_t *scratch,
                  uint8_t *data, size_t size)
{
    size_t count = size / width, tail = size % width, head = HEAD + ENTRY * width;
    if (length < head || !count || payload[0] >= TRANSFORMS || payload[1] != width || payload[2] || payload[3])
        return 0;
    unsigned transform = payload[0];
    if ((transform >= DIFFERENCE) != (base != NULL))
        return 0;
    const uint8_t *from = payload + head, *end = payload + length, *planes[8];
    uint8_t *places[8];
    place_planes(scratch, count, width, places);
    for (unsigned p = 0; p < width; p++) {
        const uint8_t *entry = payload + HEAD + ENTRY * p;
        size_t stored = load32(entry + 4);
        if ((size_t)(end - from) < stored)
            return 0;
        unsigned mode = load32(entry);
        planes[p] = mode == MODE_SPARSE   ? decode_sparse(from, stored, scratch + size, places[p], count)
                    : mode == MODE_MASKED ? decode_masked(from, stored, scratch + size, places[p], count)
                                          : decode_list(entry, from, stored, places[p], count);
        if (!planes[p])
            return 0;
        from += stored;
    }
    if ((size_t)(end - from) != tail)
        return 0;
    elements_merge(planes, base, count, width, transform, data);
    memcpy(data + size - tail, from, tail);
    return 1;
}

double planes_estimate(const uint8_t *data, const uint8_t *base, size_t size, unsigned width, unsigned transform,
                       uint8_t *scratch)
{
    size_t count = size / width;
    uint8_t *planes[8] = {0};
    double bytes = HEAD + ENTRY * width + (double)(size % width);
    if (!count)
        return (double)size;
    place_planes(scratch, count, width, planes);
    elements_split(data, base, count, width, transform, planes);
    for (unsigned p = 0; p < width; p++) {
        double ratio = look(planes[p], count).ratio;
        bytes += (double)count * (ratio < WORTHWHILE ? ratio : 1);
    }
    return bytes;
}
