#include "base/isa.h"

#define ISA MO_ISA_GENERIC

#include "gradients_isa_tests.h"

TEST_MAIN
