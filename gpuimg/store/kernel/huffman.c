#include "huffman.h"

#include "streams.h"
#include "tree.h"
#include "vector.h"

enum {
    MAGIC = 0xFD2FB528u,
    SEGMENT = 128 * 1024, /* the longest block of the format; here one block, or two with one tree */
    PAIRED = 16 * 1024,   /* from this length on a segment is two blocks: eight streams are read at once */
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
enum { WITH_TREE = 2, TREELESS = 3 };

size_t huffman_bound(size_t size)
{
    size_t blocks = 2 * (size / SEGMENT + 1);
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

static size_t write_literals_head(uint8_t *out, unsigned type, size_t size, size_t coded)
{
    /* Four streams; both sizes in 10, 14 or 18 bits. */
    unsigned form = size < 1024 ? 1 : size < 16384 ? 2 : 3, width = 6 + 4 * form;
    uint64_t head = type | form << 2 | (uint64_t)size << 4 | (uint64_t)coded << (4 + width);
    store64(out, head);
    return 2 + form;
}

/*
 * Encodes a block of literals, with the description of their tree (`used`) or, after a block that had it, without.
 * Returns the block's length, or 0 if it is not smaller than the literals.
 */
static size_t encode_block(const code_table *codes, const tree *used, const uint8_t *data, size_t size, uint8_t *out)
{
    uint8_t *body = out + LITERALS_HEAD, *to = body;
    if (used) {
        size_t described = tree_write(used, body);
        if (!described)
            return 0;
        to += described;
    }
    uint8_t *jumps = to;
    to += JUMPS;
    size_t part = (size + 3) / 4;
    for (unsigned s = 0; s < 4; s++) {
        size_t length = s < 3 ? part : size - 3 * part;
        size_t coded = stream_encode(codes, data + s * part, length, to);
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
    size_t head_size = write_literals_head(head, used ? WITH_TREE : TREELESS, size, coded);
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

/* Encodes a segment as one or two blocks with one tree; returns their length, or 0 if that gains nothing. */
static size_t encode_segment(const uint8_t *data, size_t size, int last, uint8_t *out)
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
    size_t first = size < PAIRED ? size : size / 2;
    uint8_t *to = out + BLOCK_HEAD;
    size_t coded = encode_block(&codes, &used, data, first, to);
    if (!coded)
        return 0;
    write_block_head(out, last && first == size, BLOCK_CODED, coded);
    to += coded;
    if (first < size) {
        uint8_t *head = to;
        coded = encode_block(&codes, NULL, data + first, size - first, head + BLOCK_HEAD);
        if (!coded)
            return 0;
        write_block_head(head, last, BLOCK_CODED, coded);
        to = head + BLOCK_HEAD + coded;
    }
    return (size_t)(to - out);
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
    for (size_t start = 0; start < size; start += SEGMENT) {
        size_t length = size - start < SEGMENT ? size - start : SEGMENT, coded;
        const uint8_t *segment = data + start;
        int last = start + length == size;
        if (is_repeated(segment, length)) {
            write_block_head(to, last, BLOCK_REPEATED, length);
            to[BLOCK_HEAD] = segment[0];
            to += BLOCK_HEAD + 1;
        } else if (length >= SMALLEST && (coded = encode_segment(segment, length, last, to))) {
            to += coded;
        } else {
            write_block_head(to, last, BLOCK_RAW, length);
            memcpy(to + BLOCK_HEAD, segment, length);
            to += BLOCK_HEAD + length;
        }
    }
    return (size_t)(to - out) < size ? (size_t)(to - out) : 0;
}

/* The head of a block, and what is known of its literals if it is a coded one. */
typedef struct {
    const uint8_t *content;
    size_t coded, size; /* lengths of the content, and of what it decodes to */
    unsigned type;
    int last;
    unsigned literals;      /* WITH_TREE or TREELESS */
    const uint8_t *streams; /* the four streams, one behind the other */
    size_t lengths[4];
} block;

/*
 * Parses the literals of a coded block, at most `most` of them, and the tree if it has one and `used` is not NULL:
 * then only a block without a tree will do.
 */
static int parse_literals(block *of, size_t most, tree *used)
{
    const uint8_t *data = of->content;
    if (of->coded < 8)
        return 0;
    unsigned form = data[0] >> 2 & 3, width = 6 + 4 * form;
    of->literals = data[0] & 3;
    if (of->literals < WITH_TREE || form == 0 || (of->literals == WITH_TREE && !used))
        return 0;
    uint64_t head = load64(data), mask = (1u << width) - 1;
    size_t head_size = 2 + form, body = head >> (4 + width) & mask, described = 0;
    of->size = head >> 4 & mask;
    if (of->size > most || of->size < SMALLEST / 2 || head_size + body + 1 != of->coded ||
        data[of->coded - 1] != NO_SEQUENCES)
        return 0;
    if (of->literals == WITH_TREE && !(described = tree_read(used, data + head_size, body)))
        return 0;
    if (body < described + JUMPS + 4)
        return 0;
    const uint8_t *jumps = data + head_size + described;
    size_t left = body - described - JUMPS;
    for (unsigned s = 0; s < 3; s++) {
        of->lengths[s] = jumps[2 * s] | (size_t)jumps[2 * s + 1] << 8;
        if (of->lengths[s] >= left)
            return 0;
        left -= of->lengths[s];
    }
    of->lengths[3] = left;
    of->streams = jumps + JUMPS;
    return 1;
}

/* Parses the block at `from`, which decodes to at most `most` bytes; returns what is behind it, or NULL. */
static const uint8_t *parse_block(const uint8_t *from, const uint8_t *end, size_t most, block *to, tree *used)
{
    if (end - from < BLOCK_HEAD)
        return NULL;
    uint32_t head = from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16;
    to->type = head >> 1 & 3;
    to->last = head & 1;
    to->coded = head >> 3;
    to->content = from + BLOCK_HEAD;
    size_t taken = to->type == BLOCK_REPEATED ? 1 : to->coded;
    if ((size_t)(end - to->content) < taken)
        return NULL;
    if (to->type == BLOCK_CODED)
        return parse_literals(to, most, used) ? to->content + taken : NULL;
    to->size = to->coded;
    return to->type <= BLOCK_REPEATED && to->size <= most ? to->content + taken : NULL;
}

huffman_result huffman_decode(const uint8_t *frame, size_t frame_size, uint8_t *out, size_t size)
{
    if (frame_size < FRAME_HEAD + BLOCK_HEAD || load32(frame) != MAGIC || frame[4] != (2 << 6 | 1 << 5) ||
        load32(frame + 5) != size)
        return HUFFMAN_FOREIGN;
    const uint8_t *from = frame + FRAME_HEAD, *end = frame + frame_size;
    size_t done = 0;
    tree used;
    decode_table table;
    block now = {0}, next;
    while (!now.last) {
        from = parse_block(from, end, size - done, &now, &used);
        if (!from)
            return HUFFMAN_FOREIGN;
        if (now.type == BLOCK_REPEATED) {
            memset(out + done, now.content[0], now.size);
        } else if (now.type == BLOCK_RAW) {
            memcpy(out + done, now.content, now.size);
        } else {
            /* A block without a tree comes right behind one that has it, or the frame is foreign. */
            if (now.literals != WITH_TREE)
                return HUFFMAN_FOREIGN;
            const uint8_t *behind = now.last ? NULL : parse_block(from, end, size - done - now.size, &next, NULL);
            int paired = behind && next.type == BLOCK_CODED && next.literals == TREELESS;
            decode_build(&table, &used, now.size + (paired ? next.size : 0));
            if (!streams_decode(&table, now.streams, now.lengths, out + done, now.size,
                                paired ? next.streams : NULL, next.lengths, paired ? next.size : 0))
                return HUFFMAN_FOREIGN;
            if (paired) {
                done += now.size;
                now = next;
                from = behind;
            }
        }
        done += now.size;
        if (now.last != (done == size))
            return HUFFMAN_FOREIGN;
    }
    return from == end ? HUFFMAN_DECODED : HUFFMAN_FOREIGN;
}
