#include "base/isa.h"

#define ISA MO_ISA_AVX512

#include "gradients_isa_tests.h"

TEST_MAIN
