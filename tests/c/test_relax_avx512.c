#define RELAX mo_relax_avx512
#define REACH mo_reach_avx512
#define ISA   MO_ISA_AVX512
#include "relax_isa_tests.h"

TEST_MAIN
