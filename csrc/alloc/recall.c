#include "alloc/recall.h"

#include "base/hostmem.h"

#define PLACES 131072 /* a power of two */

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

mo_address mo_recall_foretell(mo_recall *recall, uint32_t signature)
{
    const mo_recall_entry *e = entry(recall, recall->place);

    if (!recall->following || !remembered(recall, recall->place) || e->signature != signature)
        return 0;
    return e->address;
}

/* Hash of the last MO_RECALL_CONTEXT signatures up to and with the one at `place`. */
static uint32_t context_at(const mo_recall *recall, uint32_t place)
{
    uint64_t sum = 0;

    for (uint32_t i = 0; i < MO_RECALL_CONTEXT; i++)
        sum = sum * 0x100000001B3u + entry(recall, place - i)->signature;
    return mix(sum) & (PLACES - 1);
}

void mo_recall_learn(mo_recall *recall, uint32_t signature, mo_address address)
{
    uint32_t here = recall->written, context, earlier;
    bool foretold = recall->following && remembered(recall, recall->place) &&
                    entry(recall, recall->place)->signature == signature;

    *entry(recall, here) = (mo_recall_entry){address, signature};
    recall->written++;
    context = context_at(recall, here);
    earlier = recall->places[context];
    recall->places[context] = here + 1;
    if (foretold) {
        recall->place++;
        recall->run++;
        return;
    }
    /* `earlier` is the place after the context's last occurrence: what follows it may follow now. */
    recall->run = 0;
    recall->following = earlier && remembered(recall, earlier);
    recall->place = earlier;
}
