/* The bit streams of Huffman-coded literals: written forwards from the last byte, read backwards from the end. */
#ifndef GPUIMG_KERNEL_STREAMS_H
#define GPUIMG_KERNEL_STREAMS_H

#include "tree.h"

typedef struct {
    uint16_t codes[256];
    uint8_t bits[256];
    uint8_t lowest, highest; /* the least and greatest byte that has a code */
} code_table;

void codes_build(code_table *codes, const tree *from);

/*
 * Encodes `size` bytes, at least one, as one stream; returns its length. May write, not leave, up to 64 bytes
 * behind the stream.
 */
size_t stream_encode(const code_table *codes, const uint8_t *data, size_t size, uint8_t *out);

/*
 * What the next MAX_CODE_BITS bits of a stream decode to: bits 0 to 7 how many bits are taken, bits 8
 * to 55 the bytes, the first lowest, bits 56 to 63 their number (1 to 6).
 */
typedef struct {
    uint64_t entries[1 << MAX_CODE_BITS];
    uint16_t single[1 << MAX_CODE_BITS]; /* the first byte alone, and from bit 8 on its code's bits */
    int has_entries;                     /* whether `entries` were made */
} decode_table;

/* Makes the table for streams that decode to `size` bytes. */
void decode_build(decode_table *table, const tree *from, size_t size);

/*
 * Decodes four streams of `lengths` bytes, one behind the other, into exactly `size` bytes, and four more (`other`,
 * or NULL) into the `other_size` bytes behind them: eight streams at once keep the processor busier than four.
 * Returns 0 if they are not exactly that.
 */
int streams_decode(const decode_table *table, const uint8_t *data, const size_t lengths[4], uint8_t *out,
                   size_t size, const uint8_t *other, const size_t other_lengths[4], size_t other_size);

#endif
