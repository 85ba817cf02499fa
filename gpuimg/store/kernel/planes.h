/* The payload of codec 3, "float planes" (docs/store-format.md). */
#ifndef GPUIMG_KERNEL_PLANES_H
#define GPUIMG_KERNEL_PLANES_H

#include "elements.h"

/* The longest payload of a chunk of `size` bytes while it is being made. */
size_t planes_bound(size_t size, unsigned width);

/*
 * Encodes a chunk; `out` has room for planes_bound(size, width), `scratch` for planes_scratch(size) bytes. Returns
 * the payload's length, or 0 if it is not smaller than the chunk.
 */
size_t planes_encode(const uint8_t *data, const uint8_t *base, size_t size, unsigned width, unsigned transform,
                     uint8_t *scratch, uint8_t *out);

size_t planes_scratch(size_t size);

/*
 * Decodes a payload into exactly `size` bytes. Returns 0 if it is damaged or holds a frame that only the
 * Zstandard library can read; `data` may have been written to then.
 */
int planes_decode(const uint8_t *payload, size_t length, const uint8_t *base, unsigned width, uint8_t *scratch,
                  uint8_t *data, size_t size);

/* What planes_encode would make of a chunk of which `data` is a sample: an estimate, in bytes. */
double planes_estimate(const uint8_t *data, const uint8_t *base, size_t size, unsigned width, unsigned transform,
                       uint8_t *scratch);

#endif
