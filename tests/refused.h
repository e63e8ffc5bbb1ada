/* tests/refused.h: REFUSED, which is in kn_test.h now. */
#include "tests/kn_test.h"
