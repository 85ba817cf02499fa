/* Quick looks at data, for the choice of a coding. */
#ifndef GPUIMG_KERNEL_LOOKS_H
#define GPUIMG_KERNEL_LOOKS_H

#include "common.h"

/* The share of positions, from 0 to 1, whose next six bytes stood in the data before, as far as is remembered. */
double share_of_repeats(const uint8_t *data, size_t size);

/* Whether bytes are as evenly spread as random ones (chi-square). */
int looks_random(const uint8_t *data, size_t size);

#endif
