"""A language model of LSTMs on packed sequences, and its perplexity."""

import argparse
import math

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=64)
parser.add_argument("--longest", type=int, default=256)
parser.add_argument("--width", type=int, default=1024)
parser.add_argument("--vocabulary", type=int, default=20000)
parser.add_argument("--steps", type=int, default=3)
args = parser.parse_args()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(args.vocabulary, args.width, padding_idx=0)
        self.lstm = nn.LSTM(args.width, args.width, 2, batch_first=True, dropout=0.2)
        self.head = nn.Linear(args.width, args.vocabulary)

    def forward(self, texts, lengths):
        packed = pack_padded_sequence(self.embedding(texts), lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.lstm(packed)
        states, _ = pad_packed_sequence(states, batch_first=True, total_length=texts.shape[1])
        return self.head(states)


torch.manual_seed(0)
model = Model().to("cuda")
optimizer = torch.optim.Adam(model.parameters(), 1e-3)
for step in range(args.steps):
    lengths = torch.randint(args.longest // 2, args.longest + 1, (args.batch_size,))
    texts = pad_sequence([torch.randint(1, args.vocabulary, (int(n),)) for n in lengths], batch_first=True)
    texts = texts.to("cuda")
    logits = model(texts[:, :-1], lengths - 1)
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), texts[:, 1:].flatten(), ignore_index=0)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"step {step}: perplexity {math.exp(min(20.0, loss.item())):.1f}")
