#include "alloc/stats.h"

#include <stddef.h>
#include <string.h>

static const char *const keys[] = {
#define STAT_KEY(name, key, text) key,
    MO_STAT_LIST(STAT_KEY)
#undef STAT_KEY
};

void mo_stats_reset_peaks(mo_stats *stats)
{
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        for (int column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            stats->of[kind][column].peak = stats->of[kind][column].current;
}

void mo_stats_reset_accumulated(mo_stats *stats)
{
    for (int kind = 0; kind < MO_STAT_KIND_COUNT; kind++)
        for (int column = 0; column < MO_STAT_COLUMN_COUNT; column++)
            stats->of[kind][column].allocated = stats->of[kind][column].freed = 0;
    memset((char *)stats + offsetof(mo_stats, num_alloc_retries), 0,
           sizeof *stats - offsetof(mo_stats, num_alloc_retries));
}

const char *mo_stat_key(mo_stat_kind kind)
{
    return keys[kind];
}
