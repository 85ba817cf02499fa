#include "elements.h"

/* Elements that are transformed at a time; they and their planes stay in the nearest cache. */
enum { RUN = 1024 };

VECTORS
static void join_halves(uint16_t *RESTRICT to, const uint8_t *const planes[], size_t start, size_t count)
{
    const uint8_t *RESTRICT low = planes[0] + start, *RESTRICT high = planes[1] + start;
    for (size_t i = 0; i < count; i++)
        to[i] = (uint16_t)(low[i] | high[i] << 8);
}

VECTORS
static void join_words(uint32_t *RESTRICT to, const uint8_t *const planes[], size_t start, size_t count)
{
    const uint8_t *RESTRICT a = planes[0] + start, *RESTRICT b = planes[1] + start;
    const uint8_t *RESTRICT c = planes[2] + start, *RESTRICT d = planes[3] + start;
    for (size_t i = 0; i < count; i++)
        to[i] = a[i] | (uint32_t)b[i] << 8 | (uint32_t)c[i] << 16 | (uint32_t)d[i] << 24;
}

#define DEFINE(NAME, TYPE, SIGNED)                                                                           \
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
    VECTORS static void NAME##_take(const TYPE *RESTRICT from, size_t count, unsigned shift,                 \
                                    uint8_t *RESTRICT plane)                                                 \
    {                                                                                                        \
        for (size_t i = 0; i < count; i++)                                                                   \
            plane[i] = (uint8_t)(from[i] >> shift);                                                          \
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
    }                                                                                                        \
                                                                                                             \
    static void NAME##_merge(const uint8_t *const planes[], const uint8_t *base, size_t count,               \
                             unsigned transform, uint8_t *data)                                              \
    {                                                                                                        \
        TYPE run[RUN];                                                                                       \
        for (size_t start = 0; start < count; start += RUN) {                                                \
            size_t length = count - start < RUN ? count - start : RUN;                                       \
            if (sizeof(TYPE) == 4)                                                                           \
                join_words((uint32_t *)(void *)run, planes, start, length);                                  \
            else if (sizeof(TYPE) == 2)                                                                      \
                join_halves((uint16_t *)(void *)run, planes, start, length);                                 \
            else                                                                                             \
                for (unsigned p = 0; p < sizeof(TYPE); p++)                                                  \
                    NAME##_give(run, length, 8 * p, planes[p] + start);                                      \
            NAME##_back(run, base ? (const NAME##_loose *)base + start : NULL, length, transform,            \
                        (NAME##_loose *)data + start);                                                       \
        }                                                                                                    \
    }

DEFINE(bytes, uint8_t, int8_t)
DEFINE(halves, uint16_t, int16_t)
DEFINE(words, uint32_t, int32_t)
DEFINE(doubles, uint64_t, int64_t)

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
        halves_merge(planes, base, count, transform, data);
        break;
    case 4:
        words_merge(planes, base, count, transform, data);
        break;
    default:
        doubles_merge(planes, base, count, transform, data);
    }
}
