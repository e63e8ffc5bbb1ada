"""bench/peers/bundled_gpt.py: GPT-2 with the names of published checkpoints, for bench/peers/examples/lora.py: in PyTorch
a package holds it, as models/gpt.c does in Knap."""
import torch
import torch.nn as nn
import torch.nn.functional as F


class Conv1D(nn.Module):
    def __init__(self, fan_in, fan_out):
        super().__init__()
        self.weight = nn.Parameter(0.02 * torch.empty(fan_in, fan_out).normal_())
        self.bias = nn.Parameter(torch.zeros(fan_out))

    def forward(self, x):
        return x @ self.weight + self.bias


class Attention(nn.Module):
    def __init__(self, embd, heads):
        super().__init__()
        self.c_attn, self.c_proj, self.heads = Conv1D(embd, 3 * embd), Conv1D(embd, embd), heads

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.c_attn(x).chunk(3, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).reshape(b, t, c))


class MLP(nn.Module):
    def __init__(self, embd):
        super().__init__()
        self.c_fc, self.c_proj = Conv1D(embd, 4 * embd), Conv1D(4 * embd, embd)

    def forward(self, x):
        return self.c_proj(F.gelu(self.c_fc(x), approximate='tanh'))


class Block(nn.Module):
    def __init__(self, embd, heads):
        super().__init__()
        self.ln_1, self.attn = nn.LayerNorm(embd), Attention(embd, heads)
        self.ln_2, self.mlp = nn.LayerNorm(embd), MLP(embd)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, layers, heads, embd, ctx, vocab):
        super().__init__()
        self.transformer = nn.Module()
        self.transformer.wte, self.transformer.wpe = nn.Embedding(vocab, embd), nn.Embedding(ctx, embd)
        self.transformer.h = nn.ModuleList(Block(embd, heads) for _ in range(layers))
        self.transformer.ln_f = nn.LayerNorm(embd)

    def forward(self, ids):
        t = self.transformer
        x = t.wte(ids) + t.wpe(torch.arange(ids.shape[1]))
        for block in t.h:
            x = block(x)
        return F.linear(t.ln_f(x), t.wte.weight)
