/* tests/models/vision_test.c: residual nets and vision transformers: values at the beginning,
 * images that don't fit; vision_golden_test.c compares their numbers, family_test.c has what every
 * model does. */
#include "tests/models/small_models.h"

/* At first each block is its shortcut, since its last batch norm multiplies by 0. */
KN_TEST(vision, residual_blocks_begin_as_their_shortcuts)
{
    for (int kind = RESNET; kind <= CIFAR; kind++) {
        kn_module n;
        make_small(&n, kind, KN_F32, 1);
        kn_scope s = kn_scope_begin();
        kn_tensor *gamma = kn_module_param(&n, kind == BOTTLENECKS ? "layer1.0.bn3.weight"
                                                                   : "layer1.0.bn2.weight");
        KN_CHECK(kn_item(kn_sum(kn_abs(gamma), 0, NULL, false)) == 0);
        kn_tensor *w = kn_module_param(&n, "conv1.weight"); /* variance 2 / fan_out */
        double want = sqrt(2.0 / (double)(kn_numel(w) / 3));
        double deviation = kn_item(kn_std(w, 0, NULL, false));
        KN_CHECK(fabs(deviation / want - 1) < 0.25, "%g, not %g", deviation, want);
        kn_scope_end(s);
        kn_module_free(&n);
    }
}

KN_TEST(vision, images_that_do_not_fit)
{
    for (int kind = RESNET; kind <= VIT; kind++) {
        kn_module n;
        make_small(&n, kind, KN_F32, 1);
        kn_scope s = kn_scope_begin();
        REFUSED(kn_call(&n, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(2, 1, 16, 16))), "takes [N,3,");
        REFUSED(kn_call(&n, kn_zeros(KN_F32, KN_CPU, KN_SHAPE(3, 16, 16))), "takes [N,3,");
        kn_scope_end(s);
        kn_module_free(&n);
    }
}
