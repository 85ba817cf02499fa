/* Chunks as arrays of elements, and their byte planes: plane p holds byte p of every element, lowest first. */
#ifndef GPUIMG_KERNEL_ELEMENTS_H
#define GPUIMG_KERNEL_ELEMENTS_H

#include "common.h"

/* What is done to an element before it is divided into planes (docs/store-format.md, "Float planes"). */
enum { PLAIN, ROTATED, DIFFERENCE, EXCLUSIVE, TRANSFORMS };

/*
 * Divides `count` elements of `width` (1, 2, 4, 8) bytes into planes. `base` has as many elements, for the
 * transforms that need one.
 */
void elements_split(const uint8_t *data, const uint8_t *base, size_t count, unsigned width, unsigned transform,
                    uint8_t *const planes[]);

/* The inverse. */
void elements_merge(const uint8_t *const planes[], const uint8_t *base, size_t count, unsigned width,
                    unsigned transform, uint8_t *data);

#endif
