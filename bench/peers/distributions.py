"""bench/peers/distributions.py: rows of autograd/distributions.h beside torch.distributions."""
import torch
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from operations import row


def pair(d, *kinds):
    """Inputs of these kinds, whose shapes broadcast."""
    inputs = d.broadcast(len(kinds))
    return [d.input(i.values.shape, kind) for i, kind in zip(inputs, kinds)]


def distribution(name, kinds, in_torch, judge):
    @row('kn_' + name, judge)
    def _(d):
        return pair(d, *kinds), lambda k, *t: getattr(k, name)(*t), in_torch


M, S, U = 'normal', 'positive', 'unit'
distribution('normal_log_prob', (M, S, M), lambda m, s, x: Normal(m, s).log_prob(x), 'Normal.log_prob')
distribution('normal_entropy', (S,), lambda s: Normal(s.detach(), s).entropy(), 'Normal.entropy')
distribution('normal_kl', (M, S, M, S), lambda m, s, n, t: kl_divergence(Normal(m, s), Normal(n, t)), 'kl_divergence of Normal')
distribution('bernoulli_log_prob', (M, U), lambda m, x: Bernoulli(logits=m, validate_args=False).log_prob(x), 'Bernoulli.log_prob')
distribution('bernoulli_entropy', (M,), lambda m: Bernoulli(logits=m).entropy(), 'Bernoulli.entropy')
distribution('bernoulli_kl', (M, M), lambda *t: kl_divergence(*(Bernoulli(logits=m) for m in torch.broadcast_tensors(*t))),
             'kl_divergence of Bernoulli')


def logits(d, count):
    shape, classes = d.shape(most=3), d.int(1, 6)
    return [d.input([*shape, classes]) for _ in range(count)]


@row('kn_categorical_log_prob', 'Categorical.log_prob')
def _(d):
    x, = logits(d, 1)
    return [x, d.index(x.values.shape[:-1], x.values.shape[-1])], lambda k, x, i: k.categorical_log_prob(x, i), \
        lambda x, i: Categorical(logits=x).log_prob(i)


@row('kn_categorical_entropy', 'Categorical.entropy')
def _(d):
    return logits(d, 1), lambda k, x: k.categorical_entropy(x), lambda x: Categorical(logits=x).entropy()


@row('kn_categorical_kl', 'kl_divergence of Categorical')
def _(d):
    return logits(d, 2), lambda k, p, q: k.categorical_kl(p, q), \
        lambda p, q: kl_divergence(Categorical(logits=p), Categorical(logits=q))
