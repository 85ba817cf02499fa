/* Where page images are cut (docs/store-format.md, "Recipe", layout PAGES). */
#ifndef GPUIMG_KERNEL_PAGES_H
#define GPUIMG_KERNEL_PAGES_H

#include "common.h"

enum { PAGE = 4096, MIN_PAGES = 16, MAX_PAGES = 256 };

typedef struct {
    size_t offset, length;
    int zero;
} cut;

int is_zero(const uint8_t *data, size_t size);

/* The most cuts that pages_cut makes of a buffer. */
size_t pages_most_cuts(size_t size);

/*
 * Cuts a buffer of whole pages and, at the file's end (`last`), part of one. `inside` says whether the buffer
 * before ended inside a long zero run, and is set for the next. Returns the number of cuts; what they cover,
 * from the start on, goes to `covered`. `scratch` has room for size / PAGE + 1 marks.
 */
size_t pages_cut(const uint8_t *data, size_t size, int last, int *inside, uint8_t *scratch, cut *cuts,
                 size_t *covered);

#endif
