/* kernels/cells.h (private): the cells of recurrent layers, in the words of kernels/formulas.h. p
 * are the sums of inputs, q those of the state before, one a gate (kernels/sequence_args.h);
 *
 *   LSTM  i, f, o = sigmoid(p + q), g = tanh(p + q);  c' = f c + i g;  h' = o tanh(c')
 *   GRU   r, z = sigmoid(p + q), n = tanh(p + r q);   h' = n + z (h - n)
 *   TANH, RELU                                        h' = tanh(p + q), max(p + q, 0)
 *
 * (Hochreiter and Schmidhuber, 1997; Cho et al., arXiv:1406.1078; PyTorch's variants of both.) */
#ifndef KNAP_KERNELS_CELLS_H
#define KNAP_KERNELS_CELLS_H

/* Returns h'; p becomes the gates, and *kept, c before, c' (LSTM) or q of n (GRU). */
KN_FORMULA v_cell(kn_cell cell, v_num *p, const v_num *q, v_num h, v_num *kept)
{
    if (cell == KN_CELL_LSTM) {
        p[0] = v_sigmoid(p[0] + q[0]);
        p[1] = v_sigmoid(p[1] + q[1]);
        p[2] = v_tanh(p[2] + q[2]);
        p[3] = v_sigmoid(p[3] + q[3]);
        *kept = v_fma(p[1], *kept, p[0] * p[2]);
        return p[3] * v_tanh(*kept);
    }
    if (cell == KN_CELL_GRU) {
        p[0] = v_sigmoid(p[0] + q[0]);
        p[1] = v_sigmoid(p[1] + q[1]);
        p[2] = v_tanh(v_fma(p[0], q[2], p[2]));
        *kept = q[2];
        return v_fma(p[1], h - p[2], p[2]);
    }
    p[0] = cell == KN_CELL_TANH ? v_tanh(p[0] + q[0]) : v_relu(p[0] + q[0]);
    return p[0];
}

/* From the gates in p, h or c before, kept and the gradients dh of h' and *dc of c' (LSTM): those
 * of p in p and of q in q (GRU; elsewhere they are those of p); *dc becomes that of c before.
 * Returns the gradient of h before that doesn't go through q. */
KN_FORMULA v_cell_grad(kn_cell cell, v_num *p, v_num *q, v_num before, v_num kept, v_num dh,
                       v_num *dc)
{
    const v_num one = v_set1(1);
    if (cell == KN_CELL_LSTM) {
        const v_num i = p[0], f = p[1], g = p[2], o = p[3], t = v_tanh(kept);
        const v_num d = v_fma(dh * o, one - t * t, *dc);
        p[0] = d * g * (i * (one - i));
        p[1] = d * before * (f * (one - f));
        p[2] = d * i * (one - g * g);
        p[3] = dh * t * (o * (one - o));
        *dc = d * f;
        return v_zero();
    }
    if (cell == KN_CELL_GRU) {
        const v_num r = p[0], z = p[1], n = p[2], dn = dh * (one - z) * (one - n * n);
        q[0] = p[0] = dn * kept * (r * (one - r));
        q[1] = p[1] = dh * (before - n) * (z * (one - z));
        p[2] = dn;
        q[2] = dn * r;
        return dh * z;
    }
    p[0] =
        cell == KN_CELL_TANH ? dh * (one - p[0] * p[0]) : v_sel(v_gt(p[0], v_zero()), dh, v_zero());
    return v_zero();
}

#endif
