#define RELAX mo_relax_generic
#define REACH mo_reach_generic
#define ISA   MO_ISA_GENERIC
#include "relax_isa_tests.h"

TEST_MAIN
