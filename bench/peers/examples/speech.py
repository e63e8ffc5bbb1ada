"""A recognizer learns to spell what it hears: torchrun --nproc-per-node N speech.py [--steps N]"""
import argparse

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

BATCH, MICRO = 8, 4
LETTERS, WORD, LONGEST, BANDS, HIDDEN = 9, 6, 5, 16, 64
FRAMES = WORD * LONGEST


class Recognizer(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(BANDS, HIDDEN, num_layers=2, bidirectional=True)
        self.head = nn.Linear(2 * HIDDEN, LETTERS + 1)

    def forward(self, x, frames):
        packed = pack_padded_sequence(x, frames, enforce_sorted=False)
        heard, _ = pad_packed_sequence(self.lstm(packed)[0], total_length=FRAMES)
        return F.log_softmax(self.head(heard), -1)


def spoken():
    letters = torch.randint(1, LETTERS + 1, (BATCH, WORD))
    times = torch.randint(2, LONGEST + 1, (BATCH, WORD))
    frames = times.sum(1)
    bands = torch.arange(1, BANDS + 1)
    x = torch.zeros(FRAMES, BATCH, BANDS)
    for b in range(BATCH):
        sounds = letters[b].repeat_interleave(times[b])
        x[:frames[b], b] = torch.sin((sounds[:, None] * bands).to(x.dtype))
    x = x + 0.5 * torch.randn(FRAMES, BATCH, BANDS)
    return x, frames, letters, torch.full((BATCH,), WORD)


def learn(net):
    x, frames, letters, count = spoken()
    loss = F.ctc_loss(net(x, frames), letters, frames, count) / MICRO
    loss.backward()
    return loss.item()


def train(net, steps):
    opt = torch.optim.AdamW(net.parameters(), lr=3e-3, weight_decay=0.01)
    for step in range(steps):
        loss = torch.tensor(0.0)
        for _ in range(dist.get_rank(), MICRO, dist.get_world_size()):
            loss += learn(net)
        opt.step()
        opt.zero_grad()
        dist.all_reduce(loss)
        if dist.get_rank() == 0 and (step % 20 == 0 or step == steps - 1):
            print(f'step {step:4d}  loss {loss:.6f}')


def name(letter):
    return chr(ord('a') - 1 + letter)


def spell(net):
    net.eval()
    x, frames, letters, _ = spoken()
    with torch.no_grad():
        best = net(x, frames).argmax(-1)
    for b in range(3 if dist.get_rank() == 0 else 0):
        heard = torch.unique_consecutive(best[:frames[b], b])
        print('said', ''.join(map(name, letters[b])), ' heard', ''.join(name(c) for c in heard if c != 0))


def main():
    parser = argparse.ArgumentParser(description='An LSTM learns to spell.')
    parser.add_argument('--steps', type=int, default=200, help='to train')
    args = parser.parse_args()
    dist.init_process_group('gloo')
    if MICRO % dist.get_world_size():
        parser.error(f"{MICRO} micro-batches don't divide among {dist.get_world_size()} ranks")
    torch.manual_seed(1)
    net = Recognizer()
    for module in (net.lstm, net):
        fully_shard(module)
    train(net, args.steps)
    spell(net)
    dist.destroy_process_group()


if __name__ == '__main__':
    main()
