#define RELAX mo_relax_avx2
#define REACH mo_reach_avx2
#define ISA   MO_ISA_AVX2
#include "relax_isa_tests.h"

TEST_MAIN
