/* Jobs over whole lists against an oracle in double, on every instruction set that this processor has and with the items
 * dealt out in several ways: the bits are the same. */
#include "scaler/gradients.h"

#include <pthread.h>
#include <sys/mman.h>

#include "base/hostmem.h"
#include "base/parallel.h"
#include "child.h"
#include "gradients_oracle.h"
#include "scaler/gradients_kernels.h"

/* ---- ways to deal items out ------------------------------------------------------------------------------------ */

static void all_at_once(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    (void)grain;
    if (count > 0)
        body(user, 0, count);
}

static void backwards(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    (void)grain;
    for (size_t i = count; i-- > 0;)
        body(user, i, i + 1);
}

typedef struct share {
    mo_parallel_body body;
    void *user;
    size_t begin, end;
    pthread_t thread;
} share;

static void *run_share(void *user)
{
    share *s = user;
    s->body(s->user, s->begin, s->end);
    return NULL;
}

static void on_five_threads(size_t count, size_t grain, mo_parallel_body body, void *user)
{
    share shares[5];
    (void)grain;
    for (size_t i = 0; i < 5; i++) {
        shares[i] = (share){body, user, count * i / 5, count * (i + 1) / 5, 0};
        if (pthread_create(&shares[i].thread, NULL, run_share, &shares[i]) != 0)
            abort();
    }
    for (size_t i = 0; i < 5; i++)
        pthread_join(shares[i].thread, NULL);
}

static const mo_parallel_way ways[] = {all_at_once, backwards, on_five_threads};

/* ---- a list and what a pass should make of it ------------------------------------------------------------------- */

typedef struct list {
    piece *pieces;
    mo_gradient *gradients;
    size_t count;
} list;

static list make_list(size_t count)
{
    return (list){calloc(count, sizeof(piece)), calloc(count, sizeof(mo_gradient)), count};
}

static void list_put(list *l, size_t i, piece p)
{
    l->pieces[i] = p;
    l->gradients[i] = (mo_gradient){.address = (uintptr_t)p.x, .count = p.count, .kind = p.kind};
}

static list copy_list(const list *from)
{
    list to = make_list(from->count);
    for (size_t i = 0; i < from->count; i++) {
        const piece *p = &from->pieces[i];
        list_put(&to, i, make_piece(p->kind, p->count, ((uintptr_t)p->x & 63) / mo_float_size(p->kind)));
        memcpy(to.pieces[i].x, p->x, p->bytes);
    }
    return to;
}

static void free_list(list *l)
{
    for (size_t i = 0; i < l->count; i++)
        free_piece(&l->pieces[i]);
    free(l->pieces);
    free(l->gradients);
}

typedef struct results {
    float inv_scale, found_inf, norm, clip, factor;
    float unused; /* so that all of the struct's bytes are values, which are compared */
    double norm64;
} results;

static const results untouched = {1, -3, -4, -5, -6, 0, -7};

static mo_gradients_job make_job(const list *l, unsigned passes, results *r)
{
    return (mo_gradients_job){
        .gradients = l->gradients,
        .count = l->count,
        .passes = passes,
        .inv_scale = (uintptr_t)&r->inv_scale,
        .found_inf = (uintptr_t)&r->found_inf,
        .norm = (uintptr_t)&r->norm,
        .norm64 = (uintptr_t)&r->norm64,
        .clip = (uintptr_t)&r->clip,
        .factor = (uintptr_t)&r->factor,
        .max_norm = 1.5,
    };
}

/* Makes *l what it should become; what the four results should be, the norm before it is rounded to fp32. */
static results expect(list *l, unsigned passes, float inv_scale, double *out_norm)
{
    const bool stores = passes & MO_GRADIENTS_STORE && inv_scale != 1;
    double sum = 0, maximum = 0, norm;
    results r = untouched;

    r.inv_scale = inv_scale;
    for (size_t g = 0; g < l->count; g++)
        for (size_t i = 0; i < l->pieces[g].count; i++) {
            const mo_float kind = l->pieces[g].kind;
            element e = element_at(kind, l->pieces[g].x, i);
            if (!isfinite(value_of(kind, e)) && passes & MO_GRADIENTS_CHECK)
                r.found_inf = 1;
            if (stores)
                put_element(kind, l->pieces[g].x, i, e = scaled_element(kind, e, inv_scale));
            const double y = value_of(kind, e);
            sum += y * y;
            maximum = isnan(maximum) || fabs(y) <= maximum ? maximum : fabs(y);
        }
    norm = passes & MO_GRADIENTS_MAXIMUM ? maximum : sqrt(sum);
    *out_norm = stores ? norm : norm * fabs((double)inv_scale);
    return r;
}

static bool same_float(float a, float b)
{
    return mo_float_bits(a) == mo_float_bits(b) || (isnan(a) && isnan(b));
}

static void check_results(results got, results expected, double norm, unsigned passes)
{
    if (passes & MO_GRADIENTS_NORM) {
        const double ratio = 1.5 / ((double)got.norm + 1e-6);
        expected.clip = isnan(got.norm) ? NAN : ratio < 1 ? (float)ratio : 1;
        expected.factor = expected.inv_scale * expected.clip;
        if (isfinite(got.norm) && fabs(norm) < 0x1p-126) /* fp32's own steps are wider there */
            CHECK(fabs((double)got.norm - norm) <= 0x1p-149);
        else if (!near_norm((double)got.norm, (double)(float)norm))
            TEST_FAIL("passes %u: the norm is %.9g, not %.9g", passes, (double)got.norm, norm);
        expected.norm = (float)(expected.norm64 = got.norm64);
    }
    CHECK(same_float(got.inv_scale, expected.inv_scale));
    CHECK(same_float(got.found_inf, expected.found_inf));
    CHECK(same_float(got.norm, expected.norm));
    CHECK(got.norm64 == expected.norm64 || isnan(got.norm64));
    CHECK(same_float(got.clip, expected.clip));
    CHECK(same_float(got.factor, expected.factor));
}

static void check_list(const list *got, const list *expected, float scale)
{
    for (size_t g = 0; g < got->count; g++) {
        const piece *p = &got->pieces[g], *e = &expected->pieces[g];
        for (size_t i = 0; i < p->count; i++)
            if (!same_element(p->kind, element_at(p->kind, p->x, i), element_at(p->kind, e->x, i), scale))
                TEST_FAIL("%s[%zu], gradient %zu of %zu: element %zu is %#" PRIx64 ", not %#" PRIx64,
                          kind_names[p->kind], p->count, g, got->count, i, element_at(p->kind, p->x, i).bits,
                          element_at(p->kind, e->x, i).bits);
    }
}

/* On every instruction set, in every way: the oracle's results once, and then the same bits. */
static void check_job(const list *original, unsigned passes, float inv_scale)
{
    list oracle = copy_list(original);
    double norm;
    const results expected = expect(&oracle, passes, inv_scale, &norm);
    results first = untouched;

    for (mo_isa isa = MO_ISA_GENERIC; isa <= mo_isa_best(); isa++)
        for (size_t way = 0; way < sizeof ways / sizeof *ways; way++) {
            list l = copy_list(original);
            results r = untouched;
            mo_detail detail = {0};
            r.inv_scale = inv_scale;
            const mo_gradients_job job = make_job(&l, passes, &r);
            mo_gradients_use(mo_gradients_kernels_of(isa));
            mo_parallel_use(ways[way]);
            const mo_status status = mo_gradients_cpu(&job, &detail);
            mo_parallel_use(NULL);
            mo_gradients_use(NULL);
            if (status)
                TEST_FAIL("%s", detail.text);
            if (isa == MO_ISA_GENERIC && way == 0)
                first = r;
            CHECK(memcmp(&r, &first, sizeof r) == 0);
            check_results(r, expected, norm, passes);
            check_list(&l, &oracle, inv_scale);
            free_list(&l);
        }
    free_list(&oracle);
}

static list random_list(uint64_t *seed, size_t count, size_t longest, int low, int high)
{
    list l = make_list(count);
    for (size_t i = 0; i < count; i++) {
        const mo_float kind = (mo_float)(test_random(seed) % MO_FLOAT_COUNT);
        size_t elements = 0;
        if (test_random(seed) % 8 > 0)
            elements = (size_t)pow((double)longest, (double)(test_random(seed) >> 11) * 0x1p-53);
        list_put(&l, i, make_piece(kind, elements, test_random(seed) % 8));
        fill(&l.pieces[i], seed, low, high);
    }
    return l;
}

static const unsigned all_passes[] = {
    0,
    MO_GRADIENTS_CHECK,
    MO_GRADIENTS_STORE,
    MO_GRADIENTS_NORM,
    MO_GRADIENTS_CHECK | MO_GRADIENTS_NORM,
    MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE,
    MO_GRADIENTS_STORE | MO_GRADIENTS_NORM,
    MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE | MO_GRADIENTS_NORM,
    MO_GRADIENTS_NORM | MO_GRADIENTS_MAXIMUM,
    MO_GRADIENTS_CHECK | MO_GRADIENTS_NORM | MO_GRADIENTS_MAXIMUM,
    MO_GRADIENTS_CHECK | MO_GRADIENTS_STORE | MO_GRADIENTS_NORM | MO_GRADIENTS_MAXIMUM,
};
enum { PASSES = sizeof all_passes / sizeof *all_passes };

/* ---- tests ----------------------------------------------------------------------------------------------------- */

TEST(random_lists_of_every_kind)
{
    uint64_t seed = test_seed();
    const float scales[] = {1, 0.5f, 0.3f, 0x1p-16f, 3};

    for (int round = 0; round < test_rounds(40, 2000); round++) {
        list l = random_list(&seed, test_random(&seed) % 40, round % 8 == 0 ? 100000 : 3000, -12, 3);
        check_job(&l, all_passes[test_random(&seed) % PASSES], scales[test_random(&seed) % 5]);
        free_list(&l);
    }
}

TEST(every_pass_under_every_scale_where_elements_are_not_finite)
{
    uint64_t seed = test_seed();
    const float scales[] = {1, 0.3f, -0.3f, 0, 1e-45f, 0x1p127f, INFINITY, NAN};
    const float bad[] = {0, INFINITY, -INFINITY, NAN};

    for (size_t p = 0; p < PASSES; p++)
        for (size_t s = 0; s < sizeof scales / sizeof *scales; s++)
            for (size_t b = 0; b < 4; b++) {
                list l = random_list(&seed, 7, 2000, -12, 3);
                const piece *at = &l.pieces[test_random(&seed) % 7];
                if (at->count > 0)
                    put_element(at->kind, at->x, test_random(&seed) % at->count,
                                element_of(at->kind, bad[b]));
                check_job(&l, all_passes[p], scales[s]);
                free_list(&l);
            }
}

TEST(norms_of_numbers_whose_squares_overflow_or_vanish)
{
    uint64_t seed = test_seed();

    for (int exponent = -149; exponent <= 120; exponent += 7)
        for (int stores = 0; stores < 2; stores++) {
            list l = make_list(3);
            for (size_t i = 0; i < 3; i++) {
                list_put(&l, i, make_piece(i < 2 ? MO_F32 : MO_BF16, 1000 + i, i));
                fill(&l.pieces[i], &seed, exponent, exponent);
            }
            check_job(&l, stores ? 7 : 5, 0.75f);
            check_job(&l, stores ? 7 : 5, exponent < 0 ? 0x1p100f : 0x1p-100f);
            free_list(&l);
        }
}

TEST(no_elements_have_the_norm_0)
{
    list none = make_list(0), empty = make_list(3);
    for (size_t i = 0; i < 3; i++) {
        list_put(&empty, i, make_piece(MO_F16, 0, 0));
        empty.gradients[i].address = i; /* ignored */
    }
    for (size_t p = 0; p < PASSES; p++) {
        results r = untouched;
        mo_gradients_job job = make_job(&none, all_passes[p], &r);
        job.gradients = NULL;
        CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
        check_results(r, untouched, 0, all_passes[p]);
        r = untouched;
        job = make_job(&empty, all_passes[p], &r);
        CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
        check_results(r, untouched, 0, all_passes[p]);
    }
    free_list(&none);
    free_list(&empty);
}

TEST(results_are_written_where_an_address_is_given)
{
    uint64_t seed = test_seed();
    list l = random_list(&seed, 5, 500, 0, 3);

    for (unsigned given = 0; given < 32; given++) {
        results r = untouched, all = untouched;
        mo_gradients_job job = make_job(&l, 5, &all);
        CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
        job = make_job(&l, 5, &r);
        job.inv_scale = given & 1 ? job.inv_scale : 0; /* none is 1 */
        job.norm = given & 2 ? job.norm : 0;
        job.norm64 = given & 16 ? job.norm64 : 0;
        job.clip = given & 4 ? job.clip : 0;
        job.factor = given & 8 ? job.factor : 0;
        CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
        CHECK(r.norm == (given & 2 ? all.norm : untouched.norm));
        CHECK(r.norm64 == (given & 16 ? all.norm64 : untouched.norm64));
        CHECK(r.clip == (given & 4 ? all.clip : untouched.clip));
        CHECK(r.factor == (given & 8 ? all.factor : untouched.factor));
    }
    free_list(&l);
}

/* The pages are read-only: a store, even of the same bits, would end the test. */
TEST(what_need_not_change_is_not_written)
{
    const size_t bytes = (size_t)1 << 20;
    float *x = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    const float one = 1;
    CHECK(x != MAP_FAILED);

    for (mo_isa isa = MO_ISA_GENERIC; isa <= mo_isa_best(); isa++)
        for (mo_float kind = MO_F32; kind < MO_FLOAT_COUNT; kind++) {
            const mo_gradient g = {(uintptr_t)x, bytes / mo_float_size(kind) - 3, kind};
            list l = {NULL, (mo_gradient *)&g, 1};
            mo_gradients_use(mo_gradients_kernels_of(isa));
            for (size_t p = 0; p < PASSES; p++) {
                results r = untouched;
                mo_gradients_job job = make_job(&l, all_passes[p], &r);
                CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
                r.inv_scale = 0.5f;
                if (!(all_passes[p] & MO_GRADIENTS_STORE))
                    CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
            }
            CHECK_EQ(mo_gradients_clip_cpu(&g, 1, (uintptr_t)&one, NULL), MO_OK);
            mo_gradients_use(NULL);
        }
    munmap(x, bytes);
}

TEST(clipping_multiplies_and_a_nan_is_a_value_like_others)
{
    uint64_t seed = test_seed();
    const float clips[] = {1, 0.3f, 0, NAN};

    for (mo_isa isa = MO_ISA_GENERIC; isa <= mo_isa_best(); isa++)
        for (int c = 0; c < 4; c++) {
            list original = random_list(&seed, 30, 3000, -12, 3), l = copy_list(&original);
            for (size_t g = 0; g < l.count; g++)
                for (size_t i = 0; i < l.pieces[g].count; i++)
                    put_element(l.pieces[g].kind, original.pieces[g].x, i,
                                scaled_element(l.pieces[g].kind,
                                               element_at(l.pieces[g].kind, l.pieces[g].x, i), clips[c]));
            mo_gradients_use(mo_gradients_kernels_of(isa));
            CHECK_EQ(mo_gradients_clip_cpu(l.gradients, l.count, (uintptr_t)&clips[c], NULL), MO_OK);
            mo_gradients_use(NULL);
            check_list(&l, &original, clips[c]);
            free_list(&l);
            free_list(&original);
        }
}

TEST(thousands_of_tiny_gradients_and_one_large)
{
    uint64_t seed = test_seed();
    list l = make_list(5000);
    for (size_t i = 0; i < l.count; i++) {
        list_put(&l, i, make_piece(MO_F32, i == 2500 ? 300001 : i % 7, i % 3));
        fill(&l.pieces[i], &seed, -12, 3);
    }
    check_job(&l, 7, 0.3f);
    check_job(&l, 13, 0.3f);
    free_list(&l);
}

TEST(where_host_memory_is_short_nothing_has_changed)
{
    uint64_t seed = test_seed();
    list l = make_list(1), before;
    results r = untouched;
    mo_detail detail;
    const float half = 0.5f;

    list_put(&l, 0, make_piece(MO_F32, 3000000, 1));
    fill(&l.pieces[0], &seed, 0, 3);
    before = copy_list(&l);
    mo_gradients_job job = make_job(&l, 7, &r);
    r.inv_scale = 0.5f;
    const results same = r;
    const size_t live = mo_host_live();

    mo_host_fail_after(0);
    CHECK_EQ(mo_gradients_cpu(&job, &detail), MO_NO_HOST_MEMORY);
    CHECK_EQ(mo_gradients_clip_cpu(l.gradients, l.count, (uintptr_t)&half, NULL), MO_NO_HOST_MEMORY);
    mo_host_fail_never();
    CHECK(strstr(detail.text, "out of host memory for a table of"));
    check_list(&l, &before, 1);
    CHECK(memcmp(&r, &same, sizeof r) == 0);

    mo_host_fail_after(1); /* one table is all it asks for */
    CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
    mo_host_fail_after(1);
    CHECK_EQ(mo_gradients_clip_cpu(l.gradients, l.count, (uintptr_t)&half, NULL), MO_OK);
    mo_host_fail_after(0);
    job.count = 0; /* and for a short list not even that */
    CHECK_EQ(mo_gradients_cpu(&job, NULL), MO_OK);
    mo_host_fail_never();
    CHECK_EQ(mo_host_live(), live);
    free_list(&l);
    free_list(&before);
}

static void refused(const mo_gradients_job *job, const char *words)
{
    mo_detail detail;
    const results before = *(results *)job->inv_scale;
    CHECK_EQ(mo_gradients_cpu(job, &detail), MO_INVALID);
    if (!strstr(detail.text, words))
        TEST_FAIL("said not \"%s\" but \"%s\"", words, detail.text);
    CHECK_EQ(mo_gradients_cpu(job, NULL), MO_INVALID);
    CHECK(memcmp(&before, (results *)job->inv_scale, sizeof before) == 0);
}

TEST(what_cannot_be_done_is_refused_by_name_before_anything_changed)
{
    uint64_t seed = test_seed();
    list l = random_list(&seed, 20, 100, 0, 3), before;
    results r = untouched;
    mo_detail detail;
    mo_gradients_job job;

    r.inv_scale = 0.5f;
    job = make_job(&l, 7, &r);
    before = copy_list(&l);
    const mo_gradient good = l.gradients[17];

#define REFUSED(g, words)                                                                                    \
    do {                                                                                                     \
        const float half_ = 0.5f;                                                                            \
        l.gradients[17] = (mo_gradient)g;                                                                    \
        refused(&job, words);                                                                                \
        CHECK_EQ(mo_gradients_clip_cpu(l.gradients, l.count, (uintptr_t)&half_, &detail), MO_INVALID);       \
        CHECK(strstr(detail.text, words));                                                                   \
        l.gradients[17] = good;                                                                              \
    } while (0)
#define GRADIENT(...) {__VA_ARGS__}
    REFUSED(GRADIENT(64, 1, (mo_float)4), "gradient 17: element type 4: expected 0 (fp32)");
    REFUSED(GRADIENT(64, 0, (mo_float)-1), "gradient 17: element type -1");
    REFUSED(GRADIENT(0, 1, MO_F32), "gradient 17: address 0: expected a multiple of its elements' 4 bytes");
    REFUSED(GRADIENT(66, 1, MO_F32), "gradient 17: address 0x42: expected");
    REFUSED(GRADIENT(65, 1, MO_F16), "2 bytes");
    REFUSED(GRADIENT(68, 1, MO_F64), "8 bytes");
    REFUSED(GRADIENT(UINTPTR_MAX - 63, 32, MO_F32), "gradient 17: 32 elements of 4 bytes at 0x");
    REFUSED(GRADIENT(64, SIZE_MAX, MO_BF16), "run past the end of the address space");

    job.passes = 16;
    refused(&job, "passes 0x10: expected only the bits of 0xf");
    job = make_job(&l, 7, &r);
    job.found_inf = 0;
    refused(&job, "a check needs found_inf");
    job = make_job(&l, 7, &r);
    job.gradients = NULL;
    refused(&job, "a list of 20 gradients has no address");
    job = make_job(&l, 7, &r);
    job.factor += 2;
    refused(&job, "factor at 0x");
    job = make_job(&l, 7, &r);
    job.norm += 1;
    refused(&job, "norm at 0x");
    job.norm -= 1;
    job.norm64 += 4;
    refused(&job, "norm64 at 0x");
    CHECK_EQ(mo_gradients_clip_cpu(l.gradients, l.count, 0, &detail), MO_INVALID);
    CHECK_STR(detail.text, "clip at 0: expected the address of an fp32");
    CHECK_EQ(mo_gradients_clip_cpu(l.gradients, l.count, 6, NULL), MO_INVALID);
    check_list(&l, &before, 1);
    free_list(&l);
    free_list(&before);
}

/* ---- MEMOPT_ISA, each in a process of its own, for the environment's sake --------------------------------------------- */

static mo_status run_one(mo_detail *detail)
{
    float x[5] = {1, 2, 3, 4, 5};
    const mo_gradient g = {(uintptr_t)x, 5, MO_F32};
    list l = {NULL, (mo_gradient *)&g, 1};
    results r = untouched;
    const mo_gradients_job job = make_job(&l, 5, &r);
    const mo_status status = mo_gradients_cpu(&job, detail);
    CHECK(status || fabsf(r.norm - sqrtf(55)) < 1e-5f);
    return status;
}

static void asks_for_every_name(void)
{
    mo_detail detail;
    mo_gradients_use(NULL);
    setenv("MEMOPT_ISA", "sse9", 1);
    CHECK_EQ(run_one(&detail), MO_INVALID);
    CHECK(strstr(detail.text, "MEMOPT_ISA=sse9"));
    if (mo_isa_best() < MO_ISA_AVX512) {
        setenv("MEMOPT_ISA", "avx512", 1);
        CHECK_EQ(run_one(&detail), MO_UNSUPPORTED);
    }
    setenv("MEMOPT_ISA", mo_isa_name(mo_isa_best()), 1);
    CHECK_EQ(run_one(&detail), MO_OK);
    setenv("MEMOPT_ISA", "sse9", 1); /* read once */
    CHECK_EQ(run_one(&detail), MO_OK);
}

static void asks_for_the_generic(void)
{
    mo_gradients_use(NULL);
    setenv("MEMOPT_ISA", "generic", 1);
    CHECK_EQ(run_one(NULL), MO_OK);
}

TEST(the_instruction_set_is_the_one_asked_for_or_an_error)
{
    CHECK_CHILD(asks_for_every_name);
    CHECK_CHILD(asks_for_the_generic);
}

TEST_MAIN
