/* tests/data/allocations.h: a loader is made and gives a batch with each allocation failing in its
 * turn. */
#ifndef KNAP_TESTS_DATA_ALLOCATIONS_H
#define KNAP_TESTS_DATA_ALLOCATIONS_H

#include "data/images.h"
#include "tests/failing.h"

#ifdef KN_DEBUG /* a debug build keeps dead handles for a while; its leaks the sanitizer sees */
#define METADATA_IS_EXACT 0
#else
#define METADATA_IS_EXACT 1
#endif

/* make gives a loader or NULL, and leaves a set of images that it opened in *set. An allocation
 * that fails is an error, gives no batch, and leaves nothing behind. most: there are fewer. */
static inline void fail_each_allocation(kn_loader *(*make)(const char *folder, kn_image_set **set),
                                        const char *folder, int64_t most)
{
    for (int64_t n = 0; n <= most; n++) { /* the first run, in which none fails, warms pools */
        const kn_ledger before = kn_ledger_read();
        kn_image_set *set = NULL;
        kn_loader *l = NULL;
        kn_scope scope = kn_scope_begin();
        const bool ok = WITH_FAILING(n, (l = make(folder, &set)) && kn_next(l).x);
        kn_scope_end(scope);
        kn_loader_free(l);
        kn_image_set_free(set);
        const kn_ledger now = kn_ledger_read();
        const bool metadata_is_left =
            METADATA_IS_EXACT && now.live[KN_MEM_HOST] != before.live[KN_MEM_HOST];
        KN_CHECK(n == 0 || (now.live[KN_MEM_DATA] == before.live[KN_MEM_DATA] && !metadata_is_left),
                 "allocation %d leaks", (int)n);
        if (ok && n > 0)
            return;
    }
    KN_CHECK(false, "more than %d allocations", (int)most);
}

#endif
