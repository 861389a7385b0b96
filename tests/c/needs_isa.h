/* A test of one instruction set's loops is skipped, and said to be, on a processor that lacks it. */
#ifndef MEMOPT_NEEDS_ISA_H
#define MEMOPT_NEEDS_ISA_H

#include "base/isa.h"
#include "test.h"

__attribute__((unused)) static void needs_isa(mo_isa isa)
{
    if (mo_isa_best() < isa)
        TEST_SKIP("this processor has no %s", mo_isa_name(isa));
}

#endif
