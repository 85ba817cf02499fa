#include "looks.h"

#include "huffman.h"

enum { TABLE_BITS = 13 };

double share_of_repeats(const uint8_t *data, size_t size)
{
    const uint64_t six_bytes = 0xFFFFFFFFFFFFull;
    uint64_t seen[1 << TABLE_BITS];
    size_t found = 0;
    if (size < 8)
        return 0;
    /* No word of six bytes has the top bits set, so nothing matches an empty slot. */
    memset(seen, 0xFF, sizeof seen);
    for (size_t i = 0; i + 8 <= size; i++) {
        uint64_t word = load64(data + i) & six_bytes;
        uint64_t *slot = &seen[word * 0x9E3779B97F4A7C15ull >> (64 - TABLE_BITS)];
        found += *slot == word;
        *slot = word;
    }
    return (double)found / (double)(size - 7);
}

/* Chi-square of 256 classes: 255 is expected of random bytes, and 400 is six deviations above. */
enum { RANDOM = 400 };

int looks_random(const uint8_t *data, size_t size)
{
    uint32_t counts[256];
    uint64_t squares = 0;
    if (!size)
        return 0;
    count_bytes(data, size, counts);
    for (unsigned v = 0; v < 256; v++)
        squares += (uint64_t)counts[v] * counts[v];
    return (double)squares * 256 / (double)size - (double)size < RANDOM;
}
