#define RUN mo_adam8_avx512
#define ISA MO_ISA_AVX512
#include "adam8_kernel_tests.h"

TEST_MAIN
