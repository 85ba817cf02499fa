#include "pages.h"

enum { SUMMED_WORDS = 64, MEAN_EXTRA_PAGES = 48 };
enum { ORDINARY, MARK, EMPTY };

VECTORS
static uint64_t merge_words(const uint8_t *data, size_t size)
{
    uint64_t merged = 0;
    for (size_t i = 0; i + 8 <= size; i += 8)
        merged |= load64(data + i);
    return merged;
}

int is_zero(const uint8_t *data, size_t size)
{
    /* Data is nearly always recognised by its beginning. */
    size_t step = PAGE, start = 0;
    for (; start + step <= size; start += step)
        if (merge_words(data + start, step))
            return 0;
    if (merge_words(data + start, size - start))
        return 0;
    for (size_t i = start + (size - start) / 8 * 8; i < size; i++)
        if (data[i])
            return 0;
    return 1;
}

VECTORS
static uint64_t sum_words(const uint8_t *page)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < SUMMED_WORDS; i++)
        sum += load64(page + 8 * i);
    return sum;
}

static uint8_t kind_of(const uint8_t *page)
{
    uint64_t sum = sum_words(page);
    if (!sum)
        return is_zero(page, PAGE) ? EMPTY : ORDINARY;
    return sum * 0x9E3779B97F4A7C15ull < UINT64_MAX / MEAN_EXTRA_PAGES ? MARK : ORDINARY;
}

typedef struct {
    const uint8_t *kinds;
    cut *cuts;
    size_t count;
} cutter;

static void add(cutter *to, size_t start, size_t stop, size_t partial, int zero)
{
    to->cuts[to->count++] = (cut){start * PAGE, (stop - start) * PAGE + partial, zero};
}

/* Cuts behind marks and at the greatest length; returns where the first cut that needs more pages starts. */
static size_t cut_at_marks(cutter *to, size_t start, size_t stop)
{
    for (;;) {
        size_t end = start + MIN_PAGES;
        while (end <= stop && end < start + MAX_PAGES && to->kinds[end - 1] != MARK)
            end++;
        if (end > stop)
            return start;
        add(to, start, end, 0, 0);
        start = end;
    }
}

static void cut_span(cutter *to, size_t start, size_t stop, size_t partial)
{
    start = cut_at_marks(to, start, stop);
    if (start < stop || partial)
        add(to, start, stop, partial, 0);
}

size_t pages_most_cuts(size_t size)
{
    return size / PAGE + 2;
}

size_t pages_cut(const uint8_t *data, size_t size, int last, int *inside, uint8_t *scratch, cut *cuts,
                 size_t *covered)
{
    size_t pages = size / PAGE, position = 0, stop = pages;
    for (size_t page = 0; page < pages; page++)
        scratch[page] = kind_of(data + page * PAGE);
    cutter made = {scratch, cuts, 0};
    for (size_t start = 0; start < pages;) {
        size_t end = start;
        while (end < pages && scratch[end] == EMPTY)
            end++;
        if (end == start) {
            start++;
            continue;
        }
        if (end - start >= MIN_PAGES || (start == 0 && *inside)) {
            cut_span(&made, position, start, 0);
            add(&made, start, end, 0, 1);
            position = end;
        } else if (end == pages && !last) {
            /* It may go on in the next buffer: nothing is cut behind its start yet. */
            stop = start;
        }
        start = end;
    }
    if (last) {
        cut_span(&made, position, pages, size % PAGE);
        *covered = size;
        return made.count;
    }
    size_t reached = cut_at_marks(&made, position, stop);
    if (made.count)
        *inside = made.cuts[made.count - 1].zero && reached == pages;
    *covered = reached * PAGE;
    return made.count;
}
