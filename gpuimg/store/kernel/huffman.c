#include "huffman.h"

#include "streams.h"
#include "tree.h"
#include "vector.h"

enum {
    MAGIC = 0xFD2FB528u,
    BLOCK = 128 * 1024,
    FRAME_HEAD = 9,   /* magic, descriptor, content size */
    BLOCK_HEAD = 3,
    LITERALS_HEAD = 5,
    JUMPS = 6,
    NO_SEQUENCES = 0,
    SMALLEST = 1024,  /* each of the four streams is longer than a word then */
    SAMPLE = 512,     /* bytes that are counted out of every SAMPLE_STRIDE */
    SAMPLE_STRIDE = 4096,
};
enum { BLOCK_RAW, BLOCK_REPEATED, BLOCK_CODED };

size_t huffman_bound(size_t size)
{
    size_t blocks = size / BLOCK + 1;
    return FRAME_HEAD + size + blocks * (BLOCK_HEAD + LITERALS_HEAD + JUMPS + MAX_TREE_DESCRIPTION + 64) + size / 2;
}

/* Counts into four tables in turn, so that equal neighbours do not wait for each other. */
static void count_into(uint32_t parts[4][256], const uint8_t *data, size_t size)
{
    size_t i = 0;
    for (; i + 8 <= size; i += 8) {
        uint64_t word = load64(data + i);
        parts[0][word & 255]++;
        parts[1][word >> 8 & 255]++;
        parts[2][word >> 16 & 255]++;
        parts[3][word >> 24 & 255]++;
        parts[0][word >> 32 & 255]++;
        parts[1][word >> 40 & 255]++;
        parts[2][word >> 48 & 255]++;
        parts[3][word >> 56]++;
    }
    for (; i < size; i++)
        parts[0][data[i]]++;
}

static void sum_counts(uint32_t parts[4][256], uint32_t counts[256])
{
    for (unsigned v = 0; v < 256; v++)
        counts[v] = parts[0][v] + parts[1][v] + parts[2][v] + parts[3][v];
}

void count_bytes(const uint8_t *data, size_t size, uint32_t counts[256])
{
    uint32_t parts[4][256];
    memset(parts, 0, sizeof parts);
    count_into(parts, data, size);
    sum_counts(parts, counts);
}

static void note_absent(const uint8_t *data, size_t size, uint32_t counts[256])
{
    uint8_t seen[256] = {0};
    for (size_t i = 0; i < size; i++)
        seen[data[i]] = 1;
    for (unsigned v = 0; v < 256; v++)
        counts[v] += seen[v] && !counts[v];
}

/*
 * What the tree is made for: the counts of a quarter of the data, and 1 for every byte that occurs elsewhere
 * only. The tree is as good as that of all counts, for a third of the time.
 */
static void sample_counts(const uint8_t *data, size_t size, uint32_t counts[256])
{
    if (size < 4 * SAMPLE_STRIDE) {
        count_bytes(data, size, counts);
        return;
    }
    uint32_t parts[4][256];
    memset(parts, 0, sizeof parts);
    for (size_t start = 0; start + SAMPLE <= size; start += SAMPLE_STRIDE)
        count_into(parts, data + start, SAMPLE);
    sum_counts(parts, counts);
    if (vector_available())
        vector_note_absent(data, size, counts);
    else
        note_absent(data, size, counts);
}

static size_t write_literals_head(uint8_t *out, size_t size, size_t coded)
{
    /* Type 2 (compressed, with a tree) and four streams; both sizes in 10, 14 or 18 bits. */
    unsigned form = size < 1024 ? 1 : size < 16384 ? 2 : 3, width = 6 + 4 * form;
    uint64_t head = 2 | form << 2 | (uint64_t)size << 4 | (uint64_t)coded << (4 + width);
    store64(out, head);
    return 2 + form;
}

/* Encodes one block's literals behind its head; returns the block's length, or 0 if that gains nothing. */
static size_t encode_block(const uint8_t *data, size_t size, uint8_t *out)
{
    uint32_t counts[256];
    unsigned kinds = 0;
    sample_counts(data, size, counts);
    for (unsigned v = 0; v < 256; v++)
        kinds += counts[v] > 0;
    if (kinds < 2)
        return 0;
    tree used;
    code_table codes;
    tree_build(&used, counts);
    codes_build(&codes, &used);

    uint8_t *body = out + LITERALS_HEAD;
    size_t described = tree_write(&used, body);
    if (!described)
        return 0;
    uint8_t *jumps = body + described, *to = jumps + JUMPS;
    size_t part = (size + 3) / 4;
    for (unsigned s = 0; s < 4; s++) {
        size_t length = s < 3 ? part : size - 3 * part;
        size_t coded = stream_encode(&codes, data + s * part, length, to);
        if (s < 3) {
            jumps[2 * s] = (uint8_t)coded;
            jumps[2 * s + 1] = (uint8_t)(coded >> 8);
        }
        to += coded;
        if ((size_t)(to - out) >= size)
            return 0;
    }
    size_t coded = (size_t)(to - body);
    uint8_t head[8];
    size_t head_size = write_literals_head(head, size, coded);
    memmove(out + head_size, body, coded);
    memcpy(out, head, head_size);
    out[head_size + coded] = NO_SEQUENCES;
    size_t whole = head_size + coded + 1;
    return whole < size ? whole : 0;
}

static int is_repeated(const uint8_t *data, size_t size)
{
    return size < 2 || (data[0] == data[1] && !memcmp(data, data + 1, size - 1));
}

static void write_block_head(uint8_t *out, int last, unsigned type, size_t size)
{
    uint32_t head = (uint32_t)last | type << 1 | (uint32_t)size << 3;
    out[0] = (uint8_t)head;
    out[1] = (uint8_t)(head >> 8);
    out[2] = (uint8_t)(head >> 16);
}

size_t huffman_encode(const uint8_t *data, size_t size, uint8_t *out)
{
    if (size < SMALLEST || size > UINT32_MAX)
        return 0;
    uint8_t *to = out;
    store32(to, MAGIC);
    to[4] = 2 << 6 | 1 << 5; /* a content size of 4 bytes, a single segment */
    store32(to + 5, (uint32_t)size);
    to += FRAME_HEAD;
    for (size_t start = 0; start < size; start += BLOCK) {
        size_t length = size - start < BLOCK ? size - start : BLOCK, coded;
        const uint8_t *block = data + start;
        int last = start + length == size;
        if (is_repeated(block, length)) {
            write_block_head(to, last, BLOCK_REPEATED, length);
            to[BLOCK_HEAD] = block[0];
            to += BLOCK_HEAD + 1;
        } else if (length >= SMALLEST && (coded = encode_block(block, length, to + BLOCK_HEAD))) {
            write_block_head(to, last, BLOCK_CODED, coded);
            to += BLOCK_HEAD + coded;
        } else {
            write_block_head(to, last, BLOCK_RAW, length);
            memcpy(to + BLOCK_HEAD, block, length);
            to += BLOCK_HEAD + length;
        }
    }
    return (size_t)(to - out) < size ? (size_t)(to - out) : 0;
}

/* Decodes a block's literals; `coded` bytes are exactly one block. */
static int decode_block(const uint8_t *data, size_t coded, uint8_t *out, size_t size)
{
    if (coded < 8)
        return 0;
    unsigned form = data[0] >> 2 & 3, width = 6 + 4 * form;
    if ((data[0] & 3) != 2 || form == 0)
        return 0;
    uint64_t head = load64(data), mask = (1u << width) - 1;
    size_t head_size = 2 + form, literals = head >> 4 & mask, body = head >> (4 + width) & mask;
    if (literals != size || size < SMALLEST || head_size + body + 1 != coded || data[coded - 1] != NO_SEQUENCES)
        return 0;
    tree used;
    decode_table table;
    size_t described = tree_read(&used, data + head_size, body);
    if (!described || body < described + JUMPS + 4)
        return 0;
    const uint8_t *jumps = data + head_size + described;
    size_t lengths[4], left = body - described - JUMPS;
    for (unsigned s = 0; s < 3; s++) {
        lengths[s] = jumps[2 * s] | (size_t)jumps[2 * s + 1] << 8;
        if (lengths[s] >= left)
            return 0;
        left -= lengths[s];
    }
    lengths[3] = left;
    decode_build(&table, &used);
    return streams_decode(&table, jumps + JUMPS, lengths, out, size);
}

huffman_result huffman_decode(const uint8_t *frame, size_t frame_size, uint8_t *out, size_t size)
{
    if (frame_size < FRAME_HEAD + BLOCK_HEAD || load32(frame) != MAGIC || frame[4] != (2 << 6 | 1 << 5) ||
        load32(frame + 5) != size)
        return HUFFMAN_FOREIGN;
    const uint8_t *from = frame + FRAME_HEAD, *end = frame + frame_size;
    size_t done = 0;
    for (int last = 0; !last;) {
        if (end - from < BLOCK_HEAD)
            return HUFFMAN_FOREIGN;
        uint32_t head = from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16;
        size_t coded = head >> 3, length = size - done < BLOCK ? size - done : BLOCK;
        unsigned type = head >> 1 & 3;
        last = head & 1;
        from += BLOCK_HEAD;
        size_t taken = type == BLOCK_REPEATED ? 1 : coded;
        if ((size_t)(end - from) < taken || (type != BLOCK_CODED && coded != length))
            return HUFFMAN_FOREIGN;
        if (type == BLOCK_REPEATED)
            memset(out + done, from[0], length);
        else if (type == BLOCK_RAW)
            memcpy(out + done, from, length);
        else if (type != BLOCK_CODED || !decode_block(from, coded, out + done, length))
            return HUFFMAN_FOREIGN;
        from += taken;
        done += length;
        if (last != (done == size))
            return HUFFMAN_FOREIGN;
    }
    return from == end ? HUFFMAN_DECODED : HUFFMAN_FOREIGN;
}
