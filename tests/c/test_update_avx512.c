#define KERNELS mo_update_avx512
#include "update_kernel_tests.h"

TEST_MAIN
