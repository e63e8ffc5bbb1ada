"""Tokens/s of training GPT-2 124M in PyTorch, the model of bench/gpt2.c, with the settings of nanoGPT: bf16
autocast, f32 masters, fused AdamW, clipping, attention by scaled_dot_product_attention, a vocabulary of 50304.
Batches are doubled until one doesn't fit; the last line is the fastest. For scripts/gpu-check --part peers."""
import argparse
import time

import torch
import torch.nn as nn
import torch.nn.functional as F


class Block(nn.Module):
    def __init__(self, c, heads):
        super().__init__()
        self.ln_1, self.ln_2, self.heads = nn.LayerNorm(c), nn.LayerNorm(c), heads
        self.attn, self.proj = nn.Linear(c, 3 * c), nn.Linear(c, c)
        self.fc, self.out = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)

    def forward(self, x):
        b, t, c = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.attn(self.ln_1(x)).split(c, 2))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, c))
        return x + self.out(F.gelu(self.fc(self.ln_2(x)), approximate="tanh"))


class GPT(nn.Module):
    def __init__(self, layers=12, heads=12, c=768, ctx=1024, vocab=50304):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, c), nn.Embedding(ctx, c)
        self.h = nn.ModuleList(Block(c, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(c)

    def forward(self, ids, targets):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.h:
            x = block(x)
        logits = F.linear(self.ln_f(x), self.wte.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def measure(a, batch):
    """Seconds a step."""
    model = GPT(ctx=a.ctx).cuda()
    run = torch.compile(model) if a.compile else model
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(0, 50257, (batch, a.ctx), device="cuda")
    for i in range(a.steps + 5):
        if i == 5:
            torch.cuda.synchronize()
            begin = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(ids, ids.roll(-1, 1))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / a.steps


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--batch", type=int, default=16, help="the first")
    p.add_argument("--most", type=int, default=128, help="the last")
    p.add_argument("--ctx", type=int, default=1024)
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--compile", action="store_true")
    a = p.parse_args()
    torch.set_float32_matmul_precision("high")
    lines, batch = [], a.batch
    while batch <= a.most:
        torch.cuda.reset_peak_memory_stats()
        try:
            spent = measure(a, batch)
        except torch.cuda.OutOfMemoryError:
            print(f"batch {batch} does not fit")
            break
        finally:
            torch.compiler.reset()
            torch.cuda.empty_cache()
        how = "compiled" if a.compile else "eager"
        line = (f"torch {torch.__version__} {how} gpt2 bf16, batch {batch} x {a.ctx}: {1e3 * spent:.2f} ms a step, "
                f"{batch * a.ctx / spent:.0f} tokens/s, peak {torch.cuda.max_memory_allocated() / 1e9:.2f} GB")
        print(line, flush=True)
        lines.append((batch * a.ctx / spent, line))
        batch *= 2
    if not lines:
        raise SystemExit("no batch fits")
    print("fastest: " + max(lines)[1])


if __name__ == "__main__":
    main()
