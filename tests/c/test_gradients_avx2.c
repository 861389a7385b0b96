#include "base/isa.h"

#define ISA MO_ISA_AVX2

#include "gradients_isa_tests.h"

TEST_MAIN
