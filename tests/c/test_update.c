/* Each thing that a job may lack or have wrong is refused, by the parameter's number and with what to do, before anything else. */
#include "optim/update.h"

#include "test.h"

static MO_ALIGNED(16) float memory[2048];
static mo_hyper groups[2];
static mo_parameter parameters[2];
static mo_update_job job;

static void good(void)
{
    for (int k = 0; k < 2; k++) {
        groups[k] = (mo_hyper){.rule = MO_ADAM, .lr = 1e-3, .beta1 = 0.9, .beta2 = 0.999, .eps = 1e-8};
        parameters[k] = (mo_parameter){
            .p = (uintptr_t)memory,
            .g = (uintptr_t)(memory + 300),
            .m = (uintptr_t)(memory + 600),
            .v = (uintptr_t)(memory + 900),
            .step = (uintptr_t)(memory + 1200),
            .count = 300,
            .group = (uint32_t)k,
        };
    }
    job = (mo_update_job){.parameters = parameters, .count = 2, .groups = groups, .group_count = 2};
}

#define CHECK_ACCEPTED()                                                                                     \
    do {                                                                                                     \
        mo_detail detail_ = {.text = ""};                                                                    \
        test_checks++;                                                                                       \
        if (mo_update_check(&job, &detail_) != MO_OK)                                                        \
            TEST_FAIL("refused: %s", detail_.text);                                                          \
    } while (0)

/* Sets one thing wrong (an expression on the good job), is told so in those words, and sets all right again. */
#define CHECK_REFUSED(wrong, words)                                                                          \
    do {                                                                                                     \
        mo_detail detail_ = {.text = ""};                                                                    \
        (void)(wrong);                                                                                       \
        CHECK_EQ(mo_update_check(&job, &detail_), MO_INVALID);                                               \
        if (!strstr(detail_.text, words))                                                                    \
            TEST_FAIL("said not \"%s\" but \"%s\"", words, detail_.text);                                    \
        CHECK_EQ(mo_update_check(&job, NULL), MO_INVALID);                                                   \
        good();                                                                                              \
    } while (0)

TEST(what_is_right_is_accepted)
{
    good();
    CHECK_ACCEPTED();
    job.count = 0;
    CHECK_ACCEPTED();
    good();
    parameters[1] =
        (mo_parameter){.step = (uintptr_t)memory}; /* no element: no address is looked at but the step's */
    CHECK_ACCEPTED();
    good();
    groups[1] = (mo_hyper){.rule = MO_SGD};
    parameters[1].m = parameters[1].v = parameters[1].step = 0;
    CHECK_ACCEPTED();
    good();
    parameters[1].m_scale = parameters[1].v_scale = (uintptr_t)memory;
    parameters[1].code_bits = 4;
    parameters[1].m++; /* codes need no alignment */
    CHECK_ACCEPTED();
    good();
    parameters[1].kind = parameters[1].state_kind = MO_BF16;
    parameters[1].master = (uintptr_t)memory;
    CHECK_ACCEPTED();
    good();
    parameters[1].kind = parameters[1].grad_kind = MO_F64;
    CHECK_ACCEPTED();
}

TEST(an_array_that_is_missing_or_misaligned_is_named)
{
    good();
    CHECK_REFUSED(parameters[1].p = 0, "parameter 1: its parameter");
    CHECK_REFUSED(parameters[1].p += 2, "parameter 1: its parameter");
    CHECK_REFUSED(parameters[0].g = 0, "parameter 0: its gradient");
    CHECK_REFUSED(parameters[1].m = 0, "parameter 1: its first moment");
    CHECK_REFUSED(parameters[1].m += 1, "parameter 1: its first moment");
    CHECK_REFUSED(parameters[1].v = 0, "parameter 1: its second moment");
    CHECK_REFUSED(groups[1].amsgrad = true, "parameter 1: its largest second moment");
    CHECK_REFUSED((groups[1].rule = MO_SGD, groups[1].momentum = 0.9, parameters[1].m = 0),
                  "its momentum buffer");
    CHECK_REFUSED((parameters[1].kind = MO_F16, parameters[1].master = (uintptr_t)memory + 2),
                  "its master parameter");
    CHECK_REFUSED(parameters[1].count = SIZE_MAX / 2, "does not have 9223372036854775807 elements");
    CHECK_REFUSED(parameters[1].p = UINTPTR_MAX - 3, "parameter 1: its parameter");
    CHECK_REFUSED(parameters[1].step = 0, "parameter 1: its step");
    CHECK_REFUSED(parameters[1].step += 1, "parameter 1: its step");
}

TEST(kinds_that_do_not_go_together_are_refused)
{
    good();
    CHECK_REFUSED(parameters[1].kind = MO_FLOAT_COUNT, "parameter 1: kinds 4, 0, 0");
    CHECK_REFUSED(parameters[1].grad_kind = (mo_float)-1, "parameter 1: kinds");
    CHECK_REFUSED(parameters[1].state_kind = (mo_float)77, "parameter 1: kinds");
    CHECK_REFUSED(parameters[1].grad_kind = MO_F64, "its gradient is of fp64");
    CHECK_REFUSED(parameters[1].state_kind = MO_BF16, "its states are of bf16");
    CHECK_REFUSED((parameters[1].kind = MO_F16, parameters[1].state_kind = MO_BF16),
                  "its states are of bf16");
    CHECK_REFUSED(parameters[1].master = (uintptr_t)memory, "has a master");
    CHECK_REFUSED((groups[1].rule = MO_SGD, groups[1].stochastic = true, parameters[1].kind = MO_BF16,
                   parameters[1].step = 0),
                  "must have a step");
}

TEST(codes_have_both_scales_and_a_rule_that_knows_them)
{
    mo_parameter *const a = &parameters[1];
    const uintptr_t scales = (uintptr_t)memory;

    good();
    CHECK_REFUSED(a->m_scale = scales, "parameter 1: codes of 0 bits");
    CHECK_REFUSED((a->m_scale = a->v_scale = scales, a->code_bits = 5), "parameter 1: codes of 5 bits");
    for (unsigned bits = 4; bits <= 8; bits += 4) {
        const char *const said = bits == 8 ? "8-bit states" : "4-bit states";
        CHECK_REFUSED((a->code_bits = bits, a->m_scale = scales), "parameter 1: the scales");
        CHECK_REFUSED((a->code_bits = bits, a->v_scale = scales), "parameter 1: the scales");
        CHECK_REFUSED((a->code_bits = bits, a->m_scale = scales, a->v_scale = scales + 1),
                      "not both 2 of fp32");
        CHECK_REFUSED((a->code_bits = bits, a->m_scale = a->v_scale = scales, groups[1].amsgrad = true),
                      said);
        CHECK_REFUSED((a->code_bits = bits, a->m_scale = a->v_scale = scales, a->kind = MO_F64), said);
        CHECK_REFUSED((a->code_bits = bits, a->m_scale = a->v_scale = scales, a->m = 0),
                      bits == 8 ? "300 elements of 8 bits" : "300 elements of 4 bits");
    }
}

TEST(a_coded_momentum_buffer_has_8_bits_a_scale_and_a_step)
{
    mo_parameter *const a = &parameters[1];

#define CODED                                                                                                \
    a->code_bits = 8, a->m_scale = (uintptr_t)memory, a->v = 0, groups[1].rule = MO_SGD,                     \
    groups[1].momentum = 0.9
    good();
    CODED;
    CHECK_ACCEPTED();
    good();
    CHECK_REFUSED((CODED, a->code_bits = 4), "parameter 1: SGD has states of 4 bits");
    CHECK_REFUSED((CODED, a->m_scale = 0), "2 scales");
    CHECK_REFUSED((CODED, a->m_scale += 1), "2 scales");
    CHECK_REFUSED((CODED, a->step = 0), "a step count");
    CHECK_REFUSED((CODED, groups[1].momentum = 0), "with a momentum");
    CHECK_REFUSED((CODED, a->kind = MO_F64), "on fp32, fp16 or bf16");
    CHECK_REFUSED((CODED, a->m = 0), "its momentum buffer at 0 does not have 300 elements of 8 bits");
#undef CODED
}

static void factored(mo_parameter *a)
{
    a->v = 0;
    a->row = a->column = job.scratch = (uintptr_t)memory;
    a->columns = 30;
}

TEST(factored_second_moments_are_of_a_matrix_and_of_a_rule_that_knows_them)
{
    mo_parameter *const a = &parameters[1];

    good();
    factored(a);
    CHECK_ACCEPTED();
    CHECK_EQ(mo_update_scratch(&job), 4 * (2 + 10 + 30));
    a->code_bits = 4;
    a->m_scale = (uintptr_t)memory;
    CHECK_ACCEPTED();
    good();
    CHECK_REFUSED((factored(a), a->columns = 31),
                  "parameter 1: its 300 elements are no matrix of 31 columns");
    CHECK_REFUSED((factored(a), a->columns = 6), "no matrix of 6 columns, at least 8");
    CHECK_REFUSED((factored(a), a->columns = 0), "no matrix of 0 columns");
    CHECK_REFUSED((factored(a), a->row = 0), "the averages of its rows at 0");
    CHECK_REFUSED((factored(a), a->column += 2), "are not 10 and 30 of fp32");
    CHECK_REFUSED((factored(a), a->column = 0), "are not 10 and 30 of fp32");
    CHECK_REFUSED((factored(a), groups[1].rule = MO_SGD), "factored second moments are supported for Adam");
    CHECK_REFUSED((factored(a), groups[1].amsgrad = true), "factored second moments are supported for Adam");
    CHECK_REFUSED((factored(a), a->kind = MO_F64), "factored second moments are supported for Adam");
    CHECK_REFUSED((factored(a), job.scratch = 0), "needs scratch memory");
}

TEST(groups_and_single_values_are_checked)
{
    good();
    CHECK_REFUSED(parameters[1].group = 2, "parameter 1 is in group 2 of 2");
    CHECK_REFUSED(groups[1].rule = MO_RULE_COUNT, "group 1");
    CHECK_REFUSED(groups[0].lr_address = (uintptr_t)memory + 2, "group 0: lr");
    CHECK_REFUSED((groups[1].lr_address = (uintptr_t)memory, groups[1].lr_kind = MO_F16), "group 1: lr");
    CHECK_REFUSED(job.factor = 2, "factor");
    CHECK_REFUSED(job.found_inf = 3, "found_inf");
}

TEST_MAIN
