/* What the parts of the kernel share. All lengths are in bytes unless they are said to be something else. */
#ifndef GPUIMG_KERNEL_COMMON_H
#define GPUIMG_KERNEL_COMMON_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the kernel is written for little-endian processors"
#endif

/* Loops that the compiler turns into vectors are compiled for several processors and chosen at run time. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__linux__)
#define VECTORS __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define BIT_TRICKS __attribute__((target_clones("arch=x86-64-v3", "default")))
#else
#define VECTORS
#define BIT_TRICKS
#endif

#define RESTRICT __restrict__

static inline uint64_t load64(const uint8_t *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline void store64(uint8_t *to, uint64_t value)
{
    memcpy(to, &value, sizeof value);
}

static inline void store32(uint8_t *to, uint32_t value)
{
    memcpy(to, &value, sizeof value);
}

static inline uint32_t load32(const uint8_t *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return value;
}

static inline unsigned highest_bit(uint32_t value)
{
    return 31 - (unsigned)__builtin_clz(value);
}

#endif
