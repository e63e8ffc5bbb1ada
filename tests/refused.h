/* tests/refused.h: a call that must fail with an error that has text in it. */
#ifndef KNAP_TESTS_REFUSED_H
#define KNAP_TESTS_REFUSED_H

#include "tests/kn_test.h"

#define REFUSED(call, text)                                                                        \
    do {                                                                                           \
        KN_CHECK(!(call), "%s succeeds", #call);                                                   \
        KN_CHECK_ERROR(text);                                                                      \
    } while (0)

#endif
