/* Huffman trees as RFC 8878 describes them: code lengths of at most 11 bits, kept as weights. */
#ifndef GPUIMG_KERNEL_TREE_H
#define GPUIMG_KERNEL_TREE_H

#include "common.h"

enum { MAX_CODE_BITS = 11, MAX_TREE_DESCRIPTION = 160 };

typedef struct {
    uint8_t weights[256]; /* 0: the symbol does not occur; else its code has bits + 1 - weight bits */
    unsigned symbols;     /* one more than the greatest symbol that occurs */
    unsigned bits;        /* the longest code */
} tree;

/* The tree of the counts, of which at least two are not zero. */
void tree_build(tree *made, const uint32_t counts[256]);

/* The tree's description; returns its length, or 0 if it cannot be described. */
size_t tree_write(const tree *from, uint8_t out[MAX_TREE_DESCRIPTION]);

/* Reads a description; returns its length, or 0 if it is none. */
size_t tree_read(tree *to, const uint8_t *data, size_t size);

#endif
