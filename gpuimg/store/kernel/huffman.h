/*
 * Zstandard frames (RFC 8878) of nothing but Huffman-coded literals.
 *
 * An entropy coder for planes in which there is nothing to match: what it writes is read by any Zstandard
 * decoder. It reads back only frames of this kind; others are left to the library.
 */
#ifndef GPUIMG_KERNEL_HUFFMAN_H
#define GPUIMG_KERNEL_HUFFMAN_H

#include "common.h"

/* The longest a frame of `size` bytes may be before huffman_encode gives up. */
size_t huffman_bound(size_t size);

/* Counts the bytes of `data`. */
void count_bytes(const uint8_t *data, size_t size, uint32_t counts[256]);

/*
 * Encodes `size` bytes as one frame into `out`, which has room for huffman_bound(size) bytes.
 * Returns the frame's length, or 0 if it would not be smaller than `size`.
 */
size_t huffman_encode(const uint8_t *data, size_t size, uint8_t *out);

typedef enum {
    HUFFMAN_DECODED,
    HUFFMAN_FOREIGN, /* a frame of another kind, or damaged: the library decides */
} huffman_result;

/* Decodes one frame of exactly `frame_size` bytes into exactly `size` bytes. */
huffman_result huffman_decode(const uint8_t *frame, size_t frame_size, uint8_t *out, size_t size);

#endif
