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

/* Encodes from the end towards `data` in runs of 64 bytes. The codes' bytes lie within a range of 128. */
void vector_encode(const code_table *codes, const uint8_t *data, partial_stream *stream);

#endif
