#include "elements.h"

/* Elements that are transformed at a time; they and their planes stay in the nearest cache. */
enum { RUN = 1024 };

/*
 * Elements of two and four bytes, the common ones, are merged in one pass: `JOIN` makes an element of its bytes, and
 * what the transform did is undone at once.
 */
#define DEFINE_JOIN(NAME, TYPE, LOOSE, JOIN)                                                                 \
    typedef TYPE LOOSE __attribute__((aligned(1), may_alias));                                               \
    VECTORS static void NAME(const uint8_t *const planes[], const LOOSE *RESTRICT base, size_t count,        \
                             unsigned transform, LOOSE *RESTRICT data)                                       \
    {                                                                                                        \
        const unsigned top = 8 * sizeof(TYPE) - 1;                                                           \
        const uint8_t *RESTRICT a = planes[0], *RESTRICT b = planes[1];                                      \
        const uint8_t *RESTRICT c = planes[sizeof(TYPE) - 2], *RESTRICT d = planes[sizeof(TYPE) - 1];        \
        switch (transform) {                                                                                 \
        case PLAIN:                                                                                          \
            for (size_t i = 0; i < count; i++)                                                               \
                data[i] = (TYPE)(JOIN);                                                                      \
            break;                                                                                           \
        case ROTATED:                                                                                        \
            for (size_t i = 0; i < count; i++) {                                                             \
                TYPE from = (TYPE)(JOIN);                                                                    \
                data[i] = (TYPE)(from >> 1 | from << top);                                                   \
            }                                                                                                \
            break;                                                                                           \
        case DIFFERENCE:                                                                                     \
            for (size_t i = 0; i < count; i++) {                                                             \
                TYPE from = (TYPE)(JOIN);                                                                    \
                data[i] = (TYPE)(base[i] + (TYPE)(from >> 1 ^ (TYPE)(0 - (from & 1))));                      \
            }                                                                                                \
            break;                                                                                           \
        default:                                                                                             \
            for (size_t i = 0; i < count; i++)                                                               \
                data[i] = (TYPE)(JOIN) ^ base[i];                                                            \
        }                                                                                                    \
        (void)a, (void)b, (void)c, (void)d;                                                                  \
    }

DEFINE_JOIN(join_halves, uint16_t, loose_half, a[i] | d[i] << 8)
DEFINE_JOIN(join_words, uint32_t, loose_word,
            a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24)

#define DEFINE_SPLIT(NAME, TYPE, SIGNED)                                                                           \
    typedef TYPE NAME##_loose __attribute__((aligned(1), may_alias));                                        \
                                                                                                             \
    VECTORS static void NAME##_forward(const NAME##_loose *RESTRICT data, const NAME##_loose *RESTRICT base,  \
                                       size_t count, unsigned transform, TYPE *RESTRICT to)                  \
    {                                                                                                        \
        const unsigned top = 8 * sizeof(TYPE) - 1;                                                           \
        switch (transform) {                                                                                 \
        case PLAIN:                                                                                          \
            for (size_t i = 0; i < count; i++)                                                               \
                to[i] = data[i];                                                                             \
            break;                                                                                           \
        case ROTATED:                                                                                        \
            for (size_t i = 0; i < count; i++)                                                               \
                to[i] = (TYPE)(data[i] << 1 | data[i] >> top);                                               \
            break;                                                                                           \
        case DIFFERENCE:                                                                                     \
            for (size_t i = 0; i < count; i++) {                                                             \
                TYPE change = (TYPE)(data[i] - base[i]);                                                     \
                to[i] = (TYPE)((TYPE)(change << 1) ^ (TYPE)((SIGNED)change >> top));                         \
            }                                                                                                \
            break;                                                                                           \
        default:                                                                                             \
            for (size_t i = 0; i < count; i++)                                                               \
                to[i] = data[i] ^ base[i];                                                                   \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    VECTORS static void NAME##_take(const TYPE *RESTRICT from, size_t count, unsigned shift,                 \
                                    uint8_t *RESTRICT plane)                                                 \
    {                                                                                                        \
        for (size_t i = 0; i < count; i++)                                                                   \
            plane[i] = (uint8_t)(from[i] >> shift);                                                          \
    }                                                                                                        \
                                                                                                             \
    static void NAME##_split(const uint8_t *data, const uint8_t *base, size_t count, unsigned transform,     \
                             uint8_t *const planes[])                                                        \
    {                                                                                                        \
        TYPE run[RUN];                                                                                       \
        for (size_t start = 0; start < count; start += RUN) {                                                \
            size_t length = count - start < RUN ? count - start : RUN;                                       \
            NAME##_forward((const NAME##_loose *)data + start,                                               \
                           base ? (const NAME##_loose *)base + start : NULL, length, transform, run);        \
            for (unsigned p = 0; p < sizeof(TYPE); p++)                                                      \
                NAME##_take(run, length, 8 * p, planes[p] + start);                                          \
        }                                                                                                    \
    }

/* Elements of one and eight bytes are merged plane by plane. */
#define DEFINE_MERGE(NAME, TYPE)                                                                             \
    VECTORS static void NAME##_back(const TYPE *RESTRICT from, const NAME##_loose *RESTRICT base,            \
                                    size_t count, unsigned transform, NAME##_loose *RESTRICT data)           \
    {                                                                                                        \
        const unsigned top = 8 * sizeof(TYPE) - 1;                                                           \
        switch (transform) {                                                                                 \
        case PLAIN:                                                                                          \
            for (size_t i = 0; i < count; i++)                                                               \
                data[i] = from[i];                                                                           \
            break;                                                                                           \
        case ROTATED:                                                                                        \
            for (size_t i = 0; i < count; i++)                                                               \
                data[i] = (TYPE)(from[i] >> 1 | from[i] << top);                                             \
            break;                                                                                           \
        case DIFFERENCE:                                                                                     \
            for (size_t i = 0; i < count; i++)                                                               \
                data[i] = (TYPE)(base[i] + (TYPE)(from[i] >> 1 ^ (TYPE)(0 - (from[i] & 1))));                \
            break;                                                                                           \
        default:                                                                                             \
            for (size_t i = 0; i < count; i++)                                                               \
                data[i] = from[i] ^ base[i];                                                                 \
        }                                                                                                    \
    }                                                                                                        \
                                                                                                             \
    VECTORS static void NAME##_give(TYPE *RESTRICT to, size_t count, unsigned shift,                         \
                                    const uint8_t *RESTRICT plane)                                           \
    {                                                                                                        \
        if (shift == 0)                                                                                      \
            for (size_t i = 0; i < count; i++)                                                               \
                to[i] = plane[i];                                                                            \
        else                                                                                                 \
            for (size_t i = 0; i < count; i++)                                                               \
                to[i] = (TYPE)(to[i] | (TYPE)plane[i] << shift);                                             \
    }                                                                                                        \
                                                                                                             \
    static void NAME##_merge(const uint8_t *const planes[], const uint8_t *base, size_t count,               \
                             unsigned transform, uint8_t *data)                                              \
    {                                                                                                        \
        TYPE run[RUN];                                                                                       \
        for (size_t start = 0; start < count; start += RUN) {                                                \
            size_t length = count - start < RUN ? count - start : RUN;                                       \
            for (unsigned p = 0; p < sizeof(TYPE); p++)                                                      \
                NAME##_give(run, length, 8 * p, planes[p] + start);                                          \
            NAME##_back(run, base ? (const NAME##_loose *)base + start : NULL, length, transform,            \
                        (NAME##_loose *)data + start);                                                       \
        }                                                                                                    \
    }

DEFINE_SPLIT(bytes, uint8_t, int8_t)
DEFINE_SPLIT(halves, uint16_t, int16_t)
DEFINE_SPLIT(words, uint32_t, int32_t)
DEFINE_SPLIT(doubles, uint64_t, int64_t)
DEFINE_MERGE(bytes, uint8_t)
DEFINE_MERGE(doubles, uint64_t)

void elements_split(const uint8_t *data, const uint8_t *base, size_t count, unsigned width, unsigned transform,
                    uint8_t *const planes[])
{
    switch (width) {
    case 1:
        bytes_split(data, base, count, transform, planes);
        break;
    case 2:
        halves_split(data, base, count, transform, planes);
        break;
    case 4:
        words_split(data, base, count, transform, planes);
        break;
    default:
        doubles_split(data, base, count, transform, planes);
    }
}

void elements_merge(const uint8_t *const planes[], const uint8_t *base, size_t count, unsigned width,
                    unsigned transform, uint8_t *data)
{
    switch (width) {
    case 1:
        bytes_merge(planes, base, count, transform, data);
        break;
    case 2:
        join_halves(planes, (const loose_half *)base, count, transform, (loose_half *)data);
        break;
    case 4:
        join_words(planes, (const loose_word *)base, count, transform, (loose_word *)data);
        break;
    default:
        doubles_merge(planes, base, count, transform, data);
    }
}
