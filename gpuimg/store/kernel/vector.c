#include "vector.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,bmi,bmi2")))

#define AVX512_COMPRESS                                                                                      \
    __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512vbmi,avx512vbmi2,bmi,bmi2,popcnt")))

int vector_available(void)
{
    static int known = -1;
    if (known < 0)
        known = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("bmi2");
    return known;
}

AVX512
void vector_note_absent(const uint8_t *data, size_t size, uint32_t counts[256])
{
    uint8_t seen[256];
    for (unsigned v = 0; v < 256; v++)
        seen[v] = counts[v] ? 255 : 0;
    __m512i tables[4];
    for (unsigned t = 0; t < 4; t++)
        tables[t] = _mm512_loadu_si512(seen + 64 * t);
    for (size_t i = 0; i < size; i += 64) {
        __mmask64 present = size - i >= 64 ? ~0ull : (1ull << (size - i)) - 1;
        __m512i bytes = _mm512_maskz_loadu_epi8(present, data + i);
        __m512i low = _mm512_permutex2var_epi8(tables[0], bytes, tables[1]);
        __m512i high = _mm512_permutex2var_epi8(tables[2], bytes, tables[3]);
        __m512i found = _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes), low, high);
        __mmask64 absent = _mm512_mask_testn_epi8_mask(present, found, found);
        if (!absent)
            continue;
        for (; absent; absent &= absent - 1) {
            uint8_t v = data[i + (unsigned)__builtin_ctzll(absent)];
            counts[v] = 1;
            seen[v] = 255;
        }
        for (unsigned t = 0; t < 4; t++)
            tables[t] = _mm512_loadu_si512(seen + 64 * t);
    }
}

#define APPEND(value, length)                                                                                \
    do {                                                                                                     \
        bits |= (value) << count;                                                                            \
        count += (unsigned)(length);                                                                         \
        store64(to, bits);                                                                                   \
        to += count >> 3;                                                                                    \
        bits >>= count & 56;                                                                                 \
        count &= 7;                                                                                          \
    } while (0)

/* The rows of a table of 128 or, if it is wide, 256 bytes, and a look-up of 64 bytes in it. */
typedef struct {
    __m512i rows[4];
} byte_table;

AVX512
static inline byte_table table_load(const uint8_t bytes[256])
{
    byte_table table;
    for (unsigned row = 0; row < 4; row++)
        table.rows[row] = _mm512_loadu_si512(bytes + 64 * row);
    return table;
}

AVX512
static inline __m512i table_look(const byte_table *table, __m512i at, int wide)
{
    __m512i low = _mm512_permutex2var_epi8(table->rows[0], at, table->rows[1]);
    if (!wide)
        return low;
    __m512i high = _mm512_permutex2var_epi8(table->rows[2], at, table->rows[3]);
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(at), low, high);
}

AVX512
static inline __attribute__((always_inline)) void encode_run(const code_table *codes, const uint8_t *data,
                                                             partial_stream *stream, unsigned lowest, int wide)
{
    uint8_t tables[3][256];
    for (unsigned i = 0; i < 256; i++) {
        uint8_t v = (uint8_t)(lowest + i);
        tables[0][i] = (uint8_t)codes->codes[v];
        tables[1][i] = (uint8_t)(codes->codes[v] >> 8);
        tables[2][i] = codes->bits[v];
    }
    const byte_table low_table = table_load(tables[0]), high_table = table_load(tables[1]);
    const byte_table length_table = table_load(tables[2]);
    const __m512i offset = _mm512_set1_epi8((char)lowest), low8 = _mm512_set1_epi16(0xFF);
    const __m512i low16 = _mm512_set1_epi32(0xFFFF), low32 = _mm512_set1_epi64(0xFFFFFFFF);
    const __m512i most = _mm512_set1_epi64(56);
    const uint8_t *end = stream->end;
    uint8_t *to = stream->to;
    uint64_t bits = stream->bits;
    unsigned count = stream->count;
    for (; end - data >= 64; end -= 64) {
        __m512i at = _mm512_sub_epi8(_mm512_loadu_si512(end - 64), offset);
        __m512i code_low = table_look(&low_table, at, wide);
        __m512i code_high = table_look(&high_table, at, wide);
        __m512i length = table_look(&length_table, at, wide);

        /* Codes of the even and of the odd bytes, in lanes of 16 bits. */
        __m512i even = _mm512_or_si512(_mm512_and_si512(code_low, low8), _mm512_slli_epi16(code_high, 8));
        __m512i odd = _mm512_or_si512(_mm512_srli_epi16(code_low, 8), _mm512_andnot_si512(low8, code_high));
        __m512i even_length = _mm512_and_si512(length, low8), odd_length = _mm512_srli_epi16(length, 8);
        __m512i pair_length = _mm512_add_epi16(even_length, odd_length);

        /* Pairs, in lanes of 32 bits: the earlier one of a lane and the later one. The later byte goes below. */
        __m512i early = _mm512_or_si512(
            _mm512_and_si512(odd, low16),
            _mm512_sllv_epi32(_mm512_and_si512(even, low16), _mm512_and_si512(odd_length, low16)));
        __m512i late = _mm512_or_si512(
            _mm512_srli_epi32(odd, 16),
            _mm512_sllv_epi32(_mm512_srli_epi32(even, 16), _mm512_srli_epi32(odd_length, 16)));
        __m512i early_length = _mm512_and_si512(pair_length, low16);
        __m512i late_length = _mm512_srli_epi32(pair_length, 16);
        __m512i four_length = _mm512_add_epi32(early_length, late_length);

        /* Fours, in lanes of 64 bits. */
        __m512i first = _mm512_or_si512(
            _mm512_and_si512(late, low32),
            _mm512_sllv_epi64(_mm512_and_si512(early, low32), _mm512_and_si512(late_length, low32)));
        __m512i second = _mm512_or_si512(
            _mm512_srli_epi64(late, 32),
            _mm512_sllv_epi64(_mm512_srli_epi64(early, 32), _mm512_srli_epi64(late_length, 32)));
        __m512i first_length = _mm512_and_si512(four_length, low32);
        __m512i second_length = _mm512_srli_epi64(four_length, 32);
        __m512i eight_length = _mm512_add_epi64(first_length, second_length);

        /* Eights, and sixteens in every second lane where they fit into a word beside seven pending bits. */
        __m512i eight = _mm512_or_si512(second, _mm512_sllv_epi64(first, second_length));
        __m512i next = _mm512_unpackhi_epi64(eight, eight);
        __m512i next_length = _mm512_unpackhi_epi64(eight_length, eight_length);
        __m512i sixteen_length = _mm512_add_epi64(eight_length, next_length);

        uint64_t values[8], lengths[8];
        if (!_mm512_mask_cmpgt_epi64_mask(0x55, sixteen_length, most)) {
            _mm512_storeu_si512(values, _mm512_or_si512(next, _mm512_sllv_epi64(eight, next_length)));
            _mm512_storeu_si512(lengths, sixteen_length);
            for (int lane = 6; lane >= 0; lane -= 2)
                APPEND(values[lane], lengths[lane]);
        } else if (!_mm512_cmpgt_epi64_mask(eight_length, most)) {
            _mm512_storeu_si512(values, eight);
            _mm512_storeu_si512(lengths, eight_length);
            for (int lane = 7; lane >= 0; lane--)
                APPEND(values[lane], lengths[lane]);
        } else {
            uint64_t first_values[8], first_lengths[8];
            _mm512_storeu_si512(values, second);
            _mm512_storeu_si512(lengths, second_length);
            _mm512_storeu_si512(first_values, first);
            _mm512_storeu_si512(first_lengths, first_length);
            for (int lane = 7; lane >= 0; lane--) {
                APPEND(values[lane], lengths[lane]);
                APPEND(first_values[lane], first_lengths[lane]);
            }
        }
    }
    *stream = (partial_stream){end, to, bits, count};
}

AVX512
void vector_encode(const code_table *codes, const uint8_t *data, partial_stream *stream)
{
    if (codes->highest - codes->lowest < 128)
        encode_run(codes, data, stream, codes->lowest, 0);
    else
        encode_run(codes, data, stream, 0, 1);
}

AVX512_COMPRESS
size_t vector_mask(const uint8_t *data, size_t size, uint8_t *mask, uint8_t *values, size_t *count)
{
    uint8_t *value = values;
    size_t done = 0;
    for (; size - done >= 64; done += 64) {
        __m512i bytes = _mm512_loadu_si512(data + done);
        __mmask64 there = _mm512_test_epi8_mask(bytes, bytes);
        store64(mask + done / 8, there);
        _mm512_storeu_si512(value, _mm512_maskz_compress_epi8(there, bytes));
        value += _mm_popcnt_u64(there);
    }
    *count = (size_t)(value - values);
    return done;
}

AVX512_COMPRESS
size_t vector_unmask(const uint8_t *mask, const uint8_t *values, size_t count, uint8_t *data, size_t size,
                     size_t *taken)
{
    size_t done = 0, used = 0;
    /* Whole vectors of values are read: the last ones are left to the caller. */
    for (; size - done >= 64 && count - used >= 64; done += 64) {
        __mmask64 there = load64(mask + done / 8);
        _mm512_storeu_si512(data + done, _mm512_maskz_expand_epi8(there, _mm512_loadu_si512(values + used)));
        used += (size_t)_mm_popcnt_u64(there);
    }
    *taken = used;
    return done;
}

AVX512_COMPRESS
size_t vector_list_sparse(const uint8_t *data, size_t size, uint8_t *gaps, uint8_t *values, sparse_lists *lists)
{
    uint8_t numbers[64];
    for (unsigned i = 0; i < 64; i++)
        numbers[i] = (uint8_t)i;
    const __m512i places = _mm512_loadu_si512(numbers), one = _mm512_set1_epi8(1);
    const __m512i before = _mm512_sub_epi8(places, one);
    uint8_t *gap = gaps, *value = values;
    size_t zeros = 0, done = 0;
    for (; size - done >= 64; done += 64) {
        __m512i bytes = _mm512_loadu_si512(data + done);
        __mmask64 there = _mm512_test_epi8_mask(bytes, bytes);
        if (!there) {
            zeros += 64;
            continue;
        }
        unsigned count = (unsigned)_mm_popcnt_u64(there), first = (unsigned)__builtin_ctzll(there);
        /* Distances to the place before, less one; the first is counted from the block before. */
        __m512i at = _mm512_maskz_compress_epi8(there, places);
        __m512i distance = _mm512_sub_epi8(at, _mm512_add_epi8(_mm512_permutexvar_epi8(before, at), one));
        for (zeros += first; zeros >= 255; zeros -= 255)
            *gap++ = 255;
        _mm512_storeu_si512(gap, distance);
        *gap = (uint8_t)zeros;
        _mm512_storeu_si512(value, _mm512_maskz_compress_epi8(there, bytes));
        gap += count;
        value += count;
        zeros = (size_t)__builtin_clzll(there);
    }
    *lists = (sparse_lists){(size_t)(gap - gaps), (size_t)(value - values), zeros};
    return done;
}

int vector_sparse_available(void)
{
    static int known = -1;
    if (known < 0)
        known = vector_available() && __builtin_cpu_supports("avx512vbmi2") && __builtin_cpu_supports("popcnt");
    return known;
}

#else

int vector_available(void)
{
    return 0;
}

void vector_note_absent(const uint8_t *data, size_t size, uint32_t counts[256])
{
    (void)data, (void)size, (void)counts;
}

void vector_encode(const code_table *codes, const uint8_t *data, partial_stream *stream)
{
    (void)codes, (void)data, (void)stream;
}

int vector_sparse_available(void)
{
    return 0;
}

size_t vector_mask(const uint8_t *data, size_t size, uint8_t *mask, uint8_t *values, size_t *count)
{
    (void)data, (void)size, (void)mask, (void)values, (void)count;
    return 0;
}

size_t vector_unmask(const uint8_t *mask, const uint8_t *values, size_t count, uint8_t *data, size_t size,
                     size_t *taken)
{
    (void)mask, (void)values, (void)count, (void)data, (void)size, (void)taken;
    return 0;
}

size_t vector_list_sparse(const uint8_t *data, size_t size, uint8_t *gaps, uint8_t *values, sparse_lists *lists)
{
    (void)data, (void)size, (void)gaps, (void)values, (void)lists;
    return 0;
}

#endif
