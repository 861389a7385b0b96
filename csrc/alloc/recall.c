#include "alloc/recall.h"

#include "base/hostmem.h"

#define PLACES 131072         /* a power of two */
#define FACTOR 0x100000001B3u /* FNV's prime */

mo_status mo_recall_open(mo_recall *recall, mo_detail *detail)
{
    *recall = (mo_recall){0};
    recall->log = mo_host_calloc(MO_RECALL_LOG, sizeof *recall->log);
    recall->places = mo_host_calloc(PLACES, sizeof *recall->places);
    if (recall->log && recall->places)
        return MO_OK;
    mo_recall_close(recall);
    return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for what a step did last time");
}

void mo_recall_close(mo_recall *recall)
{
    mo_host_free(recall->log);
    mo_host_free(recall->places);
    *recall = (mo_recall){0};
}

static uint32_t mix(uint64_t x)
{
    x *= 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return (uint32_t)(x >> 32);
}

uint32_t mo_recall_signature(size_t size, unsigned stream, uint64_t arena)
{
    return mix(size ^ (uint64_t)stream << 56 ^ arena << 48);
}

static mo_recall_entry *entry(const mo_recall *recall, uint32_t place)
{
    return &recall->log[place & (MO_RECALL_LOG - 1)];
}

/* A place that was not overwritten since. */
static bool remembered(const mo_recall *recall, uint32_t place)
{
    uint32_t age = recall->written - place;

    return age && age < MO_RECALL_LOG;
}

/* The context with one signature more, less the one that is MO_RECALL_CONTEXT older:
 *
 *     sum = signature[0] + FACTOR signature[-1] + FACTOR^2 signature[-2] …        modulo 2^64 */
static uint64_t context_after(const mo_recall *recall, uint32_t place, uint32_t signature)
{
    uint64_t oldest = entry(recall, place - MO_RECALL_CONTEXT)->signature;

    for (int i = 1; i < MO_RECALL_CONTEXT; i++)
        oldest *= FACTOR;
    return (recall->context - oldest) * FACTOR + signature;
}

mo_address mo_recall_foretell(mo_recall *recall, uint32_t signature)
{
    const mo_recall_entry *e = entry(recall, recall->place);

    recall->context_next = context_after(recall, recall->written, signature);
    recall->latest = &recall->places[mix(recall->context_next) & (PLACES - 1)];
    __builtin_prefetch(recall->latest,
                       1); /* half a megabyte of them: on its way while the request is served */
    recall->matched = recall->following && remembered(recall, recall->place) && e->signature == signature;
    return recall->matched ? e->address : 0;
}

void mo_recall_learn(mo_recall *recall, uint32_t signature, mo_address address)
{
    uint32_t here = recall->written, earlier;

    recall->context = recall->context_next;
    *entry(recall, here) = (mo_recall_entry){address, signature};
    recall->written++;
    if (recall->matched) {
        *recall->latest = here + 1; /* written, not read: what is not in the cache need not be waited for */
        recall->place++;
        recall->run++;
        return;
    }
    earlier = *recall->latest;
    *recall->latest = here + 1;
    /* `earlier` is the place after the context's last occurrence: what follows it may follow now. */
    recall->run = 0;
    recall->following = earlier && remembered(recall, earlier);
    recall->place = earlier;
    __builtin_prefetch(entry(recall, earlier)); /* for the next request */
}
