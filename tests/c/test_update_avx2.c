#define KERNELS mo_update_avx2
#include "update_kernel_tests.h"

TEST_MAIN
