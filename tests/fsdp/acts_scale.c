/* tests/fsdp/acts_scale.c: the reference's scaler, by optim/optim.h: which scale each backward's
 * gradients carry, what a step may take, how the scale moves. */
#include "tests/fsdp/acts_plain.h"

int plain_scale(const plain *s, int place)
{
    int found = -1;
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; plain_under(s, i, place) && r < s->ranks; r++)
            for (int n = 0; n < ACTS_MOST; n++) {
                if (!(plain_passes(s, i, place, r) >> n & 1))
                    continue;
                if (found >= 0 && found != s->scaler.number[n])
                    return -1;
                found = s->scaler.number[n];
            }
    return found < 0 ? 0 : found;
}

/* A step is to come whose gradients began with the newest scale. */
static bool waits(const plain *s)
{
    for (int i = 0; i < ACTS_PARAMS; i++)
        for (int r = 0; plain_stepped_at(s, i) >= 0 && r < s->ranks; r++) {
            set all = s->of[i][group_of(s, i, r)].passes | s->held[i][r].passes;
            int n = 0;
            while (n < ACTS_MOST && !(all >> n & 1))
                n++;
            if (n < ACTS_MOST && s->scaler.number[n] == s->scaler.carried)
                return true;
        }
    return false;
}

void plain_scale_loss(plain *s, int backward)
{
    if (s->scaler.moved && !(s->scaler.carried && waits(s))) {
        s->scaler.of[++s->scaler.carried] = s->scaler.scale;
        s->scaler.moved = false;
    }
    s->scaler.number[backward] = s->scaler.carried;
}

bool plain_may_scaler_step(const plain *s, int place, int scale)
{
    return scale == s->scaler.carried && !s->scaler.turned[place];
}

static void end_iteration(plain *s)
{
    bool found = s->scaler.found, grows = !found && ++s->scaler.good == ACTS_INTERVAL;
    s->scaler.scale *= found ? 0.5 : grows ? 2 : 1;
    s->scaler.good = found || grows ? 0 : s->scaler.good;
    s->scaler.found = false;
    s->scaler.moved = true;
}

void plain_scaler_stepped(plain *s, int place, bool overflow)
{
    s->scaler.found |= overflow;
    s->scaler.stepped = s->scaler.turned[place] = s->p->optims != 0;
    if (!s->p->optims)
        end_iteration(s);
}

bool plain_scaler_update(plain *s)
{
    if (!s->scaler.stepped)
        return false;
    end_iteration(s);
    s->scaler.stepped = false;
    memset(s->scaler.turned, 0, sizeof s->scaler.turned);
    return true;
}
