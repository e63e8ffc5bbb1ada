/* nn/marks.h (private): which parameters there were when something was made for each of them. */
#ifndef KNAP_NN_MARKS_H
#define KNAP_NN_MARKS_H

#include "nn/nn_internal.h"

typedef struct kn_mark {
    uint64_t id; /* kn_leaf.id */
    const kn_param_source *source;
    int64_t part; /* elements of this rank's */
    char *name;
} kn_mark;
typedef struct kn_marks {
    kn_mark *mark;
    int count;
} kn_marks;
bool kn_marks_begin(kn_marks *marks, const kn_param *p, int n); /* ended in either case */
void kn_marks_end(kn_marks *marks);
/* True where p[n] are still those; else an error of what, with thing, a noun for what was made. */
bool kn_marks_hold(const kn_marks *marks, const kn_param *p, int n, const char *thing,
                   const char *what);

#endif
