#define RUN mo_adam8_avx2
#define ISA MO_ISA_AVX2
#include "adam8_kernel_tests.h"

TEST_MAIN
