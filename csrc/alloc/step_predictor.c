#include "alloc/step_predictor.h"

#include "base/hostmem.h"

#define PLACES 131072         /* a power of two */
#define FACTOR 0x100000001B3u /* FNV's prime */

mo_status mo_step_predictor_open(mo_step_predictor *predictor, mo_detail *detail)
{
    *predictor = (mo_step_predictor){0};
    predictor->log = mo_host_calloc(MO_STEP_PREDICTOR_LOG, sizeof *predictor->log);
    predictor->places = mo_host_calloc(PLACES, sizeof *predictor->places);
    if (predictor->log && predictor->places)
        return MO_OK;
    mo_step_predictor_close(predictor);
    return mo_fail(detail, MO_NO_HOST_MEMORY, 0, "no host memory for the record of the last step");
}

void mo_step_predictor_close(mo_step_predictor *predictor)
{
    mo_host_free(predictor->log);
    mo_host_free(predictor->places);
    *predictor = (mo_step_predictor){0};
}

static uint32_t mix(uint64_t x)
{
    x *= 0x9E3779B97F4A7C15u;
    x ^= x >> 29;
    x *= 0xBF58476D1CE4E5B9u;
    return (uint32_t)(x >> 32);
}

uint32_t mo_step_predictor_signature(size_t size, unsigned stream, uint64_t arena)
{
    return mix(size ^ (uint64_t)stream << 56 ^ arena << 48);
}

static mo_step_predictor_entry *entry(const mo_step_predictor *predictor, uint32_t place)
{
    return &predictor->log[place & (MO_STEP_PREDICTOR_LOG - 1)];
}

/* A place that was not overwritten since. */
static bool remembered(const mo_step_predictor *predictor, uint32_t place)
{
    uint32_t age = predictor->written - place;

    return age && age < MO_STEP_PREDICTOR_LOG;
}

/* The context with one signature more, less the one that is MO_STEP_PREDICTOR_CONTEXT older:
 *
 *     sum = signature[0] + FACTOR signature[-1] + FACTOR^2 signature[-2] …        modulo 2^64 */
static uint64_t context_after(const mo_step_predictor *predictor, uint32_t place, uint32_t signature)
{
    uint64_t oldest = entry(predictor, place - MO_STEP_PREDICTOR_CONTEXT)->signature;

    for (int i = 1; i < MO_STEP_PREDICTOR_CONTEXT; i++)
        oldest *= FACTOR;
    return (predictor->context - oldest) * FACTOR + signature;
}

mo_address mo_step_predictor_predict(mo_step_predictor *predictor, uint32_t signature)
{
    const mo_step_predictor_entry *e = entry(predictor, predictor->place);

    predictor->context_next = context_after(predictor, predictor->written, signature);
    predictor->latest = &predictor->places[mix(predictor->context_next) & (PLACES - 1)];
    __builtin_prefetch(predictor->latest,
                       1); /* half a megabyte of them: on its way while the request is served */
    predictor->matched =
        predictor->following && remembered(predictor, predictor->place) && e->signature == signature;
    return predictor->matched ? e->address : 0;
}

void mo_step_predictor_learn(mo_step_predictor *predictor, uint32_t signature, mo_address address)
{
    uint32_t here = predictor->written, earlier;

    predictor->context = predictor->context_next;
    *entry(predictor, here) = (mo_step_predictor_entry){address, signature};
    predictor->written++;
    if (predictor->matched) {
        *predictor->latest =
            here + 1; /* written, not read: what is not in the cache need not be waited for */
        predictor->place++;
        predictor->run++;
        return;
    }
    earlier = *predictor->latest;
    *predictor->latest = here + 1;
    /* `earlier` is the place after the context's last occurrence: what follows it may follow now. */
    predictor->run = 0;
    predictor->following = earlier && remembered(predictor, earlier);
    predictor->place = earlier;
    __builtin_prefetch(entry(predictor, earlier)); /* for the next request */
}
