/*
 * The weights of a Huffman tree, entropy-coded as RFC 8878 section 4.2.1.2 says: finite state entropy (FSE) with
 * two interleaved states.
 */
#ifndef GPUIMG_KERNEL_WEIGHTS_H
#define GPUIMG_KERNEL_WEIGHTS_H

#include "common.h"

/* Encodes `count` weights (0 to 11) into `out` (at least 150 bytes); 0 if they are not fit for it. */
size_t weights_encode(const uint8_t *weights, unsigned count, uint8_t *out);

/* Decodes into `weights` (255 at most); returns their number, or 0 if the data are damaged. */
unsigned weights_decode(const uint8_t *data, size_t size, uint8_t weights[256]);

#endif
