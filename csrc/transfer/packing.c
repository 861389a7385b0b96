#include "transfer/packing.h"

#include <string.h>

#include "base/assert.h"
#include "base/parallel.h"
#include "base/size.h"

typedef struct packing {
    char *to;
    const mo_packed *pieces;
    size_t count;
} packing;

static void pack_range(void *user, size_t begin, size_t end)
{
    const packing *p = user;

    for (size_t i = 0; i < p->count && p->pieces[i].offset < end; i++) {
        const mo_packed *piece = &p->pieces[i];
        const size_t first = piece->offset < begin ? begin : piece->offset;
        const size_t last = mo_size_min(piece->offset + piece->size, end);
        if (first < last)
            memcpy(p->to + first, (const char *)piece->from + (first - piece->offset), last - first);
    }
}

void mo_pack(void *to, const mo_packed *pieces, size_t count)
{
    packing p = {to, pieces, count};

    for (size_t i = 1; i < count; i++)
        MO_ASSERT(pieces[i].offset >= pieces[i - 1].offset + pieces[i - 1].size);
    if (count)
        mo_parallel_for(pieces[count - 1].offset + pieces[count - 1].size, MO_PACK_GRAIN, pack_range, &p);
}
