#include "tree.h"

#include "weights.h"

typedef struct {
    uint32_t count;
    uint16_t symbol;
} leaf;

/* Sorts ascending; there are few leaves and they are often nearly in order. */
static void sort_leaves(leaf *leaves, unsigned count)
{
    static const unsigned gaps[] = {57, 23, 10, 4, 1};
    for (unsigned g = 0; g < sizeof gaps / sizeof *gaps; g++) {
        unsigned gap = gaps[g];
        for (unsigned i = gap; i < count; i++) {
            leaf moved = leaves[i];
            unsigned j = i;
            for (; j >= gap && leaves[j - gap].count > moved.count; j -= gap)
                leaves[j] = leaves[j - gap];
            leaves[j] = moved;
        }
    }
}

/* Depths of the leaves (ascending counts) of an optimal tree, written over `depths`. */
static void optimal_depths(const leaf *leaves, unsigned count, uint8_t *depths)
{
    uint64_t sums[256];
    uint16_t parent[511];
    unsigned next_leaf = 0, next_node = 0;
    for (unsigned node = 0; node + 1 < count; node++) {
        uint64_t sum = 0;
        for (int side = 0; side < 2; side++) {
            if (next_leaf < count && (next_node >= node || leaves[next_leaf].count <= sums[next_node])) {
                parent[next_leaf] = (uint16_t)(count + node);
                sum += leaves[next_leaf++].count;
            } else {
                parent[count + next_node] = (uint16_t)(count + node);
                sum += sums[next_node++];
            }
        }
        sums[node] = sum;
    }
    uint8_t all[511];
    unsigned root = 2 * count - 2;
    all[root] = 0;
    for (unsigned node = root; node-- > 0;)
        all[node] = (uint8_t)(all[parent[node]] + 1);
    memcpy(depths, all, count);
}

/*
 * Depths of at most MAX_CODE_BITS: rare symbols count as ever less rare ones until the optimal tree is no deeper.
 * The result is complete like any optimal tree, and rarely more than a percent worse than the best of that depth.
 */
static void limited_depths(leaf *leaves, unsigned count, uint8_t *depths)
{
    uint64_t total = 0;
    optimal_depths(leaves, count, depths);
    for (unsigned i = 0; i < count; i++)
        total += leaves[i].count;
    /* The rarest symbol has the longest code. */
    for (uint32_t least = (uint32_t)(total >> (MAX_CODE_BITS + 2)) + 1; depths[0] > MAX_CODE_BITS;
         least += least / 4 + 1) {
        for (unsigned i = 0; i < count && leaves[i].count < least; i++)
            leaves[i].count = least;
        optimal_depths(leaves, count, depths);
    }
}

void tree_build(tree *made, const uint32_t counts[256])
{
    leaf leaves[256];
    uint8_t depths[256];
    unsigned count = 0;
    for (unsigned symbol = 0; symbol < 256; symbol++)
        if (counts[symbol])
            leaves[count++] = (leaf){counts[symbol], (uint16_t)symbol};
    sort_leaves(leaves, count);
    limited_depths(leaves, count, depths);
    made->bits = made->symbols = 0;
    for (unsigned i = 0; i < count; i++)
        if (depths[i] > made->bits)
            made->bits = depths[i];
    memset(made->weights, 0, sizeof made->weights);
    for (unsigned i = 0; i < count; i++) {
        made->weights[leaves[i].symbol] = (uint8_t)(made->bits + 1 - depths[i]);
        if (leaves[i].symbol >= made->symbols)
            made->symbols = leaves[i].symbol + 1u;
    }
}

size_t tree_write(const tree *from, uint8_t out[MAX_TREE_DESCRIPTION])
{
    /* The last symbol's weight is not written: it follows from the others. */
    unsigned count = from->symbols - 1;
    size_t coded = weights_encode(from->weights, count, out + 1);
    size_t direct = (count + 1) / 2;
    if (coded && coded < 128 && (count > 128 || coded < direct)) {
        out[0] = (uint8_t)coded;
        return 1 + coded;
    }
    if (count > 128)
        return 0;
    out[0] = (uint8_t)(127 + count);
    for (unsigned i = 0; i < count; i += 2) {
        unsigned second = i + 1 < count ? from->weights[i + 1] : 0;
        out[1 + i / 2] = (uint8_t)(from->weights[i] << 4 | second);
    }
    return 1 + direct;
}

size_t tree_read(tree *to, const uint8_t *data, size_t size)
{
    size_t length;
    unsigned count;
    memset(to->weights, 0, sizeof to->weights);
    if (size < 2)
        return 0;
    if (data[0] >= 128) {
        count = data[0] - 127u;
        length = 1 + (count + 1) / 2;
        if (length > size)
            return 0;
        for (unsigned i = 0; i < count; i++)
            to->weights[i] = i % 2 ? data[1 + i / 2] & 15 : data[1 + i / 2] >> 4;
    } else {
        length = 1u + data[0];
        if (length > size)
            return 0;
        count = weights_decode(data + 1, data[0], to->weights);
        if (!count)
            return 0;
    }
    uint32_t sum = 0;
    for (unsigned i = 0; i < count; i++) {
        if (to->weights[i] > MAX_CODE_BITS)
            return 0;
        sum += to->weights[i] ? 1u << (to->weights[i] - 1) : 0;
    }
    if (!sum)
        return 0;
    to->bits = highest_bit(sum) + 1;
    uint32_t left = (1u << to->bits) - sum;
    if (to->bits > MAX_CODE_BITS || (left & (left - 1)))
        return 0;
    to->weights[count] = (uint8_t)(highest_bit(left) + 1);
    to->symbols = count + 1;
    /* A complete tree has an even number of longest codes, so at least two. */
    unsigned longest = 0;
    for (unsigned i = 0; i <= count; i++)
        longest += to->weights[i] == 1;
    return longest >= 2 && longest % 2 == 0 ? length : 0;
}
