/* The inner loops in AVX-512, for processors that have it; they do bit for bit what the plain loops do. */
#ifndef GPUIMG_KERNEL_VECTOR_H
#define GPUIMG_KERNEL_VECTOR_H

#include "streams.h"

/* A stream of which the bytes from `end` on have been encoded; `count` bits are pending in `bits`. */
typedef struct {
    const uint8_t *end;
    uint8_t *to;
    uint64_t bits;
    unsigned count;
} partial_stream;

/* Whether the processor can run the functions below; they must not be called otherwise. */
int vector_available(void);

/* Sets to 1 the counts of bytes of `data` whose count is 0. */
void vector_note_absent(const uint8_t *data, size_t size, uint32_t counts[256]);

/* Encodes from the end towards `data` in runs of 64 bytes. */
void vector_encode(const code_table *codes, const uint8_t *data, partial_stream *stream);

/* How much of the lists of a sparse plane has been made, and the zeros since the last byte that is not zero. */
typedef struct {
    size_t gaps, values, zeros;
} sparse_lists;

int vector_sparse_available(void);

/*
 * Makes the mask of the bytes of `data` that are not zero, and lists these bytes, in runs of 64; returns how many
 * bytes that covers. May write up to 64 bytes behind the end of the values.
 */
size_t vector_mask(const uint8_t *data, size_t size, uint8_t *mask, uint8_t *values, size_t *count);

/* The inverse, as far as whole runs go: the mask has as many bits set as there are values. */
size_t vector_unmask(const uint8_t *mask, const uint8_t *values, size_t count, uint8_t *data, size_t size,
                     size_t *taken);

/*
 * Lists the bytes of `data` that are not zero and the gaps before them, in runs of 64; returns how many bytes
 * that covers. May write up to 64 bytes behind the end of either list.
 */
size_t vector_list_sparse(const uint8_t *data, size_t size, uint8_t *gaps, uint8_t *values, sparse_lists *lists);

#endif
