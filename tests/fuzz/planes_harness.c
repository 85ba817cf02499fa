/*
 * Feeds the kernel of float planes damaged payloads and hostile chunks; built with the address and undefined-behaviour
 * sanitizers by test_planes_fuzz.py, and linked with --wrap for the functions that say which vectors there are.
 *
 *     planes_harness CORPUS SECONDS
 *
 * CORPUS is a run of records: element size, length n, 1 if there is a base, transform, payload length, what the
 * kernel must do with the payload (0 decode or refuse it, 1 decode it, 2 refuse it; u32 each), then n bytes of the
 * chunk, n of the base if there is one, and the payload. With an element size of 0 the payload is a zstd frame of the n bytes. Every buffer has exactly
 * the length it is said to have, so that the sanitizer sees one byte too many. The mutations are the same in every
 * run; SECONDS says how many of them are tried.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "huffman.h"
#include "planes.h"

int __real_vector_available(void);
int __wrap_vector_available(void);
int __real_vector_sparse_available(void);
int __wrap_vector_sparse_available(void);

static int vectors = 1;

int __wrap_vector_available(void)
{
    return vectors && __real_vector_available();
}

int __wrap_vector_sparse_available(void)
{
    return vectors && __real_vector_sparse_available();
}

enum { EITHER, DECODE, REFUSE };

typedef struct {
    uint32_t width, size, has_base, transform, length, duty;
    uint8_t *data, *base, *payload;
} record;

static uint64_t state = 0x9E3779B97F4A7C15ull;

static uint32_t any(uint32_t below)
{
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return below ? (uint32_t)((state >> 32) % below) : 0;
}

static void fail(const char *what, unsigned number)
{
    fprintf(stderr, "record %u: %s\n", number, what);
    exit(1);
}

static uint8_t *copy_of(const uint8_t *data, size_t size)
{
    uint8_t *copy = malloc(size);
    if (!copy)
        fail("no memory", 0);
    memcpy(copy, data, size);
    return copy;
}

static uint8_t *read_bytes(FILE *from, size_t size)
{
    uint8_t *data = malloc(size);
    if (!data || fread(data, 1, size, from) != size)
        fail("the corpus is cut short", 0);
    return data;
}

static unsigned read_corpus(const char *path, record *records, unsigned room)
{
    FILE *from = fopen(path, "rb");
    unsigned count = 0;
    if (!from)
        fail("the corpus cannot be read", 0);
    for (; count < room; count++) {
        record *one = &records[count];
        if (fread(one, sizeof(uint32_t), 6, from) != 6)
            break;
        one->data = read_bytes(from, one->size);
        one->base = one->has_base ? read_bytes(from, one->size) : NULL;
        one->payload = read_bytes(from, one->length);
    }
    fclose(from);
    return count;
}

/* Decodes a payload, or a frame, into a buffer of exactly `size` bytes, which the caller frees; NULL: refused. */
static uint8_t *decoded(const uint8_t *payload, size_t length, const uint8_t *base, unsigned width, size_t size)
{
    uint8_t *scratch = malloc(planes_scratch(size)), *data = malloc(size);
    int good = width ? planes_decode(payload, length, base, width, scratch, data, size)
                     : huffman_decode(payload, length, data, size) == HUFFMAN_DECODED;
    free(scratch);
    if (good)
        return data;
    free(data);
    return NULL;
}

/* Encodes with and without vectors; both must say the same and decode to what went in. */
static void check_encoding(const record *one, unsigned transform, unsigned number)
{
    const uint8_t *base = transform >= DIFFERENCE ? one->base : NULL;
    size_t bound = planes_bound(one->size, one->width), lengths[2];
    uint8_t *payloads[2];
    for (vectors = 0; vectors < 2; vectors++) {
        uint8_t *scratch = malloc(planes_scratch(one->size)), *out = malloc(bound);
        size_t length = planes_encode(one->data, base, one->size, one->width, transform, scratch, out);
        double estimate = planes_estimate(one->data, base, one->size, one->width, transform, scratch);
        if (!(estimate >= 0 && estimate <= 2.0 * one->size + 128))
            fail("a senseless estimate", number);
        payloads[vectors] = copy_of(out, length);
        lengths[vectors] = length;
        free(scratch);
        free(out);
    }
    if (lengths[0] != lengths[1] || memcmp(payloads[0], payloads[1], lengths[0]))
        fail("vectors and plain loops differ", number);
    for (vectors = 0; vectors < 2 && lengths[0]; vectors++) {
        uint8_t *back = decoded(payloads[0], lengths[0], base, one->width, one->size);
        if (!back || memcmp(back, one->data, one->size))
            fail("what was encoded is not what is decoded", number);
        free(back);
    }
    vectors = 1;
    free(payloads[0]);
    free(payloads[1]);
}

/* A place in a payload, most often near the beginning of a frame or of the payload, where the structure is. */
static size_t place(const record *one)
{
    if (any(4) == 0)
        return any(one->length);
    uint32_t start = any(one->length), reach = 4 + 8 * one->width + 64;
    for (uint32_t i = start; any(8) && i + 4 <= one->length; i++)
        if (load32(one->payload + i) == 0xFD2FB528u) {
            start = i;
            return start + any(one->length - start < 200 ? one->length - start : 200);
        }
    return any(one->length < reach ? one->length : reach);
}

/* What is damaged is refused or decoded, with vectors and without, and then to the same. */
static void try_decoding(const uint8_t *payload, size_t length, const uint8_t *base, unsigned width, size_t size)
{
    uint8_t *results[2];
    for (vectors = 0; vectors < 2; vectors++)
        results[vectors] = decoded(payload, length, base, width, size);
    vectors = 1;
    if (!results[0] != !results[1] || (results[0] && memcmp(results[0], results[1], size)))
        fail("vectors and plain loops decode differently", 0);
    free(results[0]);
    free(results[1]);
}

static void try_payload(const record *one)
{
    uint32_t length = one->length, size = one->size;
    if (any(16) == 0)
        length = any(length + 1);
    else if (any(16) == 0 && length > 8)
        length -= 1 + any(8);
    if (any(16) == 0)
        size = any(2 * size + 2);
    uint8_t *payload = copy_of(one->payload, length), *base = NULL;
    for (uint32_t flips = length ? any(4) + (length == one->length) : 0; flips > 0; flips--) {
        size_t at = place(one) % length;
        payload[at] = any(2) ? (uint8_t)any(256) : (uint8_t)(payload[at] ^ 1u << any(8));
    }
    if (one->has_base) {
        base = calloc(1, size);
        memcpy(base, one->base, size < one->size ? size : one->size);
    }
    try_decoding(payload, length, base, one->width, size);
    free(base);
    free(payload);
}

enum { LONGEST_LITERALS = 70 * 1024, ROOM_OF_A_BLOCK = 64 * 1024 };

/* The description of a tree: good ones of two to twelve symbols, or anything; returns its length. */
static size_t make_tree(uint8_t *out)
{
    static const uint8_t good[4][8] = {
        {2, 128, 0x10},
        {2, 129, 0x11},
        {3, 130, 0x11, 0x10},
        {7, 138, 0x11, 0x23, 0x45, 0x67, 0x89, 0xA0},
    };
    unsigned pick = any(6);
    if (pick < 4) {
        memcpy(out, good[pick] + 1, good[pick][0]);
        return good[pick][0];
    }
    size_t length = 1 + any(60);
    for (size_t i = 0; i < length; i++)
        out[i] = (uint8_t)any(256);
    return length;
}

/* A block of `size` literals whose heads are right; the streams are noise, too short, too long or about right. */
static size_t make_block(uint8_t *out, uint32_t size, int with_tree, int last)
{
    uint8_t *body = out + 8, *jumps = body + (with_tree ? make_tree(body) : 0), *to = jumps + 6;
    for (unsigned s = 0; s < 4; s++) {
        uint32_t length = any(4) ? size / 32 * (1 + any(3)) + any(9) : any(24);
        for (uint32_t i = 0; i < length; i++)
            to[i] = (uint8_t)any(256);
        uint32_t jump = any(16) ? length : any(0x10000);
        if (s < 3)
            memcpy(jumps + 2 * s, &jump, 2);
        to += length;
    }
    uint64_t coded = (uint64_t)(to - body);
    if (any(16) == 0) {
        coded = any(any(2) && coded > 40 ? 40 : (uint32_t)coded + 1);
        to = body + coded;
    }
    uint64_t head = (with_tree ? 2 : 3) | 3u << 2 | (uint64_t)size << 4 | coded << 22;
    uint32_t block_head = (uint32_t)last | 2u << 1 | (uint32_t)(coded + 6) << 3;
    memcpy(out, &block_head, 3);
    memcpy(out + 3, &head, 5);
    *to++ = 0;
    return (size_t)(to - out);
}

/* A frame of one or two coded blocks of which only the lengths are right. */
static void try_frame(void)
{
    uint32_t most = any(2) ? 3000 : LONGEST_LITERALS - 512;
    uint32_t first = 512 + any(most), second = any(2) ? 512 + any(most) : 0, size = first + second;
    uint8_t *room = malloc(2 * ROOM_OF_A_BLOCK), *to = room + 9;
    static const uint8_t head[5] = {0x28, 0xB5, 0x2F, 0xFD, 0xA0};
    memcpy(room, head, sizeof head);
    size += any(16) ? 0 : any(600);
    memcpy(room + 5, &size, 4);
    to += make_block(to, first, 1, !second && any(16));
    if (second)
        to += make_block(to, second, 0, !!any(16));
    size_t length = (size_t)(to - room);
    uint8_t *frame = copy_of(room, length);
    try_decoding(frame, length, NULL, 0, size);
    free(frame);
    free(room);
}

/* A chunk with runs put in: equal bytes, few kinds, random bytes, zeros here and there. */
static void try_chunk(const record *one, unsigned number)
{
    record changed = *one;
    changed.size = any(8) ? one->size : any(one->size + 1);
    changed.data = copy_of(one->data, changed.size);
    changed.base = one->has_base ? copy_of(one->base, changed.size) : NULL;
    for (uint32_t runs = any(4); runs > 0 && changed.size; runs--) {
        uint32_t start = any(changed.size), kinds = 1u << any(9), first = any(256), often = any(8);
        uint32_t length = any((changed.size - start < 8192 ? changed.size - start : 8192) + 1);
        for (uint32_t i = 0; i < length; i++)
            changed.data[start + i] = any(often + 1) ? 0 : (uint8_t)(first + any(kinds));
    }
    check_encoding(&changed, changed.has_base ? DIFFERENCE + any(2) : PLAIN + any(2), number);
    free(changed.data);
    free(changed.base);
}

static double now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

int main(int arguments, char **values)
{
    static record records[1024];
    if (arguments != 3)
        fail("usage: planes_harness CORPUS SECONDS", 0);
    unsigned count = read_corpus(values[1], records, sizeof records / sizeof *records), tried = 0;
    if (!count)
        fail("the corpus is empty", 0);
    for (unsigned i = 0; i < count; i++) {
        const record *one = &records[i];
        uint8_t *back = decoded(one->payload, one->length, one->base, one->width, one->size);
        if ((!back && one->duty == DECODE) || (back && one->duty != REFUSE && memcmp(back, one->data, one->size)))
            fail("the payload is not decoded to the chunk", i);
        if (back && one->duty == REFUSE)
            fail("damage is not noticed", i);
        free(back);
        if (one->width && one->duty != REFUSE)
            check_encoding(one, one->transform, i);
    }
    for (double end = now() + atof(values[2]); now() < end; tried++) {
        unsigned i = any(count);
        if (tried % 4 == 1)
            try_frame();
        else if (tried % 8 || !records[i].width)
            try_payload(&records[i]);
        else
            try_chunk(&records[i], i);
    }
    for (unsigned i = 0; i < count; i++) {
        free(records[i].data);
        free(records[i].base);
        free(records[i].payload);
    }
    printf("%u records, %u mutations\n", count, tried);
    return 0;
}
